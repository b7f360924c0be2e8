// One decoder layer for whole prompts, in one parallel region. A thread takes a chunk of tokens through all of the layer,
// so that it finds its intermediate results in its own caches; before it attends, it waits for other threads to store the
// keys of earlier tokens of its first prompt. If there are few tokens, all threads share them instead (`Team`), and each
// reads some of the weights. `store_*` computes keys and values alone, of one layer or several, in the same way.
//
// Prompts are packed one after the other without padding. For finite inputs a token's bits depend only on its prompt up
// to that token; results with NaN and infinities are undefined.

#include "layer.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include <omp.h>

namespace {

using namespace cpu;

constexpr int64_t QUERIES = 128;     // queries of a prompt and head that share one packing of keys and values
constexpr int64_t TEAM_ROWS = 2048;  // tokens that threads share at a time
constexpr int64_t ENOUGH = 4;        // units of work per thread that are enough to balance the load

struct Prompts {
  int64_t count;
  const int64_t* starts;   // [count + 1]: of the prompts' tokens
  const int64_t* columns;  // [count]: the cache column of each prompt's first token
  const int64_t* before;   // [count]: earlier tokens of each prompt that are cached already; null: none
  const int64_t* slots;    // [count]: the row of the cache that each prompt has; null: its number

  int64_t begin(int64_t prompt) const { return starts[prompt] - (before ? before[prompt] : 0); }
};

// The keys or values of a prompt: its first `count` tokens are in `shared`, the others in `own`; both are indexed by the
// token's position in the prompt.
template <typename T>
struct Lines {
  const T* shared;
  int64_t count;
  const T* own;

  const T* at(int64_t token, int64_t dim) const { return (token < count ? shared : own) + token * dim; }
};

template <typename T>
struct Memory {
  T *k, *v;  // [prompts or slots, groups, capacity, dim]
  int64_t capacity;
  const Shared* shared;  // prefixes that are not in k and v, since several prompts read them; null: none

  int64_t at(const Prompts& prompts, int64_t prompt, const Heads& heads, int64_t group) const {  // its first token
    const int64_t row = prompts.slots ? prompts.slots[prompt] : prompt;
    return ((row * heads.groups + group) * capacity + prompts.columns[prompt]) * heads.dim;
  }

  Lines<T> lines(const Prompts& prompts, int64_t prompt, const Heads& heads, int64_t group, bool are_values) const {
    const T* own = (are_values ? v : k) + at(prompts, prompt, heads, group);
    const int64_t count = count_of(shared, prompt);
    return {count ? shared->line<T>(are_values ? shared->v : shared->k, prompt, group, heads.dim) : nullptr, count, own};
  }
};

// The tokens of one prompt within the tokens from..to - 1 of all.
struct Part {
  int64_t prompt, from, to;  // token positions in the prompt
  int64_t row;               // index of the first one, counted from the start of the range
};

std::vector<Part> parts_of(const Prompts& p, int64_t from, int64_t to, int64_t most) {
  std::vector<Part> parts;
  int64_t prompt = std::upper_bound(p.starts, p.starts + p.count, from) - p.starts - 1;
  for (int64_t at = from; at < to; ++prompt)
    for (const int64_t end = std::min(to, p.starts[prompt + 1]); at < end;) {
      const int64_t next = std::min(end, at + most);
      parts.push_back({prompt, at - p.begin(prompt), next - p.begin(prompt), at - from});
      at = next;
    }
  return parts;
}

#ifdef HAS_BFLOAT16

inline __mmask32 some(int64_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }
inline __m512i load_some(const bfloat16* from, int64_t count) { return _mm512_maskz_loadu_epi16(some(count), from); }

// Transposes 16 lines of 16 words.
inline void transpose(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {  // lines i and i + 4, i + 8 and i + 12: quarters 0 and 2, then 1 and 3
      y[4 * i + 2 * j] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + i + 4], 0x88);
      y[4 * i + 2 * j + 1] = _mm512_shuffle_i32x4(x[8 * j + i], x[8 * j + i + 4], 0xdd);
    }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[4 * i], y[4 * i + 2], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[4 * i], y[4 * i + 2], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[4 * i + 1], y[4 * i + 3], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[4 * i + 1], y[4 * i + 3], 0xdd);
  }
}

#endif

// Keys from `begin`, a multiple of 32, to `count` as a packed weight whose outputs are keys and whose inputs are
// dimensions: [keys / 32][dim / 32][2][tile].
#ifdef HAS_BFLOAT16
void pack_keys(int64_t begin, int64_t count, int64_t dim, const Lines<bfloat16>& keys, bfloat16* to) {
  for (int64_t s = begin; s < count; s += 32)
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t half = s; half < s + 32; half += 16, to += BLOCK / 2) {
        __m512i lines[16];
        for (int64_t i = 0; i < 16; ++i)
          lines[i] = half + i < count ? load_some(keys.at(half + i, dim) + d, dim - d) : _mm512_setzero_si512();
        transpose(lines);
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, lines[i]);
      }
}
#endif

void pack_keys(int64_t begin, int64_t count, int64_t dim, const Lines<float>& keys, float* to) {
  const float* lines[16];
  for (int64_t s = begin; s < count; s += 32)
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t half = s; half < s + 32; half += 16) {
        for (int64_t key = 0; key < 16; ++key) lines[key] = half + key < count ? keys.at(half + key, dim) : nullptr;
        for (int64_t i = d; i < d + 32; ++i)
          for (int64_t key = 0; key < 16; ++key) *to++ = lines[key] && i < dim ? lines[key][i] : 0.0f;
      }
}

// Values as a packed weight whose outputs are dimensions and whose inputs are keys: [dim / 32][keys / 32][2][tile]. Zeros
// after the last key, since zero times uninitialised memory may be NaN.
#ifdef HAS_BFLOAT16
void pack_values(int64_t begin, int64_t count, int64_t dim, const Lines<bfloat16>& values, bfloat16* to) {
  alignas(64) uint16_t first[32], second[32];  // indices that interleave two lines
  for (int i = 0; i < 16; ++i) {
    first[2 * i] = uint16_t(i), first[2 * i + 1] = uint16_t(32 + i);
    second[2 * i] = uint16_t(16 + i), second[2 * i + 1] = uint16_t(48 + i);
  }
  const __m512i low = _mm512_load_si512(first), high = _mm512_load_si512(second);
  for (int64_t d = 0; d < dim; d += 32)
    for (int64_t s = begin; s < count; s += 32, to += BLOCK)
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t at = s + 2 * i;
        const __m512i one = at < count ? load_some(values.at(at, dim) + d, dim - d) : _mm512_setzero_si512();
        const __m512i two = at + 1 < count ? load_some(values.at(at + 1, dim) + d, dim - d) : _mm512_setzero_si512();
        _mm512_store_si512(to + 32 * i, _mm512_permutex2var_epi16(one, low, two));
        _mm512_store_si512(to + BLOCK / 2 + 32 * i, _mm512_permutex2var_epi16(one, high, two));
      }
}
#endif

void pack_values(int64_t begin, int64_t count, int64_t dim, const Lines<float>& values, float* to) {
  for (int64_t d = 0; d < dim; d += 32)
    for (int64_t s = begin; s < count; s += 32)
      for (int64_t half = d; half < d + 32; half += 16)
        for (int64_t key = s; key < s + 32; ++key, to += 16)
          store16(to, key < count ? load_first(values.at(key, dim) + half, dim - half) : all(0.0f));
}

// Scores [blocks][32][32] of `count` queries, the first of which sees `seen` of these keys and each one more than the one
// before, to weights in the same order: e^(score - largest), zero after the last key. With a `window` (0: none) a query
// sees so many keys at most, the last ones, and weights before them are zero. `shares`: one over their sum. Goes block by
// block, in memory order, since a query's own scores are whole pages apart.
template <typename T>
void to_weights(int64_t count, int64_t seen, int64_t window, int64_t blocks, float scale, const float* scores, T* weights,
                float* shares) {
  auto only_seen = [&](int64_t query, int64_t key, Floats x, Floats y) {  // y where a key is not seen
    const Floats until = first_of(seen + query - key, x, y);
    return window ? first_of(seen + query - window - key, y, until) : until;
  };
  alignas(64) float tops[32][16], sums[32][16];
  for (auto& lane : tops) store16(lane, all(-FLT_MAX));
  for (auto& lane : sums) store16(lane, all(0.0f));
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t half = 0; half < 32; half += 16) {
        const Floats score = load16(scores + (32 * block + r) * 32 + half), top = load16(tops[r]);
        store16(tops[r], only_seen(r, 32 * block + half, max(top, score), top));
      }
  for (int64_t r = 0; r < count; ++r) store16(tops[r], all(largest(load16(tops[r]))));
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t half = 0; half < 32; half += 16) {
        const int64_t at = (32 * block + r) * 32 + half;
        const Floats weight = exp_of_negatives((load16(scores + at) - load16(tops[r])) * all(scale));
        const Floats kept = only_seen(r, 32 * block + half, weight, all(0.0f));
        store16(sums[r], load16(sums[r]) + kept);
        store_first(weights + at, kept, 16);
      }
  for (int64_t r = 0; r < count; ++r) shares[r] = 1.0f / sum(load16(sums[r]));
}

// Copies the queries of `count` tokens of a prompt and one head, the first at `position`, `stride` elements apart, to the
// layout that `multiply_tiles` reads.
template <typename T>
void lay_queries(const Heads& heads, int64_t count, int64_t position, const T* q, int64_t stride, Row<T>* to,
                 T* transformed) {
  const int64_t steps = (heads.dim + 31) / 32;
  std::memset(static_cast<void*>(to), 0, BLOCK * steps * sizeof(Row<T>));
  for (int64_t r = 0; r < count; ++r) {
    const T* from = q + r * stride;
    if (heads.transforms_queries()) {
      norm_and_rotate(heads, heads.q_norm, position + r, from, transformed);
      from = transformed;
    }
    for (int64_t i = 0; i < heads.dim; i += 16)
      store_first(to + (i / 32 * 32 + r) * 32 + i % 32, load_first(from + i, heads.dim - i), heads.dim - i);
  }
}

// Causal attention of tokens from..to - 1 of a prompt for `each` heads that share keys and values. q and out: tokens are
// `stride` and `out_stride` elements apart.
template <typename T>
void attend_part(const Heads& heads, int64_t each, int64_t from, int64_t to, const T* q, int64_t stride,
                 const Lines<T>& k, const Lines<T>& v, T* out, int64_t out_stride) {
  const int64_t begin = heads.hidden(from + 1) / 32 * 32;  // keys before it are beyond the window of all tokens
  const int64_t dim = heads.dim, steps = (dim + 31) / 32, blocks = (to - begin + 31) / 32;
  const float scale = 1.0f / std::sqrt(float(dim));
  thread_local Buffer<T> tiles_buffer;
  thread_local Buffer<Row<T>> rows_buffer;
  thread_local Buffer<float> scores_buffer;
  T* keys = tiles_buffer.reserve(BLOCK * 2 * steps * blocks + steps * 32);
  T *values = keys + BLOCK * steps * blocks, *transformed = values + BLOCK * steps * blocks;
  Row<T>*weights = rows_buffer.reserve(BLOCK * (blocks + steps)), *queries = weights + BLOCK * blocks;
  float *scores = scores_buffer.reserve(1024 * (blocks + 1)), *sums = scores + 1024 * blocks;
  pack_keys(begin, to, dim, k, keys);
  pack_values(begin, to, dim, v, values);
  for (int64_t unit = 0, groups = (to - from + 31) / 32; unit < each * groups; ++unit) {
    const int64_t head = unit / groups, first = from + unit % groups * 32;
    const int count = int(std::min<int64_t>(32, to - first));
    const int64_t unseen = (heads.hidden(first + 1) - begin) / 32;  // blocks of keys beyond the window of all of them
    const int64_t seen = (first + count - begin + 31) / 32 - unseen;
    lay_queries(heads, count, first, q + (first - from) * stride + head * dim, stride, queries, transformed);
    for (int64_t block = 0; block < seen; ++block)
      multiply_tiles(queries, BLOCK, count, keys + (unseen + block) * steps * BLOCK, steps, scores + 1024 * block, true,
                     nullptr, 0);
    float shares[32];
    to_weights(count, first + 1 - begin - 32 * unseen, heads.window, seen, scale, scores, weights, shares);
    T* to_out = out + (first - from) * out_stride + head * dim;
    for (int64_t step = 0; step < steps; ++step) {
      multiply_tiles(weights, BLOCK, count, values + (step * blocks + unseen) * BLOCK, seen, sums, true, nullptr, 0);
      const int64_t left = dim - 32 * step;
      for (int64_t r = 0; r < count; ++r)
        for (int64_t half = 0; half < 32; half += 16)
          store_first(to_out + r * out_stride + 32 * step + half, load16(sums + 32 * r + half) * all(shares[r]), left - half);
    }
  }
}

// Scratch memory for the tokens that go through a layer together.
template <typename T>
struct Scratch {
  T *narrow, *wide;
  QuantizedRows quantized;
};

// `made`: the largest number of elements per token that any product writes, including the attention output stored beside
// it.
template <typename T>
Scratch<T> scratch_for(int64_t rows, int64_t width, int64_t made, bool is_quantized) {
  thread_local Buffer<T> buffer;
  thread_local Buffer<uint8_t> tiles_buffer;
  thread_local Buffer<float> scales_buffer;
  T* narrow = buffer.reserve(rows * (width + made));
  return {narrow, narrow + rows * width,
          quantized_rows(is_quantized ? tiles_buffer.reserve(rows * ((std::max(width, made) + 63) / 64) * 128) : nullptr,
                         scales_buffer.reserve(rows), rows)};
}

// The layout in which a product reads its rows.
Layout layout_for(const Product& p, int64_t rows) { return p.is_quantized() ? in_lines(p.inputs) : in_tiles(p.inputs, rows); }

template <Epilogue EPILOGUE, typename T>
void multiply(Team team, int64_t rows, const Product& p, const T* x, QuantizedRows quantized, const T* residual, T* y,
              Layout layout) {
  if (p.is_quantized()) {
    team.share(rows, [&](int64_t row) { quantize_for(row, p, x + row * p.inputs, quantized); });
    team.wait();
  }
  of_product<EPILOGUE>(team, false, rows, p, x, quantized, residual, y, layout);
  team.wait();
}

template <typename T>
void normalise(Team team, int64_t rows, const Norm* norm, float epsilon, const T* h, const Product& next, T* x) {
  const int64_t width = next.inputs;
  const Layout layout = layout_for(next, rows);
  team.share(rows, [&](int64_t row) {
    prepare_row(width, norm, epsilon, h + row * width, x + layout.at(row, 0), layout.block);
  });
  team.wait();
}

// The norm after a residual, in place.
template <typename T>
void post_norm(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* h) {
  team.share(rows, [&](int64_t row) { normalise_row(width, norm, epsilon, h + row * width, h + row * width, 32); });
  team.wait();
}

// Adds the norm of x, the output of a sublayer, to h.
template <typename T>
void add_normed(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* x, T* h) {
  team.share(rows, [&](int64_t row) { add_normed_row(width, norm, epsilon, x + row * width, h + row * width); });
  team.wait();
}

// Stores keys and values, the last elements of what `p` computed for tokens in `parts` of prompts, in the cache.
template <typename T>
void store_made(Team team, const Product& p, const Heads& heads, const std::vector<Part>& parts, const Prompts& prompts,
                const Memory<T>& memory, const T* made) {
  const int64_t dim = heads.dim, width = heads.kv_width();
  const T* keys = made + p.outputs - 2 * width;
  team.share(int64_t(parts.size()) * heads.groups, [&](int64_t unit) {
    const Part& part = parts[unit / heads.groups];
    const int64_t group = unit % heads.groups, to = memory.at(prompts, part.prompt, heads, group);
    for (int64_t token = part.from; token < part.to; ++token)
      store_new(heads, part.row + token - part.from, group, token, keys, keys + width, p.outputs,
                memory.k + to + token * dim, memory.v + to + token * dim);
  });
  team.wait();
}

// Attention for `rows` tokens in `parts` of prompts. `stored` is called once their keys and values are cached, and
// returns when those of earlier tokens of their prompts are, too.
template <typename T, typename Stored>
void attend_rows(Team team, const Block& block, const std::vector<Part>& parts, const Prompts& prompts,
                 const Memory<T>& memory, int64_t rows, T* h, Scratch<T> scratch, Stored stored) {
  const Heads& heads = block.heads;
  const int64_t width = heads.width(), made = block.qkv.outputs, dim = heads.dim;
  const T* q = scratch.wide;
  T* out = scratch.wide + (rows + 31) / 32 * 32 * made;
  normalise(team, rows, block.is_pre_norm ? &block.attn_norm : nullptr, block.epsilon(), h, block.qkv, scratch.narrow);
  multiply<NOTHING, T>(team, rows, block.qkv, scratch.narrow, scratch.quantized, nullptr, scratch.wide, in_lines(made));
  store_made(team, block.qkv, heads, parts, prompts, memory, scratch.wide);
  stored();
  // heads that share keys pack them once, if that leaves enough work for all threads
  const int64_t all_groups = int64_t(parts.size()) * heads.groups;
  const int64_t each = team.is_alone || all_groups >= ENOUGH * omp_get_num_threads() ? heads.each() : 1;
  const int64_t units = heads.count / each;
  team.share(int64_t(parts.size()) * units, [&](int64_t unit) {
    const Part& part = parts[unit / units];
    const int64_t head = unit % units * each, group = head / heads.each();
    attend_part(heads, each, part.from, part.to, q + part.row * made + head * dim, made,
                memory.lines(prompts, part.prompt, heads, group, false),
                memory.lines(prompts, part.prompt, heads, group, true), out + part.row * width + head * dim, width);
  });
  team.wait();
  const T* x = out;
  if (!block.out.is_quantized()) {
    const Layout layout = layout_for(block.out, rows);
    team.share((rows + 31) / 32, [&](int64_t group) {
      to_tiles(std::min<int64_t>(32, rows - 32 * group), width / 32, x + 32 * group * width, width,
               scratch.narrow + 32 * group * width, layout);
    });
    team.wait();
    x = scratch.narrow;
  }
  const int64_t result = block.width();
  if (block.has_sublayer_norms) {
    multiply<NOTHING, T>(team, rows, block.out, x, scratch.quantized, nullptr, scratch.wide, in_lines(result));
    add_normed(team, rows, result, block.attn_out_norm, block.epsilon(), scratch.wide, h);
  } else {
    multiply<ADD, T>(team, rows, block.out, x, scratch.quantized, h, h, in_lines(result));
  }
  if (!block.is_pre_norm) post_norm(team, rows, block.width(), block.attn_norm, block.epsilon(), h);
}

template <typename T>
void feed_rows(Team team, const Block& block, int64_t rows, T* h, Scratch<T> scratch) {
  const int64_t width = block.width();
  normalise(team, rows, block.is_pre_norm ? &block.ffn_norm : nullptr, block.epsilon(), h, block.fc1, scratch.narrow);
  const auto feed = block.activation == SWIGLU  ? multiply<SWIGLU, T>
                    : block.activation == GEGLU ? multiply<GEGLU, T>
                                                : multiply<RELU, T>;
  feed(team, rows, block.fc1, scratch.narrow, scratch.quantized, nullptr, scratch.wide, layout_for(block.fc2, rows));
  if (block.has_sublayer_norms) {
    multiply<NOTHING, T>(team, rows, block.fc2, scratch.wide, scratch.quantized, nullptr, scratch.narrow, in_lines(width));
    add_normed(team, rows, width, block.ffn_out_norm, block.epsilon(), scratch.narrow, h);
  } else {
    multiply<ADD, T>(team, rows, block.fc2, scratch.wide, scratch.quantized, h, h, in_lines(width));
  }
  if (!block.is_pre_norm) post_norm(team, rows, width, block.ffn_norm, block.epsilon(), h);
}

// Chunks that threads take one by one, or that all of them share.
Cut cut_for(int64_t rows, Team team, int num_threads) {
  return team.is_alone ? Cut(rows, ROWS, num_threads) : Cut(rows, TEAM_ROWS, 1);
}

// Calls work(chunk, from, to, scratch) for all chunks; no chunk starts before all earlier ones have started.
template <typename T, typename Work, typename MakeScratch>
void run(Team team, const Cut& cut, int num_threads, MakeScratch make_scratch, Work work) {
  const Scratch<T> shared = team.is_alone ? Scratch<T>{} : make_scratch();
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    auto run_one = [&](int64_t chunk, Scratch<T> scratch) { work(chunk, cut.begin(chunk), cut.end(chunk), scratch); };
    if (team.is_alone) {
      const Scratch<T> scratch = make_scratch();
      for (int64_t chunk; (chunk = next.fetch_add(1)) < cut.chunks;) run_one(chunk, scratch);
    } else {
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) run_one(chunk, shared);
    }
  }
}

template <typename T>
void run_prompts(const Block* block, const Prompts& prompts, T* h, int attends, int runs_ffn, const Memory<T>& memory,
                 int num_threads) {
  const int64_t rows = prompts.starts[prompts.count], width = block->width(), attended = block->heads.width();
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  std::vector<std::atomic<bool>> is_stored(cut.chunks);
  for (auto& flag : is_stored) flag = false;
  auto make_scratch = [&] {
    const int64_t made = std::max({block->qkv.outputs + attended, block->inner(), width});
    return scratch_for<T>(cut.largest(), std::max(width, attended), made, block->qkv.is_quantized());
  };
  run<T>(team, cut, num_threads, make_scratch, [&](int64_t chunk, int64_t from, int64_t to, Scratch<T> scratch) {
    T* states = h + from * width;
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    if (attends)
      attend_rows(team, *block, parts, prompts, memory, to - from, states, scratch, [&] {
        is_stored[chunk].store(true, std::memory_order_release);
        for (int64_t earlier = cut.of(prompts.starts[parts[0].prompt]); earlier < chunk; ++earlier)
          while (!is_stored[earlier].load(std::memory_order_acquire)) std::this_thread::yield();
      });
    if (runs_ffn) feed_rows(team, *block, to - from, states, scratch);
  });
}

template <typename T>
void run_store(const Heads& shape, const Norm* norm, int64_t layers, const Product* products, const void* const* k_norms,
               const float* const* rotations, const Prompts& prompts, const T* h, T* const* k, T* const* v, const int64_t* capacities, int num_threads) {
  const int64_t rows = prompts.starts[prompts.count], width = products[0].inputs, made = products[0].outputs;
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  auto make_scratch = [&] { return scratch_for<T>(cut.largest(), width, made, products[0].is_quantized()); };
  run<T>(team, cut, num_threads, make_scratch, [&](int64_t, int64_t from, int64_t to, Scratch<T> scratch) {
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    normalise(team, to - from, norm, float(shape.epsilon), h + from * width, products[0], scratch.narrow);
    for (int64_t layer = 0; layer < layers; ++layer) {
      const Memory<T> memory = {k[layer], v[layer], capacities[layer], nullptr};
      Heads heads = shape;
      heads.k_norm = k_norms[layer], heads.rotations = rotations[layer];
      multiply<NOTHING, T>(team, to - from, products[layer], scratch.narrow, scratch.quantized, nullptr, scratch.wide,
                           in_lines(made));
      store_made(team, products[layer], heads, parts, prompts, memory, scratch.wide);
    }
  });
}

}  // namespace

// prompt_*: h [tokens, width], in place; starts [prompts + 1]: the first token of each prompt. k, v: the layer's cache
// [prompts, groups, capacity, dim], filled from column columns[prompt] on. before [prompts]: earlier tokens of each
// prompt whose keys and values are in the cache, or in `shared`; null: none. slots [prompts]: the row of each prompt in k
// and v, which may then have others too; null: k and v have the prompts' rows alone.
//
// store_*: keys and values alone, of all outputs of each of `layers` products, from the norm (null: none) of h [tokens,
// width], which is not changed; k_norms, rotations, k, v, capacities [layers]. Also for layers that share the state these are
// computed from (SwiftKV).
#define EXPORT(NAME, T)                                                                                                 \
  extern "C" void prompt_##NAME(const Block* block, int64_t count, const int64_t* starts, const int64_t* columns,       \
                                const int64_t* before, const int64_t* slots, T* h, int attends, int runs_ffn, T* k,     \
                                T* v, int64_t capacity, const Shared* shared, int num_threads) {                        \
    run_prompts<T>(block, {count, starts, columns, before, slots}, h, attends, runs_ffn, {k, v, capacity, shared},      \
                   num_threads);                                                                                        \
  }                                                                                                                     \
  extern "C" void store_##NAME(const Heads* heads, const Norm* norm, int64_t layers, const Product* products,           \
                               const void* const* k_norms, const float* const* rotations, int64_t count,                \
                               const int64_t* starts, const int64_t* columns, const int64_t* before,                    \
                               const int64_t* slots, const T* h, T* const* k, T* const* v, const int64_t* capacities,   \
                               int num_threads) {                                                                       \
    run_store<T>(*heads, norm, layers, products, k_norms, rotations, {count, starts, columns, before, slots}, h, k, v,  \
                 capacities, num_threads);                                                                              \
  }
FOR_EACH_TYPE(EXPORT)
