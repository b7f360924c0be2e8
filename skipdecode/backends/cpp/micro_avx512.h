// Micro-kernels of AVX-512: float32 by FMA, bfloat16 by `vdpbf16ps`, bytes by VNNI. All three share one loop, since each
// multiplies four bytes of x (one float32, two bfloat16 or four bytes), broadcast to 16 outputs, by a line of 64 bytes of
// weights. Intel's cores since Sapphire Rapids take as long for a pair of bfloat16 as for four float32. There a line of
// pairs is widened to two lines of float32, once for all rows in registers, and the rows have been widened before
// (`Paired`).
//
// Up to AT_ONCE rows and 32 outputs stay in registers; weights are loaded once for all these rows. An element of x is
// broadcast as it is loaded. Missing rows cost nothing. With `Paired`, more rows are processed by 16 outputs at a time
// (`multiply_tile`).

#pragma once

#include "numbers.h"

#include <array>
#include <type_traits>
#include <utility>

namespace cpu {

constexpr int AT_ONCE = 12;  // rows: 24 sums, 2 lines of weights and an element of x take 27 of 32 registers (Paired: 33)

// Up to this many rows of the loop (an int8 row counts twice) a core waits for weights alone, and prefetches them into
// its L1 cache; with more rows they would evict each other (measured 2026-11-29). Not on Intel's cores, for the reason
// given at `fetch`.
#ifdef IS_AMD
constexpr int WAITING = 4;
#else
constexpr int WAITING = 0;
#endif

constexpr int TILE_ROWS = 28;  // of 16 outputs: 28 sums, a line of weights (Paired: its two halves and a mask), x in memory

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  using Sum = __m512;
  static constexpr int PARTS = 1;  // products per line, each with an element of x
  static __m512i part(__m512i line, int) { return line; }
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Sum sum) { _mm512_store_ps(to, sum); }
  static __m512i broadcast(const char* x) {  // as a float: only then it becomes a memory operand of the product
    float number;
    std::memcpy(&number, x, 4);
    return _mm512_castps_si512(_mm512_set1_ps(number));
  }
  static Sum add(Sum sum, __m512i x, __m512i w) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
  }
};

#ifdef HAS_BFLOAT16
template <>
struct Dot<bfloat16> : Dot<float> {
  static Sum add(Sum sum, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};
#endif

struct Paired;  // weights in bfloat16, x in float32
template <>
struct Dot<Paired> : Dot<float> {
  static constexpr int PARTS = 2;
  static __m512i part(__m512i line, int second) {
    return second ? _mm512_and_si512(line, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(line, 16);
  }
};

#ifdef __AVX512VNNI__
template <>
struct Dot<uint8_t> {  // unsigned x, signed weights
  using Sum = __m512i;
  static constexpr int PARTS = 1;
  static __m512i part(__m512i line, int) { return line; }
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load(const int32_t* from) { return _mm512_load_si512(from); }
  static void store(int32_t* to, Sum sum) { _mm512_store_si512(to, sum); }
  static __m512i broadcast(const char* x) {
    int32_t number;
    std::memcpy(&number, x, 4);
    return _mm512_set1_epi32(number);
  }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
};
#endif

// Multiplies ROWS rows by the weights of 32 outputs, `steps` times LINES lines of two tiles each, and adds to `sums`
// [ROWS][32] or overwrites them if `fresh`. x: `apart` bytes from one step to the next, 4 * LINES from row to row
// (Paired: 8 * LINES). Each step prefetches `lines` lines from `next` on, at most 2 * LINES, into the L2 cache, or the L1
// cache (WAITING): one by one, since a burst would hold up loads that miss the L1 cache.
template <typename T, int LINES, int ROWS, typename Number>
inline void multiply_rows(const char* x, int64_t apart, const char* w, int64_t steps, Number* sums, bool fresh,
                          const char* next, int64_t lines) {
  using D = Dot<T>;
  constexpr int PARTS = D::PARTS;
  constexpr auto HINT = ROWS <= WAITING ? _MM_HINT_T0 : _MM_HINT_T1;
  const int64_t forward = 32 * lines / LINES;  // bytes to prefetch with each line of weights
  typename D::Sum a[ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
    a[r][0] = fresh ? D::zero() : D::load(sums + 32 * r);
    a[r][1] = fresh ? D::zero() : D::load(sums + 32 * r + 16);
  }
  for (int64_t step = 0; step < steps; ++step, x += apart, w += 128 * LINES) {
#pragma GCC unroll 1
    for (int i = 0; i < LINES; ++i, next += 2 * forward) {
      _mm_prefetch(next, HINT);
      _mm_prefetch(next + forward, HINT);
      const __m512i w0 = _mm512_loadu_si512(w + 64 * i), w1 = _mm512_loadu_si512(w + 64 * (LINES + i));
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; ++p) {
        const __m512i v0 = D::part(w0, p), v1 = D::part(w1, p);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          const __m512i b = D::broadcast(x + 4 * (PARTS * (LINES * r + i) + p));
          a[r][0] = D::add(a[r][0], b, v0);
          a[r][1] = D::add(a[r][1], b, v1);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
    D::store(sums + 32 * r, a[r][0]);
    D::store(sums + 32 * r + 16, a[r][1]);
  }
}

// Like `multiply_rows`, but one tile of 16 outputs after the other, for up to TILE_ROWS rows. Each product reads its
// element of x from memory, so that a core issues little besides products, and a line of pairs is widened for more of
// them. Bitwise equal to `multiply_rows`.
template <typename T, int LINES, int ROWS, typename Number>
inline void multiply_tile(const char* x, int64_t apart, const char* w, int64_t steps, Number* sums, bool fresh,
                          const char* next, int64_t lines) {
  using D = Dot<T>;
  constexpr int PARTS = D::PARTS;
  const int64_t forward = 32 * lines / LINES;  // bytes to prefetch with each line of weights
  for (int tile = 0; tile < 2; ++tile, w += 64 * LINES, sums += 16) {
    typename D::Sum a[ROWS];
#pragma GCC unroll 28
    for (int r = 0; r < ROWS; ++r) a[r] = fresh ? D::zero() : D::load(sums + 32 * r);
    const char *rows = x, *weights = w;
    for (int64_t step = 0; step < steps; ++step, rows += apart, weights += 128 * LINES) {
#pragma GCC unroll 1
      for (int i = 0; i < LINES; ++i, next += forward) {
        _mm_prefetch(next, _MM_HINT_T1);
        const __m512i line = _mm512_loadu_si512(weights + 64 * i);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
          const __m512i part = D::part(line, p);
#pragma GCC unroll 28
          for (int r = 0; r < ROWS; ++r)
            a[r] = D::add(a[r], D::broadcast(rows + 4 * (PARTS * (LINES * r + i) + p)), part);
        }
      }
    }
#pragma GCC unroll 28
    for (int r = 0; r < ROWS; ++r) D::store(sums + 32 * r, a[r]);
  }
}

template <typename Number>
using Run = void (*)(const char*, int64_t, const char*, int64_t, Number*, bool, const char*, int64_t);

// Splits `count` rows into parts of at most `most` rows, as evenly as possible; `lines` is the total. runs[0] is for
// `least` rows.
template <typename T, int LINES, typename Number>
inline void in_parts(const Run<Number>* runs, int least, int most, const void* x, int64_t apart, int count,
                     const void* w, int64_t steps, Number* sums, bool fresh, const char* next, int64_t lines) {
  const int parts = (count + most - 1) / most;
  const int64_t each = (lines + parts * steps - 1) / (parts * steps);
  for (int part = 0; part < parts; ++part) {
    const int from = count * part / parts, to = count * (part + 1) / parts;
    const char* rows = static_cast<const char*>(x) + 4 * Dot<T>::PARTS * LINES * from;
    runs[to - from - least](rows, apart, static_cast<const char*>(w), steps, sums + 32 * from, fresh,
                            next + part * steps * each * 64, each);
  }
}

template <typename T, int LINES, typename Number, int... I>
constexpr std::array<Run<Number>, sizeof...(I)> few_runs(std::integer_sequence<int, I...>) {
  return {multiply_rows<T, LINES, 1 + I, Number>...};
}
template <typename T, int LINES, typename Number, int... I>
constexpr std::array<Run<Number>, sizeof...(I)> more_runs(std::integer_sequence<int, I...>) {
  return {multiply_tile<T, LINES, AT_ONCE + 1 + I, Number>...};
}

// Multiplies any number of rows.
template <typename T, int LINES, typename Number>
inline void multiply_any(const void* x, int64_t apart, int count, const void* w, int64_t steps, Number* sums, bool fresh,
                         const char* next, int64_t lines) {
  static constexpr auto FEW = few_runs<T, LINES, Number>(std::make_integer_sequence<int, AT_ONCE>());
#ifdef HAS_PAIRED
  if constexpr (std::is_same<Number, float>::value) {  // byte products take x only from a register
    static constexpr auto MORE = more_runs<T, LINES, Number>(std::make_integer_sequence<int, TILE_ROWS - AT_ONCE>());
    if (count > AT_ONCE)
      return in_parts<T, LINES>(MORE.data(), AT_ONCE + 1, TILE_ROWS, x, apart, count, w, steps, sums, fresh, next, lines);
  }
#endif
  in_parts<T, LINES>(FEW.data(), 1, AT_ONCE, x, apart, count, w, steps, sums, fresh, next, lines);
}

}  // namespace cpu
