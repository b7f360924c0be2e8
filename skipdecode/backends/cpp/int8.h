// Products with int8 weights, which take half as many bytes from memory as bfloat16 ones; for the .cpp files.
//
// A weight is an integer in [-127, 127] times the scale of its output. A row of x is quantised to 16-bit integers times
// the scale of the row, with high and low bytes stored separately: two byte products cost as much as one of bfloat16, and
// no weight is widened. Integer sums are exact, so the result is batch invariant here, too. 16 bits are as precise as
// bfloat16 for elements of at least 1/128 of the row's largest; smaller ones are off by less than the last bit of the
// largest.
//
// VNNI multiplies unsigned by signed bytes: 128 is added to the high bytes, and 128 times the sum of the output's
// weights, known since packing, is subtracted from the result. That costs one subtraction per output and is exact.
//
// Packed weights: for each 32 outputs, for each 64 inputs (padded with zeros), two tiles of 16 outputs; a tile is 16
// lines of four inputs for each output.

#pragma once

#include "gemm.h"

#ifdef HAS_INT8

namespace cpu {

#ifdef BACKEND_AMX
constexpr int64_t GROUPS = 16, GROUPS_BYTES = 3 << 19;    // groups of 16 rows at a time: they stay in the L2 cache
#else
constexpr int64_t GROUPS = 16, GROUPS_BYTES = 1 << 19;
#endif

struct Int8Weight {
  int64_t outputs, inputs;
  const int8_t* tiles;
  const float* scales;     // [outputs], padded to a multiple of 32
  const int32_t* totals;   // [outputs], padded likewise: the sum of each output's integers
  const bfloat16* bias;

  using Number = bfloat16;

  int64_t steps() const { return (inputs + 63) / 64; }
  int64_t group_bytes() const { return steps() * LINES; }  // of 16 quantised rows
};

inline void store_split(__m512 low, __m512 high, __m512 scale, uint8_t* to) {
  const __m256i first = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(low, scale)));
  const __m256i second = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(high, scale)));
  const __m512i quantized = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  const __m256i upper = _mm512_cvtepi16_epi8(_mm512_srli_epi16(quantized, 8)), bias = _mm256_set1_epi8(char(Bytes::BIAS));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_xor_si256(upper, bias));  // adds 128
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + 64 * Bytes::LOW), _mm512_cvtepi16_epi8(quantized));
}

// Quantises row `row` of x, whose inputs are a multiple of 32. The scale of a row with NaN or infinities is NaN.
inline void quantize_row(int64_t row, const Int8Weight& w, const bfloat16* x, QuantizedRows to) {
  const int64_t inputs = w.inputs, steps = w.steps();
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i top = _mm512_setzero_si512();  // without their signs, bfloat16 are ordered as integers
  for (int64_t i = 0; i < inputs; i += 32)
    top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  const __m512i pairs = _mm512_max_epu32(_mm512_srli_epi32(top, 16), _mm512_and_si512(top, _mm512_set1_epi32(0xffff)));
  const uint32_t bits = _mm512_reduce_max_epu32(pairs);
  const float top_number = as_float(bits << 16);
  const bool is_none = bits < 0x0700;  // below 1e-34: zero beside anything that it may be added to
  to.scales[row] = bits >= 0x7f80 ? as_float(0x7fc00000) : is_none ? 0.0f : top_number / 32767.0f;
  const __m512 scale = _mm512_set1_ps(is_none ? 0.0f : 32767.0f / top_number);
  uint8_t* tiles = to.tiles + row / 16 * steps * LINES + row % 16 * 64 * Bytes::HIGH;
  for (int64_t i = 0; i < inputs; i += 32) {
    const __m512i numbers = _mm512_loadu_si512(x + i);
    store_split(widen(_mm512_castsi512_si256(numbers)), widen(_mm512_extracti64x4_epi64(numbers, 1)), scale,
                tiles + i / 64 * to.apart + i % 64);
  }
  if (inputs % 64) store_split(_mm512_setzero_ps(), _mm512_setzero_ps(), scale,
                                tiles + (steps - 1) * to.apart + 32);
}

// Dequantises the sums of `count` rows, from `row` on, and 32 outputs: numbers [16][32].
inline void to_numbers(const int32_t* sums, const float* row_scales, int64_t row, int count, int64_t block,
                       const Int8Weight& w, float* numbers) {
  const __m512 byte = _mm512_set1_ps(256.0f);
  for (int half = 0; half < 32; half += 16) {
    const __m512 scales = _mm512_loadu_ps(w.scales + 32 * block + half);
    const __m512i totals = _mm512_loadu_si512(w.totals + 32 * block + half);
    const __m512i raised = _mm512_mullo_epi32(totals, _mm512_set1_epi32(Bytes::BIAS));
    for (int r = 0; r < count; ++r) {
      const int32_t* at = sums + 32 * Bytes::HIGH * r + half;
      const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(at), raised));
      const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(at + 32 * Bytes::LOW));
      const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(row_scales[row + r]));
      _mm512_store_ps(numbers + 32 * r + half, _mm512_mul_ps(_mm512_fmadd_ps(high, byte, low), scale));
    }
  }
}

// x W^T, split by outputs, by threads that each have a `Unit` and have passed a barrier since x was quantised; there is
// no barrier at the end. `finish(numbers, first row, rows, block of outputs)` is called with the results of some rows and
// 32 outputs.
template <typename Finish>
void multiply_rows(Team team, int64_t rows, QuantizedRows x, const Int8Weight& w, Finish finish) {
  const int64_t steps = w.steps(), blocks = (w.outputs + 31) / 32, groups = (rows + 15) / 16;
  const int64_t fit = GROUPS_BYTES / (steps * LINES), at_once = fit > GROUPS ? GROUPS : fit < 1 ? 1 : fit;
#if defined(BACKEND_AVX512) && defined(IS_AMD)
  const bool are_few = 2 * rows <= AT_ONCE;  // two lines per row: sums stay in registers for all of a block's weights
#else
  const bool are_few = false;
#endif
  // otherwise 16 or 24 KiB of these at a time stay in the L1 cache while the rows pass
  const int64_t most = are_few ? steps : groups == 1 ? 12 : 8;
  const int64_t parts = (steps + most - 1) / most, each = (steps + parts - 1) / parts;
  thread_local Buffer<int32_t> buffer;
  int32_t* sums = buffer.reserve(GROUPS * 1024);
  for (int64_t from = 0; from < groups; from += at_once) {
    const int64_t to = from + at_once < groups ? from + at_once : groups;
    if (!team.is_alone) fetch_rows(x.tiles + from * steps * LINES, (to - from) * steps * LINES);
    team.share(blocks, [&](int64_t block) {
      for (int64_t k = 0; k < steps; k += each) {
        const int64_t deep = steps - k < each ? steps - k : each;
        const int8_t* weights = w.tiles + (block * steps + k) * LINES;
        const int64_t lines = (deep * 32 + to - from - 1) / (to - from);
        // each group prefetches a part of the next weights, even beyond the last ones: a prefetch cannot fault
        const char* next = reinterpret_cast<const char*>(weights) + (are_few ? NEAR : deep * LINES);
        for (int64_t group = from; group < to; ++group) {
          int32_t* group_sums = sums + (group - from) * 1024;
          const int64_t row = 16 * group;
          const int count = rows - row < 16 ? int(rows - row) : 16;
          multiply_quantized(x.tiles + group * steps * LINES + k * x.apart, x.apart, count, weights, deep, group_sums,
                             k == 0, next + (group - from) * lines * 64, lines);
          if (k + deep == steps) {
            alignas(64) float numbers[16 * 32];
            to_numbers(group_sums, x.scales, row, count, block, w, numbers);
            finish(numbers, row, count, block);
          }
        }
      }
    });
  }
}

}  // namespace cpu

#endif
