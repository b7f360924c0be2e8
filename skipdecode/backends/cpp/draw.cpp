// The next token of each row from its logits, for any CPU: the most likely one, or one sampled after top-k and top-p,
// without sorting whole rows. A row's token does not depend on the other rows. The reference is `pick_by_sort` of
// skipdecode/backends/torch_sampling.py.

#include "buffer.h"
#include "numbers.h"

#include <algorithm>
#include <cfloat>
#include <vector>

namespace {

using namespace cpu;

constexpr int64_t BLOCK = 512;  // tokens compared or summed at once
// The most likely token weighs 1. Weights up to this one (e^-86.1) count as zero; exp_of_negatives returns at least
// e^-87.
constexpr float NONE = 4e-38f;
constexpr float COLDEST = 1e-30f;  // temperature: below it, the smaller one of two different logits has no weight
// Buckets of weights up to 1, by exponent and four bits of the mantissa, in the order of the weights.
constexpr int BUCKETS = (0x3f800000 >> 19) + 1;

struct Likeliest {
  float logit;
  int64_t token;  // the lowest of equal ones; NO_TOKEN if one is NaN or +inf; 0 if all are -inf, which is below all
};

template <typename T>
Likeliest likeliest(int64_t count, const T* logits) {
  float best = -FLT_MAX;
  int64_t at = 0;  // the first block that contains `best`: only there its index is searched for
  for (int64_t from = 0; from < count; from += BLOCK) {
    const int64_t to = std::min(from + BLOCK, count);
    float top = -FLT_MAX;
    int has_wrong = 0;
    for (int64_t i = from; i < to; ++i) {
      top = load(logits[i]) > top ? load(logits[i]) : top;
      has_wrong |= is_wrong(load(logits[i]));
    }
    if (has_wrong) return {0.0f, NO_TOKEN};
    if (top > best) best = top, at = from;
  }
  const int64_t stop = std::min(at + BLOCK, count);
  while (at < stop && load(logits[at]) != best) ++at;
  return {best, at < stop ? at : 0};
}

// e^((x - top) / temperature) of each logit: 0 to 1, whatever the logits are.
template <typename T>
void weigh(int64_t count, const T* logits, float top, float temperature, float* weights) {
  const Floats most = all(top), warmth = all(std::max(temperature, COLDEST));
  for (int64_t i = 0; i < count; i += 16) {
    const Floats x = (load_first(logits + i, count - i) - most) / warmth;
    store_first(weights + i, min(exp_of_negatives(x), all(1.0f)), count - i);
  }
}

int bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return std::min(int(bits >> 19), BUCKETS - 1);
}

// Tokens by falling logit, the lower index first among equal ones, sorted only as far as needed to find the cut.
template <typename T>
class Ranking {
 public:
  Ranking(int64_t count, const T* logits, const float* weights)
      : count_(count), logits_(logits), weights_(weights), counts_(BUCKETS), sums_(BUCKETS) {
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] <= NONE) continue;
      const int bucket = bucket_of(weights[i]);
      ++counts_[bucket], sums_[bucket] += weights[i];
    }
  }

  double mass() const {
    double mass = 0.0;
    for (const double sum : sums_) mass += sum;
    return mass;
  }

  struct Cut {
    int bucket;  // of the last token kept
    float logit;
    int64_t token;
    double mass;  // of all tokens kept
  };

  // Keeps the first `most` tokens as long as those before a token weigh less than `mass`; always keeps the first one.
  Cut cut(int64_t most, double mass) const {
    int64_t rank = 0;
    double before = 0.0;
    for (int bucket = BUCKETS - 1; bucket >= 0; --bucket) {
      if (counts_[bucket] == 0) continue;
      if (rank + counts_[bucket] < most && before + sums_[bucket] < mass) {
        rank += counts_[bucket], before += sums_[bucket];
        continue;
      }
      for (const int64_t token : ordered(bucket, most - rank)) {
        ++rank, before += weights_[token];
        if (rank >= most || before >= mass) return {bucket, load(logits_[token]), token, before};
      }
    }
    return {-1, 0.0f, 0, before};  // all are kept
  }

  bool stays(int64_t token, const Cut& cut) const {
    const int bucket = bucket_of(weights_[token]);
    const float logit = load(logits_[token]);
    return bucket > cut.bucket ||
           (bucket == cut.bucket && (logit > cut.logit || (logit == cut.logit && token <= cut.token)));
  }

 private:
  // The first `most` tokens of a bucket in order, or all.
  std::vector<int64_t> ordered(int bucket, int64_t most) const {
    std::vector<int64_t> own;
    own.reserve(counts_[bucket]);
    for (int64_t i = 0; i < count_; ++i)
      if (weights_[i] > NONE && bucket_of(weights_[i]) == bucket) own.push_back(i);
    const auto is_before = [&](int64_t x, int64_t y) {
      const float a = load(logits_[x]), b = load(logits_[y]);
      return a > b || (a == b && x < y);
    };
    if (most < int64_t(own.size())) {
      std::nth_element(own.begin(), own.begin() + most, own.end(), is_before);
      own.resize(most);
    }
    std::sort(own.begin(), own.end(), is_before);
    return own;
  }

  int64_t count_;
  const T* logits_;
  const float* weights_;
  std::vector<int64_t> counts_;
  std::vector<double> sums_;
};

// Zeroes the weights of tokens that top-k and top-p exclude.
template <typename T>
void zero_excluded(int64_t count, const T* logits, int64_t top_k, float top_p, float* weights) {
  const Ranking<T> ranking(count, logits, weights);
  typename Ranking<T>::Cut cut = {-1, 0.0f, 0, 0.0};
  if (top_k < count) cut = ranking.cut(top_k, DBL_MAX);
  if (top_p < 1.0f) cut = ranking.cut(top_k, top_p * (top_k < count ? cut.mass : ranking.mass()));
  for (int64_t i = 0; i < count; ++i)
    if (!ranking.stays(i, cut)) weights[i] = 0.0f;
}

float sum_of(int64_t count, const float* weights) {
  Floats total = all(0.0f);
  for (int64_t i = 0; i < count; i += 16) total = total + load_first(weights + i, count - i);
  return sum(total);
}

// The first token whose cumulative weight exceeds `uniform` times the total; `likeliest` if no token has any weight.
int64_t draw_token(int64_t count, const float* weights, float uniform, int64_t likeliest) {
  double quantized = 0.0, before = 0.0;
  for (int64_t from = 0; from < count; from += BLOCK) quantized += sum_of(std::min(BLOCK, count - from), weights + from);
  const double wanted = uniform * quantized;
  int64_t last = likeliest;
  for (int64_t from = 0; from < count; from += BLOCK) {
    const int64_t size = std::min(BLOCK, count - from);
    const double behind = before + sum_of(size, weights + from);
    if (behind > wanted) {  // if summing one by one rounds below that, it is the block's last token
      bool is_seen = false;
      for (int64_t i = from; i < from + size; ++i) {
        if (weights[i] <= NONE) continue;
        before += weights[i], last = i, is_seen = true;
        if (before > wanted) return i;
      }
      if (is_seen) return last;
    }
    before = behind;
  }
  return last;
}

template <typename T>
void draw(int64_t rows, int64_t count, const T* logits, const float* temperature, const int64_t* top_k, const float* top_p,
          const float* uniform, int64_t* out, int num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* own = logits + row * count;
    const Likeliest most = likeliest(count, own);
    out[row] = most.token;
    if (temperature[row] == 0.0f || most.token == NO_TOKEN) continue;
    thread_local Buffer<float> buffer;
    float* weights = buffer.reserve(count);
    weigh(count, own, most.logit, temperature[row], weights);
    if (top_k[row] < count || top_p[row] < 1.0f) zero_excluded(count, own, top_k[row], top_p[row], weights);
    out[row] = draw_token(count, weights, uniform[row], most.token);
  }
}

template <typename T>
void argmax(int64_t rows, int64_t count, const T* logits, int64_t* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t row = 0; row < rows; ++row) out[row] = likeliest(count, logits + row * count).token;
}

// -inf by its bits: the compiler takes all numbers for finite.
inline uint32_t lowest(float) { return 0xff800000; }
inline uint16_t lowest(bfloat16) { return 0xff80; }

// Replaces logits whose bit in `allowed` [rows, ceil(count / 32)] is 0 by -inf.
template <typename T>
void mask(int64_t rows, int64_t count, const uint32_t* allowed, T* logits, int num_threads) {
  const auto low = lowest(T{});
  const int64_t words = (count + 31) / 32;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t word = 0; word < words; ++word) {
      const uint32_t bits = allowed[row * words + word];
      if (bits == ~0u) continue;
      T* own = logits + row * count + 32 * word;
      for (int64_t i = 0; i < std::min<int64_t>(32, count - 32 * word); ++i)
        if (!(bits >> i & 1)) std::memcpy(own + i, &low, sizeof(T));
    }
}

}  // namespace

// logits [rows, count]; the other inputs have one element per row. top_k is at least 1.
#define EXPORT(NAME, T)                                                                                                 \
  extern "C" void argmax_##NAME(int64_t rows, int64_t count, const T* logits, int64_t* out, int num_threads) {          \
    argmax<T>(rows, count, logits, out, num_threads);                                                                   \
  }                                                                                                                     \
  extern "C" void mask_##NAME(int64_t rows, int64_t count, const uint32_t* allowed, T* logits, int num_threads) {       \
    mask<T>(rows, count, allowed, logits, num_threads);                                                                 \
  }                                                                                                                     \
  extern "C" void draw_##NAME(int64_t rows, int64_t count, const T* logits, const float* temperature,                   \
                              const int64_t* top_k, const float* top_p, const float* uniform, int64_t* out,             \
                              int num_threads) {                                                                        \
    draw<T>(rows, count, logits, temperature, top_k, top_p, uniform, out, num_threads);                                 \
  }

EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
