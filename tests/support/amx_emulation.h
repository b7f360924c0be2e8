// AMX tiles in plain C++, put in front of the kernels (`-include`) by test_cpu_others.py: the whole `amx` back end then
// runs on a CPU without AMX. Eight tiles per thread, as the instructions see them; slow, and right by the manual's
// pseudocode. What it cannot show is speed, and the hardware's own rounding of bfloat16 sums: pairs are added one after
// the other in float32, subnormal numbers kept.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace amx_emulation {

struct Tile {
  uint8_t bytes[16][64];
  int rows, width;
};

inline thread_local Tile tiles[8];
inline thread_local bool is_configured = false;

inline void check(bool holds) {
  if (!holds) __builtin_trap();  // what the hardware answers with a fault
}

inline void configure(const void* config) {
  const uint8_t* at = static_cast<const uint8_t*>(config);
  check(at[0] == 1);
  for (int i = 0; i < 8; ++i) {
    uint16_t width;
    std::memcpy(&width, at + 16 + 2 * i, 2);
    check(width <= 64 && width % 4 == 0 && at[48 + i] <= 16);
    tiles[i] = {{}, at[48 + i], width};
  }
  is_configured = true;
}

inline void release() { is_configured = false; }

inline void zero(int tile) {
  check(is_configured);
  std::memset(tiles[tile].bytes, 0, sizeof(tiles[tile].bytes));
}

inline void load(int tile, const void* base, int64_t stride) {
  zero(tile);
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(tiles[tile].bytes[row], static_cast<const uint8_t*>(base) + row * stride, tiles[tile].width);
}

inline void store(int tile, void* base, int64_t stride) {
  check(is_configured);
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(static_cast<uint8_t*>(base) + row * stride, tiles[tile].bytes[row], tiles[tile].width);
}

inline float widened(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// sums[m][n] += a[m][2k] * b[k][2n], then += a[m][2k + 1] * b[k][2n + 1]
inline void multiply_bfloat16(int sums, int a, int b) {
  check(is_configured);
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, &tiles[sums].bytes[m][4 * n], 4);
        for (int i = 0; i < 2; ++i)
          sum += widened(&tiles[a].bytes[m][4 * k + 2 * i]) * widened(&tiles[b].bytes[k][4 * n + 2 * i]);
        std::memcpy(&tiles[sums].bytes[m][4 * n], &sum, 4);
      }
}

// sums[m][n] += the four byte products of a[m][4k..] and b[k][4n..]
template <typename A>
inline void multiply_bytes(int sums, int a, int b) {
  check(is_configured && tiles[a].width == 4 * tiles[b].rows && tiles[sums].rows == tiles[a].rows);
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < tiles[b].rows; ++k)
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, &tiles[sums].bytes[m][4 * n], 4);
        for (int i = 0; i < 4; ++i)
          sum += int32_t(A(tiles[a].bytes[m][4 * k + i])) * int32_t(int8_t(tiles[b].bytes[k][4 * n + i]));
        std::memcpy(&tiles[sums].bytes[m][4 * n], &sum, 4);
      }
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) amx_emulation::configure(config)
#define _tile_release() amx_emulation::release()
#define _tile_zero(tile) amx_emulation::zero(tile)
#define _tile_loadd(tile, base, stride) amx_emulation::load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_emulation::store(tile, base, stride)
#define _tile_dpbf16ps(sums, a, b) amx_emulation::multiply_bfloat16(sums, a, b)
#define _tile_dpbssd(sums, a, b) amx_emulation::multiply_bytes<int8_t>(sums, a, b)
#define _tile_dpbusd(sums, a, b) amx_emulation::multiply_bytes<uint8_t>(sums, a, b)

// The kernel is not asked for tiles that are not there.
extern "C" inline long amx_emulation_allows() { return 0; }
#include <sys/syscall.h>
#include <unistd.h>
#define syscall(...) amx_emulation_allows()
