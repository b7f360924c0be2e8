// What a decode step does beside its matrix products, at the speed of memory: attention of one new column per row over
// that row's cached keys and values, and the choice of the likeliest token.
//
// Plain C++ that a compiler vectorises; no intrinsics, no torch headers, so that it compiles in a second. The prefetches
// are what matters: while keys are read, the values of the same row and head are on their way, and while values are
// read, the next head's keys. Hardware prefetchers stop at the end of a page, which is less than one head's cache.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void store(float& to, float x) { to = x; }
inline void store(bfloat16& to, float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0, relative error below 4e-7: 2^n e^r, |r| <= ln(2) / 2, the polynomial of Cephes. In the open, since
// a call into the C library would not be vectorised everywhere.
inline float exp_of_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int32_t n = int32_t(x * 1.44269504f - 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

template <typename T>
inline void prefetch(const T* line, int64_t count) {
  const char* at = reinterpret_cast<const char*>(line);
  for (int64_t offset = 0; offset < count * int64_t(sizeof(T)); offset += 64) __builtin_prefetch(at + offset);
}

// DIM: the head dimension, or 0 where it is known at run time only.
template <typename T, int DIM>
void attend(int64_t rows, int64_t heads, int64_t dim_, const T* q, const T* new_k, const T* new_v, int64_t row_stride,
            T* k, T* v, int64_t capacity, const int64_t* first, const int64_t* last, T* out, int num_threads) {
  const int64_t dim = DIM ? DIM : dim_;
  const float scale = 1.0f / std::sqrt(float(dim));
  const int64_t step = capacity * dim;  // from one head's cache to the next
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> weights(capacity), query(dim), sums(dim);
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < rows * heads; ++unit) {
      const int64_t row = unit / heads, start = first[row], end = last[row];
      const int64_t at = row * row_stride + (unit % heads) * dim;
      T *keys = k + unit * step, *values = v + unit * step;
      if (new_k) {
        std::memcpy(keys + end * dim, new_k + at, dim * sizeof(T));
        std::memcpy(values + end * dim, new_v + at, dim * sizeof(T));
      }
      for (int64_t d = 0; d < dim; ++d) query[d] = load(q[at + d]) * scale;

      float top = -FLT_MAX;
      for (int64_t s = start; s <= end; ++s) {
        const T* key = keys + s * dim;
        prefetch(values + s * dim, dim);
        float dot = 0.0f;
        for (int64_t d = 0; d < dim; ++d) dot += query[d] * load(key[d]);
        weights[s] = dot;
        top = dot > top ? dot : top;
      }
      float total = 0.0f;
      for (int64_t s = start; s <= end; ++s) {
        weights[s] = exp_of_negative(weights[s] - top);
        total += weights[s];
      }
      const T* next = keys + (unit + 1 < rows * heads ? step : 0);
      T* to = out + unit * dim;
      auto sum_up = [&](float* sum) {
        for (int64_t d = 0; d < dim; ++d) sum[d] = 0.0f;
        for (int64_t s = start; s <= end; ++s) {
          const T* value = values + s * dim;
          const float weight = weights[s];
          prefetch(next + s * dim, dim);
          for (int64_t d = 0; d < dim; ++d) sum[d] += weight * load(value[d]);
        }
        for (int64_t d = 0; d < dim; ++d) store(to[d], sum[d] / total);
      };
      if constexpr (DIM > 0) {
        float sum[DIM];  // in registers
        sum_up(sum);
      } else {
        sum_up(sums.data());
      }
    }
  }
}

template <typename T, typename... Args>
void attend_of(int64_t dim, int64_t rows, int64_t heads, Args... args) {
  const auto run = dim == 64    ? attend<T, 64>    // OPT-125m to 1.3B
                   : dim == 80  ? attend<T, 80>    // 2.7B
                   : dim == 128 ? attend<T, 128>   // 6.7B and larger
                                : attend<T, 0>;
  run(rows, heads, dim, args...);
}

constexpr int64_t BLOCK = 512;

template <typename T>
void argmax(int64_t rows, int64_t size, const T* x, int64_t* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* line = x + row * size;
    float best = -FLT_MAX;
    int64_t at = 0;  // the first block that holds `best`: only there its place is looked for, one by one
    for (int64_t from = 0; from < size; from += BLOCK) {
      const int64_t to = from + BLOCK < size ? from + BLOCK : size;
      float top = -FLT_MAX;
      for (int64_t i = from; i < to; ++i) top = load(line[i]) > top ? load(line[i]) : top;
      if (top > best) best = top, at = from;
    }
    const int64_t stop = at + BLOCK < size ? at + BLOCK : size;
    while (at < stop && load(line[at]) != best) ++at;
    out[row] = at < stop ? at : 0;  // nothing but NaN, or -inf, which is below all that `best` can be
  }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                             \
  extern "C" void attend_##NAME(int64_t dim, int64_t rows, int64_t heads, const T* q, const T* new_k,              \
                                const T* new_v, int64_t row_stride, T* k, T* v, int64_t capacity,                  \
                                const int64_t* first, const int64_t* last, T* out, int num_threads) {              \
    attend_of<T>(dim, rows, heads, q, new_k, new_v, row_stride, k, v, capacity, first, last, out, num_threads);    \
  }                                                                                                                 \
  extern "C" void argmax_##NAME(int64_t rows, int64_t size, const T* x, int64_t* out, int num_threads) {           \
    argmax<T>(rows, size, x, out, num_threads);                                                                    \
  }

EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
