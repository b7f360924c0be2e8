// The micro-kernel of AVX2, for rows in float32: up to AT_ONCE rows and 16 outputs stay in its 16 registers, so that the two
// tiles of 32 outputs go one after the other. See micro_avx512.h.

#pragma once

#include "numbers.h"

namespace cpu {

constexpr int AT_ONCE = 6;  // rows: 12 sums, two parts of a line of weights, one number of x

template <typename T>
struct Dot;

template <>
struct Dot<float> {
  static constexpr int PARTS = 1;  // products of a line, with a number of x each
  static __m256 part(__m256i half, int) { return _mm256_castsi256_ps(half); }
};

struct Paired;  // weights in bfloat16, two inputs of an output side by side; x in float32
template <>
struct Dot<Paired> {
  static constexpr int PARTS = 2;
  static __m256 part(__m256i half, int second) {
    return _mm256_castsi256_ps(second ? _mm256_and_si256(half, _mm256_set1_epi32(int(0xffff0000))) : _mm256_slli_epi32(half, 16));
  }
};

template <typename T, int LINES, int ROWS>
inline void multiply_rows(const float* x, int64_t apart, const char* w, int64_t steps, float* sums, bool fresh,
                          const char* next, int64_t lines) {
  constexpr int PARTS = Dot<T>::PARTS;
  const int64_t forward = 64 * lines / LINES;  // bytes, with each line of weights
  __m256 a[ROWS][2];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    a[r][0] = fresh ? _mm256_setzero_ps() : _mm256_load_ps(sums + 32 * r);
    a[r][1] = fresh ? _mm256_setzero_ps() : _mm256_load_ps(sums + 32 * r + 8);
  }
  for (int64_t step = 0; step < steps; ++step, x += apart, w += 128 * LINES) {
#pragma GCC unroll 2
    for (int i = 0; i < LINES; ++i, next += forward) {
      _mm_prefetch(next, _MM_HINT_T1);
      const __m256i* line = reinterpret_cast<const __m256i*>(w + 64 * i);
      const __m256i w0 = _mm256_loadu_si256(line), w1 = _mm256_loadu_si256(line + 1);
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; ++p) {
        const __m256 v0 = Dot<T>::part(w0, p), v1 = Dot<T>::part(w1, p);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          const __m256 b = _mm256_broadcast_ss(x + 32 * r + PARTS * i + p);
          a[r][0] = _mm256_fmadd_ps(b, v0, a[r][0]);
          a[r][1] = _mm256_fmadd_ps(b, v1, a[r][1]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    _mm256_store_ps(sums + 32 * r, a[r][0]);
    _mm256_store_ps(sums + 32 * r + 8, a[r][1]);
  }
}

// As in micro_avx512.h; `apart` in bytes.
template <typename T, int LINES, typename Number>
inline void multiply_any(const void* x, int64_t apart, int count, const void* w, int64_t steps, Number* sums, bool fresh,
                         const char* next, int64_t lines) {
  using Run = void (*)(const float*, int64_t, const char*, int64_t, float*, bool, const char*, int64_t);
  static constexpr Run RUNS[AT_ONCE] = {multiply_rows<T, LINES, 1>, multiply_rows<T, LINES, 2>, multiply_rows<T, LINES, 3>,
                                        multiply_rows<T, LINES, 4>, multiply_rows<T, LINES, 5>, multiply_rows<T, LINES, 6>};
  const int parts = (count + AT_ONCE - 1) / AT_ONCE;
  const int64_t each = (lines + 2 * parts * steps - 1) / (2 * parts * steps);
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < parts; ++part) {
      const int from = count * part / parts, to = count * (part + 1) / parts;
      RUNS[to - from - 1](static_cast<const float*>(x) + 32 * from, apart / 4, static_cast<const char*>(w) + 64 * LINES * half,
                          steps, sums + 32 * from + 16 * half, fresh, next + (half * parts + part) * steps * each * 64, each);
    }
}

}  // namespace cpu
