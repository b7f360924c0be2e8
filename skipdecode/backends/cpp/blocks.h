// Products with weights in blocks of 32 inputs, of GGUF's Q4_0, Q4_1 and Q8_0, as they lie in memory; for the .cpp files.
//
// Each block of an output has a scale (float16), and in Q4_1 a minimum. A row of x is quantised to bytes with a scale for
// every 32 inputs, so that a block and a row's bytes give an exact integer. The rest is float32, added block by block in
// the order of the inputs: the same bits for any batch and on every back end.

#pragma once

#include "gemm.h"

namespace cpu {

constexpr int64_t BLOCK_GROUPS = 16;       // groups of 16 rows at a time
constexpr int64_t BLOCK_STEPS = 16;        // blocks at a time that stay in the L1 cache while the rows pass
constexpr float BYTE_STEP = 1.0f / 127.0f;

template <typename T>
struct BlockWeight {
  int64_t outputs, inputs;
  const uint8_t* blocks;  // [outputs / 32][inputs / 32] of `Blocks`
  int format;             // a `BlockFormat`
  const T* bias;

  using Number = T;

  int64_t steps() const { return inputs / 32; }
  int64_t group_bytes() const { return steps() * 16 * BlockRows::BYTES; }  // of 16 quantised rows
};

// As instructions, since the compiler may reorder other operations, and the rounding of a tie depends on the last bit.
inline float divided(float x, float y) { return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(x), _mm_set_ss(y))); }
inline float times(float x, float y) { return _mm_cvtss_f32(_mm_mul_ss(_mm_set_ss(x), _mm_set_ss(y))); }

// Quantises 32 numbers: the largest becomes 127. Where one is NaN or infinite, the scale is NaN.
template <typename T>
inline void quantize_block(const T* x, BlockRows to, int64_t row) {
  alignas(64) float values[32];
  for (int half = 0; half < 32; half += 16) store16(values + half, load_first(x + half, 16));
  uint32_t top = 0;  // without their signs, numbers are ordered as integers
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    top = (bits & 0x7fffffff) > top ? bits & 0x7fffffff : top;
  }
  const bool is_none = top < 0x07000000;  // below 1e-34: zero beside anything that it may be added to
  const bool is_number = top < 0x7f800000;
  const float inverse = is_none || !is_number ? 0.0f : divided(127.0f, as_float(top));
  const float scale = is_none ? 0.0f : times(as_float(is_number ? top : 0x7fc00000), BYTE_STEP);
  int8_t* numbers = const_cast<int8_t*>(to.numbers(row));
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const int32_t number = is_number ? int32_t(__builtin_rintf(values[i] * inverse)) : 0;
    numbers[i] = int8_t(number);
    sum += number;
  }
  const_cast<float*>(to.scales())[row] = scale;
  const_cast<int32_t*>(to.sums())[row] = -8 * sum;
  const_cast<float*>(to.scaled_sums())[row] = times(scale, float(sum));
}

// Quantises row `row` of x.
template <typename T>
[[gnu::noinline]] void quantize_row(int64_t row, const BlockWeight<T>& w, const T* x, QuantizedRows to) {
  const int64_t record = BlockRows::BYTES * to.together;
  uint8_t* at = to.tiles + row / 16 * w.steps() * record;
  for (int64_t i = 0; i < w.inputs; i += 32, at += record) quantize_block(x + i, {at, to.together}, row % 16);
}

// x W^T; the rest as of the other `multiply_rows` (int8.h).
template <typename T, typename Finish>
void multiply_rows(Team team, int64_t rows, QuantizedRows x, const BlockWeight<T>& w, Finish finish) {
  const int64_t steps = w.steps(), blocks = (w.outputs + 31) / 32, groups = (rows + 15) / 16, bytes = bytes_of(w.format);
  const int64_t record = BlockRows::BYTES * x.together, fit = ROWS_BYTES / (steps * record);
  const int64_t at_once = fit > BLOCK_GROUPS ? BLOCK_GROUPS : fit < 1 ? 1 : fit;
  thread_local Buffer<float> buffer;
  float* sums = buffer.reserve(BLOCK_GROUPS * 512);
#ifdef BACKEND_AMX
  const BlockTiles tiles;
  thread_local Buffer<int8_t> numbers_buffer;
  int8_t* numbers = rows >= TILED_ROWS ? numbers_buffer.reserve(BLOCK_STEPS * 1024) : nullptr;
  const int64_t most = rows > BLOCK_ROWS ? BLOCK_STEPS : steps;
#else
  const int8_t* numbers = nullptr;
  const int64_t most = rows > BLOCK_ROWS || BLOCK_TILES == 1 ? BLOCK_STEPS : steps;
#endif
  for (int64_t from = 0; from < groups; from += at_once) {
    const int64_t to = from + at_once < groups ? from + at_once : groups;
    if (!team.is_alone) fetch_rows(x.tiles + from * steps * record, (to - from) * steps * record);
    team.share(blocks, [&](int64_t block) {
      for (int64_t k = 0; k < steps; k += most) {
        const int64_t deep = steps - k < most ? steps - k : most;
        const uint8_t* weights = w.blocks + (block * steps + k) * bytes;
#ifdef BACKEND_AMX
        if (numbers) widen_blocks(w.format, weights, deep, numbers);
#endif
        for (int64_t group = from; group < to; ++group) {
          float* group_sums = sums + (group - from) * 512;
          const int count = rows - 16 * group < 16 ? int(rows - 16 * group) : 16;
          // each group prefetches a part of the next weights, even beyond the last ones: a prefetch cannot fault
          const int64_t lines = (bytes / 64 + 2 * (to - from) - 1) / (2 * (to - from));
          multiply_blocks(w.format, {x.tiles + (group * steps + k) * record, x.together}, count, weights, numbers, deep,
                          group_sums, k == 0, weights + deep * bytes + (group - from) * 128 * deep * lines, lines);
          if (k + deep == steps) finish(group_sums, 16 * group, count, block);
        }
      }
    });
  }
}

}  // namespace cpu
