// The interface between the back ends and the rest: the product of a few rows with the weights of 32 outputs.
//
// Back ends differ in how they multiply (micro_*.h), in the layout of rows of x, and in how 16-bit integers are split
// into bytes (`Bytes`): AMX multiplies signed and unsigned bytes by signed weights, VNNI only unsigned ones. With
// HAS_PAIRED, set by the build, products of bfloat16 widen rows to float32 (`Paired`).

#pragma once

#if defined(BACKEND_AMX)
#include "micro_amx.h"
#elif defined(BACKEND_AVX512)
#include "micro_avx512.h"
#elif defined(BACKEND_AVX2)
#include "micro_avx2.h"
#else
#error "a back end must be named"
#endif

#include "micro_blocks.h"

#if defined(BACKEND_AMX) || (defined(BACKEND_AVX512) && defined(HAS_BFLOAT16) && defined(__AVX512VNNI__))
#define HAS_INT8
#endif

#include <type_traits>

namespace cpu {

// True if few rows are read in row-major order, up to 32 at a time, the last group padded.
template <typename T>
#ifdef BACKEND_AMX
constexpr bool READS_LINES = std::is_same<T, bfloat16>::value;
#else
constexpr bool READS_LINES = false;
#endif

// The type in which a product reads rows of T: see `Paired`.
#ifdef HAS_PAIRED
template <typename T>
using Row = float;
#else
template <typename T>
using Row = T;
#endif

// Every thread of a parallel region needs one while it multiplies.
struct Unit {
#ifdef BACKEND_AMX
  Unit() { _tile_loadconfig(&TILES); }
  ~Unit() { _tile_release(); }
#else
  Unit() {}
  ~Unit() {}
#endif
  Unit(const Unit&) = delete;
};

// Multiplies `count` rows of x in tiles, at most 32 (any number if they were widened), by the weights of 32 outputs:
// `steps` blocks of 32 inputs. Adds to sums [rows][32], or overwrites them if `fresh`. x: `block` elements from one block
// to the next. Prefetches `lines` lines of 64 bytes from `next` on.
void multiply_tiles(const float* x, int64_t block, int count, const float* w, int64_t steps, float* sums, bool fresh,
                    const char* next, int64_t lines);
#ifdef HAS_BFLOAT16
void multiply_tiles(const Row<bfloat16>* x, int64_t block, int count, const bfloat16* w, int64_t steps, float* sums,
                    bool fresh, const char* next, int64_t lines);
#endif

constexpr int64_t LINES = 2048;  // bytes of 32 rows of x, or of 32 outputs, and 64 inputs

// Quantised rows, for int8 weights tiles [rows / 16][steps][32][64] (`Bytes`) and scales [rows]; for weights in blocks
// records of `together` rows and 32 inputs (`BlockRows`).
struct QuantizedRows {
  uint8_t* tiles;
  float* scales;
  int64_t apart;  // bytes from one step to the next
  int64_t together;
};

// `QuantizedRows::apart`: fewer than 16 rows are laid out more densely, so that they do not compete for the same cache
// sets; AMX always reads 16.
inline int64_t apart_of(int64_t rows) {
#ifdef BACKEND_AMX
  return LINES;
#else
  return rows < 16 ? 128 * rows : LINES;
#endif
}

inline QuantizedRows quantized_rows(uint8_t* tiles, float* scales, int64_t rows) {
#ifdef BACKEND_AMX
  const int64_t tiled = TILED_ROWS;
#else
  const int64_t tiled = 16;
#endif
  return {tiles, scales, apart_of(rows), rows < tiled ? rows : 16};
}

// Multiplies `count` <= 16 rows by `steps` blocks of 32 outputs, and adds to `sums` [16][32] or overwrites them if
// `fresh`. `numbers`: those of the blocks, from `widen_blocks`; null: AMX tiles are not used.
// With these, prefetches `lines` lines of 64 bytes per step, twice, from `next` on.
void multiply_blocks(int format, BlockRows x, int count, const uint8_t* w, const int8_t* numbers, int64_t steps, float* sums,
                     bool fresh, const uint8_t* next, int64_t lines);
#ifdef BACKEND_AMX
void widen_blocks(int format, const uint8_t* w, int64_t steps, int8_t* to);
#endif

#ifdef HAS_INT8
// How the bytes of 16 rows for 64 inputs, and likewise their sums, are laid out in 2 KiB: 32 lines of 64 bytes.
struct Bytes {
#ifdef BACKEND_AMX
  static constexpr int HIGH = 1, LOW = 16;  // lines from one row of x to the next, and from its high to its low bytes
  static constexpr uint8_t BIAS = 0;
#else
  static constexpr int HIGH = 2, LOW = 1;
  static constexpr uint8_t BIAS = 128;  // added to high bytes, which makes them unsigned
#endif
};

// Multiplies `count` <= 16 quantised rows of x by the weights of 32 outputs: `steps` blocks of 64 inputs. x: `apart`
// bytes from one block to the next.
void multiply_quantized(const uint8_t* x, int64_t apart, int count, const int8_t* w, int64_t steps, int32_t* sums,
                        bool fresh, const char* next, int64_t lines);
#endif

}  // namespace cpu
