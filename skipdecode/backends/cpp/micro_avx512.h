// Micro-kernels of AVX-512: float32 by FMA, bfloat16 by `vdpbf16ps`, bytes by VNNI. One loop for all three, since each takes
// four bytes of x (one float32, two bfloat16, four bytes), the same for 16 outputs, by a line of 64 bytes of weights.
// Intel's cores since Sapphire Rapids multiply a pair of bfloat16 in the time of four float32. There a line of pairs is
// widened to two of float32, once for up to AT_ONCE rows, whose numbers were widened before (`Paired`).
//
// Up to AT_ONCE rows and 32 outputs stay in registers; weights are loaded once for all these rows. A number of x is
// broadcast as it is loaded. Rows that are not there cost nothing.

#pragma once

#include "numbers.h"

namespace cpu {

constexpr int AT_ONCE = 12;  // rows: 24 sums, two lines of weights, one number of x: 27 of 32 registers (Paired: 33, one spilled)

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  using Sum = __m512;
  static constexpr int PARTS = 1;  // products of a line, with a number of x each
  static __m512i part(__m512i line, int) { return line; }
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Sum sum) { _mm512_store_ps(to, sum); }
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
struct Dot<uint8_t> {  // x without a sign, weights with one
  using Sum = __m512i;
  static constexpr int PARTS = 1;
  static __m512i part(__m512i line, int) { return line; }
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load(const int32_t* from) { return _mm512_load_si512(from); }
  static void store(int32_t* to, Sum sum) { _mm512_store_si512(to, sum); }
  static Sum add(Sum sum, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(sum, x, w); }
};
#endif

// ROWS rows times the weights of 32 outputs, `steps` times LINES lines of two tiles each, added to `sums` [ROWS][32] where
// they are not `fresh`. x: `apart` bytes from one step to the next, 4 LINES from row to row (Paired: 8 LINES). With every
// step `lines` lines from `next` on are fetched into the L2 cache.
template <typename T, int LINES, int ROWS, typename Number>
inline void multiply_rows(const char* x, int64_t apart, const char* w, int64_t steps, Number* sums, bool fresh,
                          const char* next, int64_t lines) {
  using D = Dot<T>;
  constexpr int PARTS = D::PARTS;
  typename D::Sum a[ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
    a[r][0] = fresh ? D::zero() : D::load(sums + 32 * r);
    a[r][1] = fresh ? D::zero() : D::load(sums + 32 * r + 16);
  }
  for (int64_t step = 0; step < steps; ++step, x += apart, w += 128 * LINES) {
    for (int64_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int i = 0; i < LINES; ++i) {
      const __m512i w0 = _mm512_loadu_si512(w + 64 * i), w1 = _mm512_loadu_si512(w + 64 * (LINES + i));
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; ++p) {
        const __m512i v0 = D::part(w0, p), v1 = D::part(w1, p);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
          int32_t number;
          std::memcpy(&number, x + 4 * (PARTS * (LINES * r + i) + p), 4);
          const __m512i b = _mm512_set1_epi32(number);
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

// The same for any `count` of rows up to 32, in parts of AT_ONCE at most that are as even as can be; `lines` are of all.
template <typename T, int LINES, typename Number>
inline void multiply_any(const void* x, int64_t apart, int count, const void* w, int64_t steps, Number* sums, bool fresh,
                         const char* next, int64_t lines) {
  using Run = void (*)(const char*, int64_t, const char*, int64_t, Number*, bool, const char*, int64_t);
  static constexpr Run RUNS[AT_ONCE] = {
      multiply_rows<T, LINES, 1, Number>, multiply_rows<T, LINES, 2, Number>,  multiply_rows<T, LINES, 3, Number>,
      multiply_rows<T, LINES, 4, Number>, multiply_rows<T, LINES, 5, Number>,  multiply_rows<T, LINES, 6, Number>,
      multiply_rows<T, LINES, 7, Number>, multiply_rows<T, LINES, 8, Number>,  multiply_rows<T, LINES, 9, Number>,
      multiply_rows<T, LINES, 10, Number>, multiply_rows<T, LINES, 11, Number>, multiply_rows<T, LINES, 12, Number>};
  const int parts = (count + AT_ONCE - 1) / AT_ONCE;
  const int64_t each = (lines + parts * steps - 1) / (parts * steps);
  for (int part = 0; part < parts; ++part) {
    const int from = count * part / parts, to = count * (part + 1) / parts;
    RUNS[to - from - 1](static_cast<const char*>(x) + 4 * Dot<T>::PARTS * LINES * from, apart,
                        static_cast<const char*>(w), steps, sums + 32 * from, fresh, next + part * steps * each * 64, each);
  }
}

}  // namespace cpu
