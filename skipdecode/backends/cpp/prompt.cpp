// One decoder layer for whole prompts, in one parallel region. A thread takes some of the tokens through all of the layer,
// so that it finds what it made in its own caches; before it attends it waits for the keys of earlier tokens of its first
// prompt, should another thread have these. Few tokens are shared by all threads instead (`Team`), each of which reads some
// of the weights. Keys and values alone, of one layer or several, go the same way (`store_tiles`).
//
// Prompts lie one behind the other without padding. Of finite numbers a token's bits depend on its prompt up to it and on
// nothing else; what becomes of NaN and infinities is not defined.

#include "layer.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include <omp.h>

namespace {

using namespace cpu;

constexpr int64_t QUERIES = 128;     // of a prompt and head, for which keys and values are made ready at a time
constexpr int64_t TEAM_ROWS = 2048;  // tokens that threads share at a time
constexpr int64_t ENOUGH = 4;        // parts of work per thread

struct Prompts {
  int64_t count;
  const int64_t* starts;   // [count + 1], of their tokens
  const int64_t* columns;  // [count], where the first token of each lies in the cache
  const int64_t* before;   // [count], tokens of each before those given, whose keys and values are there; null: none

  int64_t begin(int64_t prompt) const { return starts[prompt] - (before ? before[prompt] : 0); }
};

// Where the keys or values of a prompt lie: of its first `count` tokens, and of the others, both as from its first one on.
template <typename T>
struct Lines {
  const T* shared;
  int64_t count;
  const T* own;

  const T* at(int64_t token, int64_t dim) const { return (token < count ? shared : own) + token * dim; }
};

template <typename T>
struct Memory {
  T *k, *v;  // [prompts, groups, capacity, dim]
  int64_t capacity;
  const Shared* shared;  // what of the prompts is not in k and v, but read by several of them; null: nothing

  int64_t at(const Prompts& prompts, int64_t prompt, const Heads& heads, int64_t group) const {  // its first token
    return ((prompt * heads.groups + group) * capacity + prompts.columns[prompt]) * heads.dim;
  }

  Lines<T> lines(const Prompts& prompts, int64_t prompt, const Heads& heads, int64_t group, bool are_values) const {
    const T* own = (are_values ? v : k) + at(prompts, prompt, heads, group);
    const int64_t count = count_of(shared, prompt);
    return {count ? shared->line<T>(are_values ? shared->v : shared->k, prompt, group, heads.dim) : nullptr, count, own};
  }
};

// A prompt's part in the tokens from..to - 1 of all.
struct Part {
  int64_t prompt, from, to;  // its tokens
  int64_t row;               // of the first of them among the tokens in question
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

// 16 lines of 16 words, transposed.
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
    for (int j = 0; j < 2; ++j) {  // lines i and i + 4, i + 8 and i + 12: 0 and 2 of their quarters, then 1 and 3
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

// Keys as a packed weight whose outputs are keys and whose inputs are dimensions: [keys / 32][dim / 32][2][tile].
#ifdef HAS_BFLOAT16
void pack_keys(int64_t count, int64_t dim, const Lines<bfloat16>& keys, bfloat16* to) {
  for (int64_t s = 0; s < count; s += 32)
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

void pack_keys(int64_t count, int64_t dim, const Lines<float>& keys, float* to) {
  const float* lines[16];
  for (int64_t s = 0; s < count; s += 32)
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t half = s; half < s + 32; half += 16) {
        for (int64_t key = 0; key < 16; ++key) lines[key] = half + key < count ? keys.at(half + key, dim) : nullptr;
        for (int64_t i = d; i < d + 32; ++i)
          for (int64_t key = 0; key < 16; ++key) *to++ = lines[key] && i < dim ? lines[key][i] : 0.0f;
      }
}

// Values as one whose outputs are dimensions and whose inputs are keys: [dim / 32][keys / 32][2][tile]. Nothing is behind
// the last key: zero times rubbish may be NaN.
#ifdef HAS_BFLOAT16
void pack_values(int64_t count, int64_t dim, const Lines<bfloat16>& values, bfloat16* to) {
  alignas(64) uint16_t first[32], second[32];  // of two lines, in turns
  for (int i = 0; i < 16; ++i) {
    first[2 * i] = uint16_t(i), first[2 * i + 1] = uint16_t(32 + i);
    second[2 * i] = uint16_t(16 + i), second[2 * i + 1] = uint16_t(48 + i);
  }
  const __m512i low = _mm512_load_si512(first), high = _mm512_load_si512(second);
  for (int64_t d = 0; d < dim; d += 32)
    for (int64_t s = 0; s < count; s += 32, to += BLOCK)
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t at = s + 2 * i;
        const __m512i one = at < count ? load_some(values.at(at, dim) + d, dim - d) : _mm512_setzero_si512();
        const __m512i two = at + 1 < count ? load_some(values.at(at + 1, dim) + d, dim - d) : _mm512_setzero_si512();
        _mm512_store_si512(to + 32 * i, _mm512_permutex2var_epi16(one, low, two));
        _mm512_store_si512(to + BLOCK / 2 + 32 * i, _mm512_permutex2var_epi16(one, high, two));
      }
}
#endif

void pack_values(int64_t count, int64_t dim, const Lines<float>& values, float* to) {
  for (int64_t d = 0; d < dim; d += 32)
    for (int64_t s = 0; s < count; s += 32)
      for (int64_t half = d; half < d + 32; half += 16)
        for (int64_t key = s; key < s + 32; ++key, to += 16)
          store16(to, key < count ? load_first(values.at(key, dim) + half, dim - half) : all(0.0f));
}

// Scores [blocks][32][32] of `count` queries, the first of which sees `seen` keys, each one more than the one before, to
// weights in the same order: e^(score - largest), zero behind the last key. `shares`: one over their sum. Block by block,
// as they lie in memory: a query's own are whole pages apart.
template <typename T>
void to_weights(int64_t count, int64_t seen, int64_t blocks, float scale, const float* scores, T* weights, float* shares) {
  alignas(64) float tops[32][16], sums[32][16];
  for (auto& lane : tops) store16(lane, all(-FLT_MAX));
  for (auto& lane : sums) store16(lane, all(0.0f));
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t half = 0; half < 32; half += 16) {
        const Floats score = load16(scores + (32 * block + r) * 32 + half), top = load16(tops[r]);
        store16(tops[r], first_of(seen + r - 32 * block - half, max(top, score), top));
      }
  for (int64_t r = 0; r < count; ++r) store16(tops[r], all(largest(load16(tops[r]))));
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t half = 0; half < 32; half += 16) {
        const int64_t at = (32 * block + r) * 32 + half;
        const Floats weight = exp_of_negatives((load16(scores + at) - load16(tops[r])) * all(scale));
        const Floats kept = first_of(seen + r - 32 * block - half, weight, all(0.0f));
        store16(sums[r], load16(sums[r]) + kept);
        store_first(weights + at, kept, 16);
      }
  for (int64_t r = 0; r < count; ++r) shares[r] = 1.0f / sum(load16(sums[r]));
}

// Queries of `count` tokens of a prompt and one head, the first of them token `position`, `stride` numbers apart, as
// `multiply_tiles` reads them.
template <typename T>
void lay_queries(const Heads& heads, int64_t count, int64_t position, const T* q, int64_t stride, Row<T, T>* to, T* turned) {
  const int64_t steps = (heads.dim + 31) / 32;
  std::memset(static_cast<void*>(to), 0, BLOCK * steps * sizeof(Row<T, T>));
  for (int64_t r = 0; r < count; ++r) {
    const T* from = q + r * stride;
    if (heads.turns_queries()) {
      turn(heads, heads.q_norm, position + r, from, turned);
      from = turned;
    }
    for (int64_t i = 0; i < heads.dim; i += 16)
      store_first(to + (i / 32 * 32 + r) * 32 + i % 32, load_first(from + i, heads.dim - i), heads.dim - i);
  }
}

// Tokens from..to - 1 of a prompt, whose q lie `stride` numbers apart, attend to its tokens up to each, with `each` heads
// that share keys and values; out as q.
template <typename T>
void attend_part(const Heads& heads, int64_t each, int64_t from, int64_t to, const T* q, int64_t stride,
                 const Lines<T>& k, const Lines<T>& v, T* out, int64_t out_stride) {
  const int64_t dim = heads.dim, steps = (dim + 31) / 32, blocks = (to + 31) / 32;
  const float scale = 1.0f / std::sqrt(float(dim));
  thread_local Buffer<T> tiles_kept;
  thread_local Buffer<Row<T, T>> rows_kept;
  thread_local Buffer<float> scores_kept;
  T* keys = tiles_kept.room(BLOCK * 2 * steps * blocks + steps * 32);
  T *values = keys + BLOCK * steps * blocks, *turned = values + BLOCK * steps * blocks;
  Row<T, T>*weights = rows_kept.room(BLOCK * (blocks + steps)), *queries = weights + BLOCK * blocks;
  float *scores = scores_kept.room(1024 * (blocks + 1)), *sums = scores + 1024 * blocks;
  pack_keys(to, dim, k, keys);
  pack_values(to, dim, v, values);
  for (int64_t unit = 0, groups = (to - from + 31) / 32; unit < each * groups; ++unit) {
    const int64_t head = unit / groups, first = from + unit % groups * 32;
    const int count = int(std::min<int64_t>(32, to - first));
    const int64_t seen = (first + count + 31) / 32;
    lay_queries(heads, count, first, q + (first - from) * stride + head * dim, stride, queries, turned);
    for (int64_t block = 0; block < seen; ++block)
      multiply_tiles(queries, BLOCK, count, keys + block * steps * BLOCK, steps, scores + 1024 * block, true, nullptr, 0);
    float shares[32];
    to_weights(count, first + 1, seen, scale, scores, weights, shares);
    T* to_out = out + (first - from) * out_stride + head * dim;
    for (int64_t step = 0; step < steps; ++step) {
      multiply_tiles(weights, BLOCK, count, values + step * blocks * BLOCK, seen, sums, true, nullptr, 0);
      const int64_t left = dim - 32 * step;
      for (int64_t r = 0; r < count; ++r)
        for (int64_t half = 0; half < 32; half += 16)
          store_first(to_out + r * out_stride + 32 * step + half, load16(sums + 32 * r + half) * all(shares[r]), left - half);
    }
  }
}

// Memory for the tokens that are taken through a layer at once.
template <typename T>
struct Room {
  T *narrow, *wide;
  WholeRows whole;
};

// `made`: the most numbers per token that any product makes, and what else lies beside them.
template <typename T>
Room<T> room_for(int64_t rows, int64_t width, int64_t made, bool is_int8) {
  thread_local Buffer<T> kept;
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  T* narrow = kept.room(rows * (width + made));
  return {narrow, narrow + rows * width,
          {is_int8 ? tiles_kept.room(rows * ((std::max(width, made) + 63) / 64) * 128) : nullptr, scales_kept.room(rows),
           apart_of(rows)}};
}

// How a product reads its rows.
Layout layout_for(const Product& p, int64_t rows) { return p.scales ? in_lines(p.inputs) : in_tiles(p.inputs, rows); }

template <Then THEN, typename T>
void multiply(Team team, int64_t rows, const Product& p, const T* x, WholeRows whole, const T* residual, T* y,
              Layout layout) {
  if (p.scales) {
    team.share(rows, [&](int64_t row) { to_int8(row, p, x + row * p.inputs, whole); });
    team.wait();
  }
  of_product<THEN>(team, false, rows, p, x, whole, residual, y, layout);
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

// The norm behind a residual, in place.
template <typename T>
void settle(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* h) {
  team.share(rows, [&](int64_t row) { normalise_row(width, norm, epsilon, h + row * width, h + row * width, 32); });
  team.wait();
}

// What `p` made of tokens in `parts` of prompts, the last numbers of each, into the cache as keys and values.
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

// Tokens in `parts` of prompts, `rows` in all, through attention. `stored` is called when their keys and values are in the
// cache, and comes back when those of earlier tokens of their prompts are, too.
template <typename T, typename Stored>
void attend_rows(Team team, const Block& block, const std::vector<Part>& parts, const Prompts& prompts,
                 const Memory<T>& memory, int64_t rows, T* h, Room<T> room, Stored stored) {
  const Heads& heads = block.heads;
  const int64_t width = heads.width(), made = block.qkv.outputs, dim = heads.dim;
  const T* q = room.wide;
  T* out = room.wide + (rows + 31) / 32 * 32 * made;
  normalise(team, rows, block.is_pre_norm ? &block.attn_norm : nullptr, block.epsilon(), h, block.qkv, room.narrow);
  multiply<NOTHING, T>(team, rows, block.qkv, room.narrow, room.whole, nullptr, room.wide, in_lines(made));
  store_made(team, block.qkv, heads, parts, prompts, memory, room.wide);
  stored();
  // heads that share keys make these ready once, where that leaves work for all threads
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
  if (!block.out.scales) {
    const Layout layout = layout_for(block.out, rows);
    team.share((rows + 31) / 32, [&](int64_t group) {
      to_tiles(std::min<int64_t>(32, rows - 32 * group), width / 32, x + 32 * group * width, width,
               room.narrow + 32 * group * width, layout);
    });
    team.wait();
    x = room.narrow;
  }
  multiply<ADD, T>(team, rows, block.out, x, room.whole, h, h, in_lines(block.width()));
  if (!block.is_pre_norm) settle(team, rows, block.width(), block.attn_norm, block.epsilon(), h);
}

template <typename T>
void feed_rows(Team team, const Block& block, int64_t rows, T* h, Room<T> room) {
  const int64_t width = block.width();
  normalise(team, rows, block.is_pre_norm ? &block.ffn_norm : nullptr, block.epsilon(), h, block.fc1, room.narrow);
  const auto feed = block.is_gated ? multiply<SWIGLU, T> : multiply<RELU, T>;
  feed(team, rows, block.fc1, room.narrow, room.whole, nullptr, room.wide, layout_for(block.fc2, rows));
  multiply<ADD, T>(team, rows, block.fc2, room.wide, room.whole, h, h, in_lines(width));
  if (!block.is_pre_norm) settle(team, rows, width, block.ffn_norm, block.epsilon(), h);
}

// Into chunks that threads take one by one, or that all of them share.
Cut cut_for(int64_t rows, Team team, int num_threads) {
  return team.is_alone ? Cut(rows, ROWS, num_threads) : Cut(rows, TEAM_ROWS, 1);
}

// Calls work(chunk, from, to, room) for all chunks; none begins before all earlier ones have.
template <typename T, typename Work, typename MakeRoom>
void run(Team team, const Cut& cut, int num_threads, MakeRoom make_room, Work work) {
  const Room<T> shared = team.is_alone ? Room<T>{} : make_room();
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    auto run_one = [&](int64_t chunk, Room<T> room) { work(chunk, cut.begin(chunk), cut.end(chunk), room); };
    if (team.is_alone) {
      const Room<T> room = make_room();
      for (int64_t chunk; (chunk = next.fetch_add(1)) < cut.chunks;) run_one(chunk, room);
    } else {
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) run_one(chunk, shared);
    }
  }
}

template <typename T>
void run_prompts(const Block* block, const Prompts& prompts, T* h, int attends, int feeds, const Memory<T>& memory,
                 int num_threads) {
  const int64_t rows = prompts.starts[prompts.count], width = block->width(), attended = block->heads.width();
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  std::vector<std::atomic<bool>> is_stored(cut.chunks);
  for (auto& flag : is_stored) flag = false;
  auto make_room = [&] {
    const int64_t made = std::max(block->qkv.outputs + attended, block->inner());
    return room_for<T>(cut.largest(), std::max(width, attended), made, block->qkv.scales != nullptr);
  };
  run<T>(team, cut, num_threads, make_room, [&](int64_t chunk, int64_t from, int64_t to, Room<T> room) {
    T* states = h + from * width;
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    if (attends)
      attend_rows(team, *block, parts, prompts, memory, to - from, states, room, [&] {
        is_stored[chunk].store(true, std::memory_order_release);
        for (int64_t earlier = cut.of(prompts.starts[parts[0].prompt]); earlier < chunk; ++earlier)
          while (!is_stored[earlier].load(std::memory_order_acquire)) std::this_thread::yield();
      });
    if (feeds) feed_rows(team, *block, to - from, states, room);
  });
}

template <typename T>
void run_store(const Heads& shape, const Norm* norm, int64_t layers, const Product* products, const void* const* k_norms,
               const Prompts& prompts, const T* h, T* const* k, T* const* v, const int64_t* capacities, int num_threads) {
  const int64_t rows = prompts.starts[prompts.count], width = products[0].inputs, made = products[0].outputs;
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  auto make_room = [&] { return room_for<T>(cut.largest(), width, made, products[0].scales != nullptr); };
  run<T>(team, cut, num_threads, make_room, [&](int64_t, int64_t from, int64_t to, Room<T> room) {
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    normalise(team, to - from, norm, float(shape.epsilon), h + from * width, products[0], room.narrow);
    for (int64_t layer = 0; layer < layers; ++layer) {
      const Memory<T> memory = {k[layer], v[layer], capacities[layer], nullptr};
      Heads heads = shape;
      heads.k_norm = k_norms[layer];
      multiply<NOTHING, T>(team, to - from, products[layer], room.narrow, room.whole, nullptr, room.wide, in_lines(made));
      store_made(team, products[layer], heads, parts, prompts, memory, room.wide);
    }
  });
}

}  // namespace

// prompt_*: h [tokens, width], in place; starts [prompts + 1]: of which tokens each prompt consists. k, v: the cache of the
// layer [prompts, groups, capacity, dim], filled from column columns[prompt] on. before [prompts]: of each, tokens before
// these whose keys and values are in the cache, or `shared` of them there. Null: none.
// store_*: keys and values alone, all outputs of each of `layers` products, from the norm (null: none) of h [tokens, width],
// which stays; k_norms, k, v, capacities [layers]. Also for layers that share the state they are made of (SwiftKV).
#define EXPORT(NAME, T)                                                                                                  \
  extern "C" void prompt_##NAME(const Block* block, int64_t count, const int64_t* starts, const int64_t* columns,         \
                                const int64_t* before, T* h, int attends, int feeds, T* k, T* v, int64_t capacity,            \
                                const Shared* shared, int num_threads) {                                                \
    run_prompts<T>(block, {count, starts, columns, before}, h, attends, feeds, {k, v, capacity, shared}, num_threads);  \
  }                                                                                                                      \
  extern "C" void store_##NAME(const Heads* heads, const Norm* norm, int64_t layers, const Product* products,           \
                               const void* const* k_norms, int64_t count, const int64_t* starts,                        \
                               const int64_t* columns, const int64_t* before, const T* h, T* const* k, T* const* v,     \
                               const int64_t* capacities, int num_threads) {                                            \
    run_store<T>(*heads, norm, layers, products, k_norms, {count, starts, columns, before}, h, k, v, capacities,        \
                 num_threads);                                                                                           \
  }
FOR_EACH_TYPE(EXPORT)
