// Micro-kernels of AMX: bfloat16 and bytes on matrix tiles; float32 uses AVX-512.
//
// Tiles have 16 rows, so 16 or 32 rows are always read and multiplied.

#pragma once

#include "micro_avx512.h"

namespace cpu {

constexpr int64_t AHEAD = 8192;  // bytes

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Eight tiles of 16 lines of 64 bytes. Not a local variable: compilers assume that loading it reads only its first word.
const TileConfig TILES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Multiplies 32 rows (or 16), `stride` apart, by the weights of 32 outputs: sums [32][32]. FIRST: the weights are not in
// a cache yet.
template <bool BOTH, bool FIRST>
inline void multiply_lines(const bfloat16* x, int64_t stride, const bfloat16* w, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k, w += 1024, x += 32) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + 512, 64);
    _tile_loadd(4, x, stride * 2);
    if (BOTH) _tile_loadd(5, x + 16 * stride, stride * 2);
    if (FIRST) {
      const char* at = reinterpret_cast<const char*>(w) + AHEAD;  // beyond the last weight, too: a prefetch cannot fault
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

// Loads and stores tiles 0 to 3 as two rows of two adjacent tiles: [2][16][2][16] elements of 32 bits.
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

// Multiplies 32 rows in tiles, and adds to `sums` or overwrites them if `fresh`; prefetches `lines` lines of 64 bytes
// from `next` on.
inline void multiply_matrix(const bfloat16* x, const bfloat16* w, int64_t steps, float* sums, bool fresh,
                            const char* next, int64_t lines) {
  load_sums(sums, fresh);
  for (int64_t i = 0; i < lines; ++i) _mm_prefetch(next + 64 * i, _MM_HINT_T1);
  for (int64_t k = 0; k < steps; ++k, w += 1024, x += 1024) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + 512, 64);
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums);
}

// Multiplies 16 quantised rows, [high, low][16][64] for each step, by the weights of 32 outputs, and adds to `sums`
// [high, low][16][32] or overwrites them if `fresh`; prefetches `lines` lines of 64 bytes from `next` on.
inline void multiply_bytes(const uint8_t* x, const int8_t* w, int64_t steps, int32_t* sums, bool fresh, const char* next,
                           int64_t lines) {
  load_sums(sums, fresh);
  lines = (lines + steps - 1) / steps;
  for (int64_t k = 0; k < steps; ++k, w += 2048, x += 2048) {
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + 1024, 64);
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + 1024, 64);
    for (int64_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  store_sums(sums);
}

}  // namespace cpu
