// The seam between back ends: what a product of a few rows and the weights of 32 outputs is made of. All else is shared.
//
// Back ends differ in how they multiply (micro_*.h), in how they want rows of x to lie, and in how 16-bit numbers are cut
// into bytes (`Bytes`): AMX multiplies bytes with and without a sign by weights with one, VNNI only those without.
// Weights in bfloat16 go with rows in float32 everywhere (`Paired`). HAS_PAIRED, from the compiler's flags: rows in bfloat16
// are widened to that.

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

#if defined(BACKEND_AMX) || (defined(BACKEND_AVX512) && defined(HAS_BFLOAT16) && defined(__AVX512VNNI__))
#define HAS_INT8
#endif

#include <type_traits>

namespace cpu {

// Whether few rows are read one behind the other, up to 32 at a time, of which the last must be filled up.
template <typename T>
#ifdef BACKEND_AMX
constexpr bool READS_LINES = std::is_same<T, bfloat16>::value;
#else
constexpr bool READS_LINES = false;
#endif

// As what a product with weights W reads rows of T: see `Paired`.
#ifdef HAS_PAIRED
template <typename T, typename W>
using Row = float;
#else
template <typename T, typename W>
using Row = T;
#endif

// Each thread of a parallel region needs one while it multiplies.
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

// `count` rows of x in tiles, at most 32 (where rows were widened, any), times the weights of 32 outputs: `steps` blocks
// of 32 inputs. sums [rows][32] are added to where they are not `fresh`. x: `block` numbers from one block to the next.
// `lines` lines of 64 bytes from `next` on are on their way to the L2 cache afterwards, or to the L1 cache.
void multiply_tiles(const float* x, int64_t block, int count, const float* w, int64_t steps, float* sums, bool fresh,
                    const char* next, int64_t lines);
void multiply_tiles(const float* x, int64_t block, int count, const bfloat16* w, int64_t steps, float* sums, bool fresh,
                    const char* next, int64_t lines);
#if defined(HAS_BFLOAT16) && !defined(HAS_PAIRED)
void multiply_tiles(const bfloat16* x, int64_t block, int count, const bfloat16* w, int64_t steps, float* sums, bool fresh,
                    const char* next, int64_t lines);
#endif

constexpr int64_t LINES = 2048;  // bytes of 32 rows of x, or outputs, and 64 inputs

// Rows as whole numbers: tiles [rows / 16][steps][32][64] (`Bytes`), scales [rows].
struct WholeRows {
  uint8_t* tiles;
  float* scales;
  int64_t apart;  // bytes from one step to the next
};

// `WholeRows::apart`: fewer than 16 rows lie closer, lest they share a few lines of the cache; AMX reads all 16.
inline int64_t apart_of(int64_t rows) {
#ifdef BACKEND_AMX
  return LINES;
#else
  return rows < 16 ? 128 * rows : LINES;
#endif
}

#ifdef HAS_INT8
// How the bytes of 16 rows lie in 2 KiB for 64 inputs, and their sums accordingly: 32 rows of 64 bytes.
struct Bytes {
#ifdef BACKEND_AMX
  static constexpr int HIGH = 1, LOW = 16;  // rows from one row of x to the next, and from its high bytes to the low ones
  static constexpr uint8_t BIAS = 0;
#else
  static constexpr int HIGH = 2, LOW = 1;
  static constexpr uint8_t BIAS = 128;  // what high bytes are raised by, to be without a sign
#endif
};

// `count` rows of x as bytes, at most 16, times the weights of 32 outputs: `steps` blocks of 64 inputs. x: `apart` bytes from
// one block to the next.
void multiply_whole(const uint8_t* x, int64_t apart, int count, const int8_t* w, int64_t steps, int32_t* sums, bool fresh, const char* next,
                    int64_t lines);
#endif

}  // namespace cpu
