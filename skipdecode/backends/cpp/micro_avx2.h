// The micro-kernel of AVX2, for rows in float32. Up to AT_ONCE rows and 16 outputs stay in its 16 registers, so the two
// tiles of 32 outputs are processed one after the other. See micro_avx512.h.

#pragma once

#include "numbers.h"

namespace cpu {

constexpr int AT_ONCE = 6;  // rows: 12 sums, two halves of a line of weights, one element of x

template <int LINES, int ROWS>
inline void multiply_rows(const float* x, int64_t apart, const char* w, int64_t steps, float* sums, bool fresh,
                          const char* next, int64_t lines) {
  const int64_t forward = 64 * lines / LINES;  // bytes to prefetch with each line of weights
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
      const float* line = reinterpret_cast<const float*>(w + 64 * i);
      const __m256 w0 = _mm256_loadu_ps(line), w1 = _mm256_loadu_ps(line + 8);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const __m256 b = _mm256_broadcast_ss(x + 32 * r + i);
        a[r][0] = _mm256_fmadd_ps(b, w0, a[r][0]);
        a[r][1] = _mm256_fmadd_ps(b, w1, a[r][1]);
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
  static constexpr Run RUNS[AT_ONCE] = {multiply_rows<LINES, 1>, multiply_rows<LINES, 2>, multiply_rows<LINES, 3>,
                                        multiply_rows<LINES, 4>, multiply_rows<LINES, 5>, multiply_rows<LINES, 6>};
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
