// The element types of the kernels, and vectors of 16 float32 as one AVX-512 register or two of AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_BFLOAT16  // matrix products of bfloat16; attention supports it everywhere
#endif

namespace cpu {

struct bfloat16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float load(float x) { return x; }
inline float load(bfloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline void store(float& to, float x) { to = x; }
inline void store(bfloat16& to, float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int64_t NO_TOKEN = -1;  // in place of a token where a logit is NaN or +inf

// Whether a logit is NaN or +inf. By its bits, since the compiler takes all numbers for finite.
inline bool is_wrong(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits & 0x7fffffff) > 0x7f800000 || bits == 0x7f800000;
}

#ifdef __AVX512F__

struct Floats {
  __m512 v;
};

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1); }
inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load16(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store16(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
inline Floats operator+(Floats x, Floats y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm512_div_ps(x.v, y.v)}; }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline Floats max(Floats x, Floats y) { return {_mm512_max_ps(x.v, y.v)}; }  // y if one is NaN
inline Floats min(Floats x, Floats y) { return {_mm512_min_ps(x.v, y.v)}; }
inline Floats nearest(Floats x) { return {_mm512_roundscale_ps(x.v, 0)}; }
inline Floats times_power(Floats x, Floats n) { return {_mm512_scalef_ps(x.v, n.v)}; }  // x 2^n
inline Floats first_of(int64_t count, Floats x, Floats y) { return {_mm512_mask_blend_ps(first(count), y.v, x.v)}; }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x.v); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x.v); }

// The first `count` of 16 elements, zeros after them; nothing beyond them is read or written.
inline Floats load_first(const float* from, int64_t count) { return {_mm512_maskz_loadu_ps(first(count), from)}; }
inline void store_first(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, first(count), x.v); }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Floats load_first(const bfloat16* from, int64_t count) {
  return {widen(_mm256_maskz_loadu_epi16(first(count), from))};
}
#ifdef HAS_BFLOAT16
inline __m256i narrow(Floats x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)); }
inline Floats rounded(Floats x, bfloat16) { return {widen(narrow(x))}; }
#else
inline __m256i narrow(Floats x) {  // to nearest, ties to even
  const __m512i bits = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
#endif
inline void store_first(bfloat16* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first(count), narrow(x));
}

// Lanes of x that are larger than `values` replace them, and set `numbers` to `number`. NaN counts as +inf. `lanes`: a bit
// for each lane that takes part.
inline void keep_larger(Floats x, uint32_t lanes, int32_t number, float* values, int32_t* numbers) {
  const __m512 infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
  x.v = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v, infinity);
  const __mmask16 larger = _mm512_mask_cmp_ps_mask(__mmask16(lanes), x.v, _mm512_loadu_ps(values), _CMP_GT_OQ);
  _mm512_mask_storeu_ps(values, larger, x.v);
  _mm512_mask_storeu_epi32(numbers, larger, _mm512_set1_epi32(number));
}

#else

struct Floats {
  __m256 a, b;
};

inline __m256i first8(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load16(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store16(float* to, Floats x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats nearest(Floats x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }
inline __m256 power8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats times_power(Floats x, Floats n) {  // x 2^n, n > -127
  return {_mm256_mul_ps(x.a, power8(n.a)), _mm256_mul_ps(x.b, power8(n.b))};
}
inline Floats first_of(int64_t count, Floats x, Floats y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(first8(count))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(first8(count - 8)))};
}
inline float largest(Floats x) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, _mm256_max_ps(x.a, x.b));
  float top = lanes[0];
  for (int i = 1; i < 8; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}
inline float sum(Floats x) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, _mm256_add_ps(x.a, x.b));
  float total = 0.0f;
  for (int i = 0; i < 8; ++i) total += lanes[i];
  return total;
}
inline Floats load_first(const float* from, int64_t count) {
  return count >= 16 ? load16(from)
                     : Floats{_mm256_maskload_ps(from, first8(count)), _mm256_maskload_ps(from + 8, first8(count - 8))};
}
inline void store_first(float* to, Floats x, int64_t count) {
  if (count >= 16) return store16(to, x);
  _mm256_maskstore_ps(to, first8(count), x.a);
  _mm256_maskstore_ps(to + 8, first8(count - 8), x.b);
}

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline __m256i narrow8(__m256 x) {  // to nearest, ties to even; in words
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
}
inline Floats load_first(const bfloat16* from, int64_t count) {
  uint16_t some[16] = {};
  if (count < 16) {
    std::memcpy(some, from, count > 0 ? count * sizeof(bfloat16) : 0);
    from = reinterpret_cast<const bfloat16*>(some);
  }
  const __m128i* at = reinterpret_cast<const __m128i*>(from);
  return {widen(_mm_loadu_si128(at)), widen(_mm_loadu_si128(at + 1))};
}
inline void store_first(bfloat16* to, Floats x, int64_t count) {
  uint16_t made[16];  // packing works by halves of a register
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow8(x.a), narrow8(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(made), words);
  std::memcpy(to, made, count >= 16 ? sizeof(made) : count > 0 ? count * sizeof(bfloat16) : 0);
}

inline void keep_larger8(__m256 x, uint32_t lanes, int32_t number, float* values, int32_t* numbers) {
  const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  x = _mm256_blendv_ps(x, infinity, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));  // NaN counts as +inf
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i own = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(lanes)), bits), bits);
  const __m256 before = _mm256_loadu_ps(values);
  const __m256i at = _mm256_loadu_si256(reinterpret_cast<__m256i*>(numbers));
  const __m256 larger = _mm256_and_ps(_mm256_cmp_ps(x, before, _CMP_GT_OQ), _mm256_castsi256_ps(own));
  _mm256_storeu_ps(values, _mm256_blendv_ps(before, x, larger));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers),
                      _mm256_blendv_epi8(at, _mm256_set1_epi32(number), _mm256_castps_si256(larger)));
}
inline void keep_larger(Floats x, uint32_t lanes, int32_t number, float* values, int32_t* numbers) {
  keep_larger8(x.a, lanes, number, values, numbers);
  keep_larger8(x.b, lanes >> 8, number, values + 8, numbers + 8);
}

#endif

inline Floats rounded(Floats x, float) { return x; }

// e^x for |x| <= 87, relative error below 4e-7: 2^n e^r, |r| <= ln(2) / 2, the polynomial of Cephes.
inline Floats exp_of_small(Floats x) {
  const Floats n = nearest(x * all(1.44269504f));
  Floats r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(term));
  return times_power(fma(p, r * r, r) + all(1.0f), n);
}

// e^x for x <= 0.
inline Floats exp_of_negatives(Floats x) { return exp_of_small(max(x, all(-87.0f))); }

// x / (1 + e^-x) for any x: beyond 87 the exponential is negligible beside 1, or dominates it. NaN stays NaN.
inline Floats silu(Floats x) {
  return x / (all(1.0f) + exp_of_small(max(min(all(0.0f) - x, all(87.0f)), all(-87.0f))));
}

// GELU by tanh: x (1 + tanh(u)) / 2 = x / (1 + e^-2u), where u = sqrt(2 / pi) (x + 0.044715 x^3). NaN stays NaN.
inline Floats gelu(Floats x) {
  const Floats twice = x * fma(x * x, all(0.0713548162726f), all(1.59576912161f));
  return x / (all(1.0f) + exp_of_small(max(min(all(0.0f) - twice, all(87.0f)), all(-87.0f))));
}

}  // namespace cpu
