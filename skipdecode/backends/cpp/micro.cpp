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

}  // namespace cpu
