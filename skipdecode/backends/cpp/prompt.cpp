// One decoder layer for whole prompts, in one parallel region. A thread takes some of the tokens through all of the layer,
// so that it finds what it made in its own caches; before it attends it waits for the keys of earlier tokens of its first
// prompt, should another thread have these. Few tokens are shared by all threads instead (`Team`), each of which reads some
// of the weights. Keys and values alone, of one layer or several, go the same way (`store_tiles`).
//
// Prompts lie one behind the other without padding. Of finite numbers a token's bits depend on its prompt up to it and on
// nothing else; what becomes of NaN and infinities is not defined.

#include "layer.h"

#ifdef HAS_TILES

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {

using namespace cpu;

constexpr int64_t QUERIES = 128;     // of a prompt and head, for which keys and values are made ready at a time
constexpr int64_t TEAM_ROWS = 2048;  // tokens that threads share at a time

struct Prompts {
  int64_t count;
  const int64_t* starts;   // [count + 1], of their tokens
  const int64_t* columns;  // [count], where the first token of each lies in the cache
};

struct Memory {
  bfloat16 *k, *v;  // [prompts, heads, capacity, dim]
  int64_t capacity;

  int64_t at(const Prompts& prompts, int64_t prompt, int64_t heads, int64_t head, int64_t dim) const {  // its first token
    return ((prompt * heads + head) * capacity + prompts.columns[prompt]) * dim;
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
      parts.push_back({prompt, at - p.starts[prompt], next - p.starts[prompt], at - from});
      at = next;
    }
  return parts;
}

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

// Keys as a packed weight whose outputs are keys and whose inputs are dimensions: [keys / 32][dim / 32][2][16][32].
void pack_keys(int64_t count, int64_t dim, const bfloat16* keys, uint16_t* to) {
  for (int64_t s = 0; s < count; s += 32)
    for (int64_t d = 0; d < dim; d += 32)
      for (int64_t half = s; half < s + 32; half += 16, to += TILE) {
        __m512i lines[16];
        for (int64_t i = 0; i < 16; ++i)
          lines[i] = half + i < count ? load_some(keys + (half + i) * dim + d, dim - d) : _mm512_setzero_si512();
        transpose(lines);
        for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, lines[i]);
      }
}

// Values as one whose outputs are dimensions and whose inputs are keys: [dim / 32][keys / 32][2][16][32].
void pack_values(int64_t count, int64_t dim, const bfloat16* values, uint16_t* to) {
  alignas(64) uint16_t first[32], second[32];  // of two lines, in turns
  for (int i = 0; i < 16; ++i) {
    first[2 * i] = uint16_t(i), first[2 * i + 1] = uint16_t(32 + i);
    second[2 * i] = uint16_t(16 + i), second[2 * i + 1] = uint16_t(48 + i);
  }
  const __m512i low = _mm512_load_si512(first), high = _mm512_load_si512(second);
  for (int64_t d = 0; d < dim; d += 32)
    for (int64_t s = 0; s < count; s += 32, to += 2 * TILE)
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t at = s + 2 * i;  // nothing behind the last key: zero times rubbish may be NaN
        const __m512i one = at < count ? load_some(values + at * dim + d, dim - d) : _mm512_setzero_si512();
        const __m512i two = at + 1 < count ? load_some(values + (at + 1) * dim + d, dim - d) : _mm512_setzero_si512();
        _mm512_store_si512(to + 32 * i, _mm512_permutex2var_epi16(one, low, two));
        _mm512_store_si512(to + TILE + 32 * i, _mm512_permutex2var_epi16(one, high, two));
      }
}

// As `exp_of_negative`, of 16 numbers.
inline __m512 exp_of_negatives(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Scores [blocks][32][32] of `count` queries, the first of which sees `seen` keys, each one more than the one before, to
// weights in the same order: e^(score - largest), zero behind the last key. `shares`: one over their sum. Block by block,
// as they lie in memory: a query's own are whole pages apart.
void to_weights(int64_t count, int64_t seen, int64_t blocks, float scale, const float* scores, uint16_t* weights,
                float* shares) {
  alignas(64) float tops[32][16], sums[32][16];
  for (auto& lane : tops) _mm512_store_ps(lane, _mm512_set1_ps(-FLT_MAX));
  for (auto& lane : sums) _mm512_store_ps(lane, _mm512_setzero_ps());
  auto mask = [&](int64_t block, int64_t r) { return some(std::max<int64_t>(0, seen + r - 32 * block)); };
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r) {
      const float* at = scores + (32 * block + r) * 32;
      __m512 top = _mm512_load_ps(tops[r]);
      top = _mm512_mask_max_ps(top, __mmask16(mask(block, r)), top, _mm512_load_ps(at));
      top = _mm512_mask_max_ps(top, __mmask16(mask(block, r) >> 16), top, _mm512_load_ps(at + 16));
      _mm512_store_ps(tops[r], top);
    }
  for (int64_t r = 0; r < count; ++r) _mm512_store_ps(tops[r], _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_load_ps(tops[r]))));
  const __m512 scales = _mm512_set1_ps(scale);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = 0; r < count; ++r) {
      const float* at = scores + (32 * block + r) * 32;
      const __m512 top = _mm512_load_ps(tops[r]);
      __m512 one = exp_of_negatives(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(at), top), scales));
      __m512 two = exp_of_negatives(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(at + 16), top), scales));
      one = _mm512_maskz_mov_ps(__mmask16(mask(block, r)), one);
      two = _mm512_maskz_mov_ps(__mmask16(mask(block, r) >> 16), two);
      _mm512_store_ps(sums[r], _mm512_add_ps(_mm512_load_ps(sums[r]), _mm512_add_ps(one, two)));
      _mm512_store_si512(weights + (32 * block + r) * 32, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(two, one)));
    }
  for (int64_t r = 0; r < count; ++r) shares[r] = 1.0f / _mm512_reduce_add_ps(_mm512_load_ps(sums[r]));
}

// Tokens from..to - 1 of a prompt, whose q lie `stride` numbers apart, attend to its tokens up to each; out as q.
void attend_part(int64_t dim, int64_t from, int64_t to, const bfloat16* q, int64_t stride, const bfloat16* k,
                 const bfloat16* v, bfloat16* out, int64_t out_stride) {
  const int64_t steps = (dim + 31) / 32, blocks = (to + 31) / 32;
  const float scale = 1.0f / std::sqrt(float(dim));
  thread_local Buffer<uint16_t> tiles_kept;
  thread_local Buffer<float> scores_kept;
  uint16_t* keys = tiles_kept.room(2 * TILE * (2 * steps * blocks + blocks + steps));
  uint16_t *values = keys + 2 * TILE * steps * blocks, *weights = values + 2 * TILE * steps * blocks;
  uint16_t* queries = weights + 2 * TILE * blocks;
  float *scores = scores_kept.room(1024 * (blocks + 1)), *sums = scores + 1024 * blocks;
  pack_keys(to, dim, k, keys);
  pack_values(to, dim, v, values);
  for (int64_t first = from; first < to; first += 32, q += 32 * stride, out += 32 * out_stride) {
    const int64_t count = std::min<int64_t>(32, to - first), seen = (first + count + 31) / 32;
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t r = 0; r < 32; ++r)
        _mm512_store_si512(queries + (step * 32 + r) * 32,
                           r < count ? load_some(q + r * stride + 32 * step, dim - 32 * step) : _mm512_setzero_si512());
    for (int64_t block = 0; block < seen; ++block)
      multiply_tiles(queries, keys + block * steps * 2 * TILE, steps, scores + 1024 * block, true, nullptr, 0);
    float shares[32];
    to_weights(count, first + 1, seen, scale, scores, weights, shares);
    for (int64_t step = 0; step < steps; ++step) {
      multiply_tiles(weights, values + step * blocks * 2 * TILE, seen, sums, true, nullptr, 0);
      const int64_t left = dim - 32 * step;
      for (int64_t r = 0; r < count; ++r) {
        const __m512 share = _mm512_set1_ps(shares[r]);
        const __m512 one = _mm512_mul_ps(_mm512_load_ps(sums + 32 * r), share);
        const __m512 two = _mm512_mul_ps(_mm512_load_ps(sums + 32 * r + 16), share);
        _mm512_mask_storeu_epi16(out + r * out_stride + 32 * step, some(left),
                                 reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(two, one)));
      }
    }
  }
}

// Memory for the tokens that are taken through a layer at once.
struct Room {
  uint16_t *narrow, *wide;
  WholeRows whole;
};

// `made`: the most numbers per token that any product makes, and what else lies beside them.
Room room_for(int64_t rows, int64_t width, int64_t made, bool is_int8) {
  thread_local Buffer<uint16_t> kept;
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  uint16_t* narrow = kept.room(rows * (width + made));
  return {narrow, narrow + rows * width,
          {is_int8 ? tiles_kept.room(rows * ((std::max(width, made) + 63) / 64) * 128) : nullptr, scales_kept.room(rows)}};
}

// How a product reads its rows.
Layout layout_for(const Product& p) { return p.scales ? in_lines(p.inputs) : in_tiles(p.inputs); }

template <Then THEN>
void multiply_rows(Team team, int64_t rows, const Product& p, const uint16_t* x, WholeRows whole,
                   const uint16_t* residual, uint16_t* y, Layout layout) {
  if (p.scales) {
    team.share(rows, [&](int64_t row) { to_whole(row, p.inputs, x + row * p.inputs, whole); });
    team.wait();
    of_whole<THEN>(team, rows, whole, p.int8(), residual, y, layout);
  } else {
    of_tiles<THEN>(team, rows, p.outputs, p.inputs, x, static_cast<const uint16_t*>(p.weight), p.bias, residual, y, layout);
  }
  team.wait();
}

void normalise(Team team, int64_t rows, const Norm& norm, float epsilon, const uint16_t* h, const Product& next,
               uint16_t* x) {
  const int64_t width = next.inputs;
  const Layout layout = layout_for(next);
  team.share(rows, [&](int64_t row) {
    normalise_row(width, norm, epsilon, reinterpret_cast<const bfloat16*>(h) + row * width,
                  reinterpret_cast<bfloat16*>(x) + layout.at(row, 0), layout.block);
  });
  team.wait();
}

// What `p` made of tokens in `parts` of prompts, the last two `width` numbers of each, into the cache as keys and values.
void store_made(Team team, const Product& p, int64_t heads, const std::vector<Part>& parts, const Prompts& prompts,
                const Memory& memory, const uint16_t* made) {
  const int64_t width = p.inputs, dim = width / heads;
  const bfloat16* keys = reinterpret_cast<const bfloat16*>(made) + p.outputs - 2 * width;
  team.share(int64_t(parts.size()) * heads, [&](int64_t unit) {
    const Part& part = parts[unit / heads];
    const int64_t head = unit % heads, to = memory.at(prompts, part.prompt, heads, head, dim);
    for (int64_t token = part.from; token < part.to; ++token) {
      const bfloat16* line = keys + (part.row + token - part.from) * p.outputs + head * dim;
      std::memcpy(memory.k + to + token * dim, line, dim * sizeof(bfloat16));
      std::memcpy(memory.v + to + token * dim, line + width, dim * sizeof(bfloat16));
    }
  });
  team.wait();
}

// Tokens in `parts` of prompts, `rows` in all, through attention. `stored` is called when their keys and values are in the
// cache, and comes back when those of earlier tokens of their prompts are, too.
template <typename Stored>
void attend_rows(Team team, const Block& block, const std::vector<Part>& parts, const Prompts& prompts,
                 const Memory& memory, int64_t rows, uint16_t* h, Room room, Stored stored) {
  const int64_t heads = block.heads, width = block.qkv.inputs, dim = width / heads;
  const bfloat16* q = reinterpret_cast<bfloat16*>(room.wide);
  uint16_t* out = room.wide + (rows + 31) / 32 * 32 * 3 * width;
  normalise(team, rows, block.attn_norm, float(block.epsilon), h, block.qkv, room.narrow);
  multiply_rows<NOTHING>(team, rows, block.qkv, room.narrow, room.whole, nullptr, room.wide, in_lines(3 * width));
  store_made(team, block.qkv, heads, parts, prompts, memory, room.wide);
  stored();
  team.share(int64_t(parts.size()) * heads, [&](int64_t unit) {
    const Part& part = parts[unit / heads];
    const int64_t head = unit % heads, at = memory.at(prompts, part.prompt, heads, head, dim);
    attend_part(dim, part.from, part.to, q + part.row * 3 * width + head * dim, 3 * width, memory.k + at, memory.v + at,
                reinterpret_cast<bfloat16*>(out) + part.row * width + head * dim, width);
  });
  team.wait();
  const uint16_t* x = out;
  if (!block.out.scales) {
    team.share((rows + 31) / 32, [&](int64_t group) {
      to_tiles(std::min<int64_t>(32, rows - 32 * group), width / 32, x + 32 * group * width, width,
               room.narrow + 32 * group * width);
    });
    team.wait();
    x = room.narrow;
  }
  multiply_rows<ADD>(team, rows, block.out, x, room.whole, h, h, in_lines(width));
}

void feed_rows(Team team, const Block& block, int64_t rows, uint16_t* h, Room room) {
  normalise(team, rows, block.ffn_norm, float(block.epsilon), h, block.fc1, room.narrow);
  multiply_rows<RELU>(team, rows, block.fc1, room.narrow, room.whole, nullptr, room.wide, layout_for(block.fc2));
  multiply_rows<ADD>(team, rows, block.fc2, room.wide, room.whole, h, h, in_lines(block.qkv.inputs));
}

// Into chunks that threads take one by one, or that all of them share.
Cut cut_for(int64_t rows, Team team, int num_threads) {
  return team.is_alone ? Cut(rows, ROWS, num_threads) : Cut(rows, TEAM_ROWS, 1);
}

// Calls work(chunk, from, to, room) for all chunks; none begins before all earlier ones have.
template <typename Work, typename MakeRoom>
void run(Team team, const Cut& cut, int num_threads, MakeRoom make_room, Work work) {
  const Room shared = team.is_alone ? Room{} : make_room();
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
  {
    configure_tiles();
    auto run_one = [&](int64_t chunk, Room room) { work(chunk, cut.begin(chunk), cut.end(chunk), room); };
    if (team.is_alone) {
      const Room room = make_room();
      for (int64_t chunk; (chunk = next.fetch_add(1)) < cut.chunks;) run_one(chunk, room);
    } else {
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) run_one(chunk, shared);
    }
    _tile_release();
  }
}

}  // namespace

// h [tokens, width], in place; starts [prompts + 1]: of which tokens each prompt consists. k, v: the cache of the layer
// [prompts, heads, capacity, width / heads], filled from column columns[prompt] on.
extern "C" void prompt_tiles(const Block* block, int64_t count, const int64_t* starts, const int64_t* columns, uint16_t* h,
                             int attends, int feeds, uint16_t* k, uint16_t* v, int64_t capacity, int num_threads) {
  const int64_t rows = starts[count], width = block->qkv.inputs;
  const Prompts prompts = {count, starts, columns};
  const Memory memory = {reinterpret_cast<bfloat16*>(k), reinterpret_cast<bfloat16*>(v), capacity};
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  std::vector<std::atomic<bool>> is_stored(cut.chunks);
  for (auto& flag : is_stored) flag = false;
  auto make_room = [&] {
    return room_for(cut.largest(), width, std::max(4 * width, block->fc1.outputs), block->qkv.scales != nullptr);
  };
  run(team, cut, num_threads, make_room, [&](int64_t chunk, int64_t from, int64_t to, Room room) {
    uint16_t* states = h + from * width;
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    if (attends)
      attend_rows(team, *block, parts, prompts, memory, to - from, states, room, [&] {
        is_stored[chunk].store(true, std::memory_order_release);
        for (int64_t earlier = cut.of(starts[parts[0].prompt]); earlier < chunk; ++earlier)
          while (!is_stored[earlier].load(std::memory_order_acquire)) std::this_thread::yield();
      });
    if (feeds) feed_rows(team, *block, to - from, states, room);
  });
}

// Keys and values alone, [2 width] of each of `layers` products, from the norm of h [tokens, width], which stays; k, v,
// capacities [layers]. Also for layers that share the state they are made of (SwiftKV).
extern "C" void store_tiles(int64_t heads, double epsilon, const Norm* norm, int64_t layers, const Product* products,
                            int64_t count, const int64_t* starts, const int64_t* columns, const uint16_t* h,
                            uint16_t* const* k, uint16_t* const* v, const int64_t* capacities, int num_threads) {
  const int64_t rows = starts[count], width = products[0].inputs;
  const Prompts prompts = {count, starts, columns};
  const Team team = {rows >= MANY * num_threads};
  const Cut cut = cut_for(rows, team, num_threads);
  auto make_room = [&] { return room_for(cut.largest(), width, 2 * width, products[0].scales != nullptr); };
  run(team, cut, num_threads, make_room, [&](int64_t, int64_t from, int64_t to, Room room) {
    const std::vector<Part> parts = parts_of(prompts, from, to, QUERIES);
    normalise(team, to - from, *norm, float(epsilon), h + from * width, products[0], room.narrow);
    for (int64_t layer = 0; layer < layers; ++layer) {
      const Memory memory = {reinterpret_cast<bfloat16*>(k[layer]), reinterpret_cast<bfloat16*>(v[layer]), capacities[layer]};
      multiply_rows<NOTHING>(team, to - from, products[layer], room.narrow, room.whole, nullptr, room.wide,
                             in_lines(2 * width));
      store_made(team, products[layer], heads, parts, prompts, memory, room.wide);
    }
  });
}

#endif
