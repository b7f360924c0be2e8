// The matrix products that micro.h declares, compiled once per back end.

#include "micro.h"

namespace cpu {

void multiply_tiles(const float* x, int64_t block, int count, const float* w, int64_t steps, float* sums, bool fresh,
                    const char* next, int64_t lines) {
  multiply_any<float, 32>(x, 4 * block, count, w, steps, sums, fresh, next, lines);
}

#ifdef HAS_BFLOAT16
void multiply_tiles(const Row<bfloat16>* x, int64_t block, int count, const bfloat16* w, int64_t steps, float* sums,
                    bool fresh, const char* next, int64_t lines) {
#if defined(BACKEND_AMX)
  multiply_matrix(x, w, steps, sums, fresh, next, lines);
#elif defined(HAS_PAIRED)
  multiply_any<Paired, 16>(x, 4 * block, count, w, steps, sums, fresh, next, lines);
#else
  multiply_any<bfloat16, 16>(x, 2 * block, count, w, steps, sums, fresh, next, lines);
#endif
}
#endif

#ifdef HAS_INT8
void multiply_quantized(const uint8_t* x, int64_t apart, int count, const int8_t* w, int64_t steps, int32_t* sums,
                        bool fresh, const char* next, int64_t lines) {
#ifdef BACKEND_AMX
  multiply_bytes(x, w, steps, sums, fresh, next, lines);
#else
  multiply_any<uint8_t, 16>(x, apart, 2 * count, w, steps, sums, fresh, next, lines);
#endif
}
#endif

namespace {

template <int FORMAT>
void multiply_blocks_of(BlockRows x, int count, const uint8_t* w, const int8_t* numbers, int64_t steps, float* sums,
                        bool fresh, const uint8_t* next, int64_t lines) {
#ifdef BACKEND_AMX
  if (numbers && count >= TILED_ROWS) return multiply_block_tiles<FORMAT>(x, numbers, w, steps, sums, fresh, next, lines);
#endif
  multiply_block_vectors<FORMAT>(x, count, w, steps, sums, fresh);
}

}  // namespace

void multiply_blocks(int format, BlockRows x, int count, const uint8_t* w, const int8_t* numbers, int64_t steps, float* sums,
                     bool fresh, const uint8_t* next, int64_t lines) {
  const auto run = format == Q4_0   ? multiply_blocks_of<Q4_0>
                   : format == Q4_1 ? multiply_blocks_of<Q4_1>
                                    : multiply_blocks_of<Q8_0>;
  run(x, count, w, numbers, steps, sums, fresh, next, lines);
}

#ifdef BACKEND_AMX
void widen_blocks(int format, const uint8_t* w, int64_t steps, int8_t* to) {
  const auto run = format == Q4_0 ? widen_blocks<Q4_0> : format == Q4_1 ? widen_blocks<Q4_1> : widen_blocks<Q8_0>;
  run(w, steps, to);
}
#endif

}  // namespace cpu
