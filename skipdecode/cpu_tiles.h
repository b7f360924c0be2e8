// Products of few rows with bfloat16 weights on a CPU's matrix tiles (AMX), with a bias, and a ReLU or a residual, in the
// same pass; for cpu_linear.cpp and cpu_block.cpp.
//
// Decoding multiplies few rows by weights that come from memory, so the weights lie in the order in which they are read,
// one stream per thread, and are prefetched AHEAD of their use: with 32 rows that takes a half to a quarter of the time
// of oneDNN, which waits for each line. A row's sums run over k in one order, whatever the number of rows: a row's bits
// do not depend on its batch.
//
// Packed weights: for each 32 outputs, for each 32 inputs, two tiles of 16 outputs; a tile is 16 lines of input pairs.

#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES

#include <immintrin.h>

namespace cpu {

constexpr int64_t TILE = 512;             // numbers in a tile of bfloat16, 1 KiB
constexpr int64_t AHEAD = 8192;           // bytes
constexpr int64_t ROWS_BYTES = 3 << 19;  // of x, at a time: with the weights of 32 outputs they stay in the L2 cache

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

// Bias, ReLU or residual, and rounding, of `rows` x `columns` sums.
template <Then THEN>
inline void finish(const float* sums, int rows, int columns, const uint16_t* bias, const uint16_t* residual, uint16_t* y,
                   int64_t width) {
  for (int c = 0; c < columns; c += 16) {
    const __mmask16 mask = columns - c < 16 ? (1u << (columns - c)) - 1 : 0xffff;
    const __m512 b = bias ? widen(_mm256_maskz_loadu_epi16(mask, bias + c)) : _mm512_setzero_ps();
    for (int r = 0; r < rows; ++r) {
      __m512 v = _mm512_add_ps(_mm512_load_ps(sums + 32 * r + c), b);
      if (THEN == RELU) v = _mm512_max_ps(_mm512_setzero_ps(), v);  // in this order NaN stays NaN
      if (THEN == ADD) v = _mm512_add_ps(v, widen(_mm256_maskz_loadu_epi16(mask, residual + r * width + c)));
      _mm256_mask_storeu_epi16(y + r * width + c, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
    }
  }
}

// x W^T + bias: a thread's part of it, to be called by all threads of a parallel region that have configured their tiles;
// they wait for none at the end. x: `stride` numbers from row to row. `last`: the last rows % 32 rows, `inputs` apart, with
// room behind them for 32, since a tile reads whole rows.
template <Then THEN>
void linear(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride, const uint16_t* last,
            const uint16_t* w, const uint16_t* bias, const uint16_t* residual, uint16_t* y) {
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32;
  const int64_t at_once = ROWS_BYTES / (2 * inputs) < 32 ? 32 : ROWS_BYTES / (2 * inputs) / 32 * 32;
  alignas(64) float sums[32 * 32];
  for (int64_t from = 0; from < rows; from += at_once) {
    const int64_t to = from + at_once < rows ? from + at_once : rows;
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < blocks; ++block) {
      const uint16_t* weights = w + block * steps * 2 * TILE;
      const int columns = outputs - 32 * block < 32 ? int(outputs - 32 * block) : 32;
      for (int64_t row = from; row < to; row += 32) {
        const int count = to - row < 32 ? int(to - row) : 32;
        const uint16_t* part = count < 32 ? last : x + row * stride;
        const int64_t apart = count < 32 ? inputs : stride;
        const auto run = count > 16 ? (row == from ? multiply<true, true> : multiply<true, false>)
                                    : (row == from ? multiply<false, true> : multiply<false, false>);
        run(part, apart, weights, steps, sums);
        const int64_t at = row * outputs + 32 * block;
        finish<THEN>(sums, count, columns, bias ? bias + 32 * block : nullptr, residual + at, y + at, outputs);
      }
    }
  }
}

}  // namespace cpu

#endif
