// Products with bfloat16 weights on a CPU's matrix tiles (AMX), with a bias, and a ReLU or a residual, in the
// same pass; for linear.cpp, step.cpp and prompt.cpp.
//
// Decoding multiplies few rows by weights that come from memory, so the weights lie in the order in which they are read,
// one stream per thread, and are prefetched AHEAD of their use: with 32 rows that takes a half to a quarter of the time
// of oneDNN, which waits for each line. A row's sums run over k in one order, whatever the number of rows: a row's bits
// do not depend on its batch. With many rows the weights are what is read again and again: see `of_tiles`.
//
// Packed weights: for each 32 outputs, for each 32 inputs, two tiles of 16 outputs; a tile is 16 lines of input pairs.

#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES

#include <immintrin.h>
#include <vector>

#include "threads.h"

namespace cpu {

// Memory that is kept from call to call, on a line of the cache.
template <typename T>
class Buffer {
 public:
  T* room(int64_t count) {
    if (int64_t(held_.size()) < count + 64) held_.resize(count + 64);
    return held_.data() + (64 - reinterpret_cast<uintptr_t>(held_.data()) % 64) / sizeof(T);
  }

 private:
  std::vector<T> held_;
};

constexpr int64_t TILE = 512;             // numbers in a tile of bfloat16, 1 KiB
constexpr int64_t AHEAD = 8192;           // bytes
constexpr int64_t ROWS_BYTES = 3 << 19;   // of x, at a time: with the weights of 32 outputs they stay in the L2 cache
constexpr int64_t MANY = 256;             // rows per thread that are worth that each thread reads all weights
constexpr int64_t ROWS = 256, INPUTS = 2048, DEEP = 256;  // of a thread: 1 MiB of rows, 16 KiB of weights at a time

enum Then { NOTHING, RELU, ADD };

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Eight tiles of 16 lines of 64 bytes. Not a local variable: compilers think that loading it reads its first word alone.
const TileConfig TILES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

inline void configure_tiles() { _tile_loadconfig(&TILES); }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// 32 rows (or 16) times the weights of 32 outputs: sums [32][32]. FIRST: the weights are not in a cache yet.
template <bool BOTH, bool FIRST>
inline void multiply(const uint16_t* x, int64_t stride, const uint16_t* w, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k, w += 2 * TILE, x += 32) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + TILE, 64);
    _tile_loadd(4, x, stride * 2);
    if (BOTH) _tile_loadd(5, x + 16 * stride, stride * 2);
    if (FIRST) {
      const char* at = reinterpret_cast<const char*>(w) + AHEAD;  // behind the last weight too: a prefetch cannot fail
      for (int i = 0; i < 32; ++i) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (BOTH) {
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }
}

// Tiles 0 to 3 from and to two rows of two tiles side by side: [2][16][2][16] numbers of 32 bits.
template <typename T>
inline void load_sums(const T* sums, bool fresh) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 128);
    _tile_loadd(1, sums + 16, 128);
    _tile_loadd(2, sums + 512, 128);
    _tile_loadd(3, sums + 528, 128);
  }
}

template <typename T>
inline void store_sums(T* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 512, 128);
  _tile_stored(3, sums + 528, 128);
}

// The same for 32 rows in tiles (`to_tiles`), added to `sums` where they are not `fresh`, while `lines` of 64 bytes at
// `next` are on their way.
inline void multiply_tiles(const uint16_t* x, const uint16_t* w, int64_t steps, float* sums, bool fresh, const char* next,
                           int64_t lines) {
  load_sums(sums, fresh);
  for (int64_t i = 0; i < lines; ++i) _mm_prefetch(next + 64 * i, _MM_HINT_T1);
  for (int64_t k = 0; k < steps; ++k, w += 2 * TILE, x += 2 * TILE) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + TILE, 64);
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums);
}

// How rows lie, in groups of 32 and their numbers in blocks of 32: numbers from one group, block or row to the next.
struct Layout {
  int64_t group, block, row;

  int64_t at(int64_t row_, int64_t block_) const { return row_ / 32 * group + block_ * block + row_ % 32 * row; }
};

inline Layout in_lines(int64_t width) { return {32 * width, 32, width}; }     // one row behind the other
inline Layout in_tiles(int64_t width) { return {32 * width, 2 * TILE, 32}; }  // as `multiply_tiles` reads them

// Rows cut into chunks of whole groups of 32, as evenly as these allow: not more than `most` each, and a multiple of
// `threads` chunks, so that all have as many.
struct Cut {
  int64_t rows, groups, chunks;

  Cut(int64_t rows_, int64_t most, int64_t threads)
      : rows(rows_), groups((rows + 31) / 32), chunks((rows + most * threads - 1) / (most * threads) * threads) {}

  int64_t begin(int64_t chunk) const { return groups * chunk / chunks * 32; }
  int64_t end(int64_t chunk) const { return begin(chunk + 1) < rows ? begin(chunk + 1) : rows; }
  int64_t of(int64_t row) const { return ((row / 32 + 1) * chunks - 1) / groups; }
  int64_t largest() const { return (groups + chunks - 1) / chunks * 32; }
};

// Bias, ReLU or residual, and rounding, of the sums of `count` rows from `row` on, in one group, and 32 outputs.
template <Then THEN>
inline void finish(const float* sums, int64_t row, int count, int64_t block, int64_t outputs, const uint16_t* bias,
                   const uint16_t* residual, uint16_t* y, Layout layout) {
  const int64_t first = 32 * block, at = layout.at(row, block);
  const __mmask32 mask = outputs - first < 32 ? (1u << (outputs - first)) - 1 : ~0u;
  const __m512i b = bias ? _mm512_maskz_loadu_epi16(mask, bias + first) : _mm512_setzero_si512();
  const __m512 low = widen(_mm512_castsi512_si256(b)), high = widen(_mm512_extracti64x4_epi64(b, 1));
  for (int r = 0; r < count; ++r) {
    __m512 u = _mm512_add_ps(_mm512_load_ps(sums + 32 * r), low), v = _mm512_add_ps(_mm512_load_ps(sums + 32 * r + 16), high);
    if (THEN == RELU) {  // in this order NaN stays NaN
      u = _mm512_max_ps(_mm512_setzero_ps(), u);
      v = _mm512_max_ps(_mm512_setzero_ps(), v);
    }
    if (THEN == ADD) {
      const __m512i other = _mm512_maskz_loadu_epi16(mask, residual + at + r * layout.row);
      u = _mm512_add_ps(u, widen(_mm512_castsi512_si256(other)));
      v = _mm512_add_ps(v, widen(_mm512_extracti64x4_epi64(other, 1)));
    }
    _mm512_mask_storeu_epi16(y + at + r * layout.row, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v, u)));
  }
}

// `rows` rows of x to tiles [rows / 32][steps][2][16][32], filled up with zeros to 32 rows.
inline void to_tiles(int64_t rows, int64_t steps, const uint16_t* x, int64_t stride, uint16_t* tiles) {
  for (int64_t row = 0; row < rows; row += 32)
    for (int64_t k = 0; k < steps; ++k)
      for (int64_t r = row; r < row + 32; ++r, tiles += 32)
        _mm512_store_si512(tiles, r < rows ? _mm512_loadu_si512(x + r * stride + k * 32) : _mm512_setzero_si512());
}

// x W^T, cut by outputs: each weight is read by one thread. For all threads of a parallel region that have
// configured their tiles; they wait for none at the end. x: `stride` numbers from row to row. `last`: the last rows % 32
// rows, `inputs` apart, with room behind them for 32, since a tile reads whole rows.
// `finish` is called with the sums of some rows and 32 outputs: (sums, first row, rows, block of outputs).
template <typename Finish>
void multiply_outputs(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride,
                      const uint16_t* last, const uint16_t* w, Finish finish) {
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32;
  const int64_t at_once = ROWS_BYTES / (2 * inputs) < 32 ? 32 : ROWS_BYTES / (2 * inputs) / 32 * 32;
  alignas(64) float sums[32 * 32];
  for (int64_t from = 0; from < rows; from += at_once) {
    const int64_t to = from + at_once < rows ? from + at_once : rows;
    share(blocks, [&](int64_t block) {
      const uint16_t* weights = w + block * steps * 2 * TILE;
      for (int64_t row = from; row < to; row += 32) {
        const int count = to - row < 32 ? int(to - row) : 32;
        const uint16_t* part = count < 32 ? last : x + row * stride;
        const int64_t apart = count < 32 ? inputs : stride;
        const auto run = count > 16 ? (row == from ? multiply<true, true> : multiply<true, false>)
                                    : (row == from ? multiply<false, true> : multiply<false, false>);
        run(part, apart, weights, steps, sums);
        finish(sums, row, count, block);
      }
    });
  }
}

template <Then THEN>
void by_outputs(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride, const uint16_t* last,
                const uint16_t* w, const uint16_t* bias, const uint16_t* residual, uint16_t* y) {
  multiply_outputs(rows, outputs, inputs, x, stride, last, w, [&](const float* sums, int64_t row, int count, int64_t block) {
    finish<THEN>(sums, row, count, block, outputs, bias, residual, y, in_lines(outputs));
  });
}

// The largest sums so far of each row, rounded to bfloat16, in 32 lanes: output 32 block + lane. The first of equals, since
// a thread's blocks rise.
struct alignas(64) Largest {
  float values[32];
  int32_t blocks[32];
};

inline void see_largest(const float* sums, int count, int64_t block, int64_t outputs, Largest* rows) {
  const int64_t left = outputs - 32 * block;
  const __mmask32 mask = left < 32 ? (1u << left) - 1 : ~0u;
  const __m512i at = _mm512_set1_epi32(int32_t(block));
  for (int r = 0; r < count; ++r) {
    const __m512i numbers = reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(_mm512_load_ps(sums + 32 * r + 16), _mm512_load_ps(sums + 32 * r)));
    const __m512 halves[] = {widen(_mm512_castsi512_si256(numbers)), widen(_mm512_extracti64x4_epi64(numbers, 1))};
    for (int half = 0; half < 2; ++half) {
      float* values = rows[r].values + 16 * half;
      const __mmask16 own = __mmask16(mask >> (16 * half));
      const __mmask16 larger = _mm512_mask_cmp_ps_mask(own, halves[half], _mm512_load_ps(values), _CMP_GT_OQ);
      _mm512_mask_store_ps(values, larger, halves[half]);
      _mm512_mask_store_epi32(rows[r].blocks + 16 * half, larger, at);
    }
  }
}

// The same for rows in tiles [rows / 32][inputs / 32][2][16][32]. A thread that has them to itself, not more than ROWS,
// takes first the first inputs of all rows (INPUTS), which stay in its core's L2 cache. Threads that share them have parts
// of the outputs, and as many rows at a time as stay there whole. Of a block's weights DEEP inputs at a time stay in the
// L1 cache while the rows go by.
template <Then THEN>
void of_tiles(Team team, int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* tiles, const uint16_t* w,
              const uint16_t* bias, const uint16_t* residual, uint16_t* y, Layout layout) {
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32, fit = ROWS_BYTES / (64 * inputs);
  const int64_t at_once = team.is_alone ? INPUTS / 32 : steps, all = (rows + 31) / 32;
  const int64_t some = team.is_alone || fit > all ? all : fit < 1 ? 1 : fit;
  const bool is_whole = steps <= at_once;
  thread_local Buffer<float> kept;
  float* sums = kept.room((is_whole ? 1 : blocks) * some * 1024);
  for (int64_t from = 0; from < rows; from += 32 * some) {
    const int64_t to = from + 32 * some < rows ? from + 32 * some : rows, groups = (to - from + 31) / 32;
    for (int64_t first = 0; first < steps; first += at_once) {
      const int64_t end = first + at_once < steps ? first + at_once : steps;
      team.share(blocks, [&](int64_t block) {
        float* block_sums = sums + (is_whole ? 0 : block) * groups * 1024;
        for (int64_t k = first; k < end; k += DEEP / 32) {
          const int64_t deep = end - k < DEEP / 32 ? end - k : DEEP / 32, ahead = (deep * 32 + groups - 1) / groups;
          const uint16_t* weights = w + (block * steps + k) * 2 * TILE;
          const uint16_t* next = weights + (k + deep < end ? deep : steps - k + first) * 2 * TILE;
          for (int64_t group = 0; group < groups; ++group) {
            const int64_t row = from + 32 * group;
            const int count = to - row < 32 ? int(to - row) : 32;
            const bool is_last = k + deep == steps;
            if (is_last)
              for (int r = 0; r < count; ++r) __builtin_prefetch(y + layout.at(row + r, block), 1, 2);
            multiply_tiles(tiles + (row / 32 * steps + k) * 2 * TILE, weights, deep, block_sums + group * 1024, k == 0,
                           reinterpret_cast<const char*>(next) + group * ahead * 64, ahead);
            if (is_last) finish<THEN>(block_sums + group * 1024, row, count, block, outputs, bias, residual, y, layout);
          }
        }
      });
    }
  }
}

}  // namespace cpu

#endif
