// Attention of one new column, for any CPU.

#include "attention.h"

// out [rows, query heads, dim]; slots [rows] or null: as in attention.h
#define EXPORT(NAME, T)                                                                                                 \
  extern "C" void attend_##NAME(const cpu::Heads* heads, int64_t rows, const T* q, const T* new_k, const T* new_v,      \
                                int64_t row_stride, T* k, T* v, int64_t capacity, const int64_t* first,                 \
                                const int64_t* last, const int64_t* slots, const cpu::Shared* shared, T* out,           \
                                int num_threads) {                                                                      \
    const int64_t count = heads->count, dim = heads->dim;                                                               \
    const bool is_stored = slots && new_k;                                                                              \
    _Pragma("omp parallel num_threads(num_threads)") {                                                                  \
      if (is_stored)                                                                                                    \
        cpu::store_all(*heads, rows, new_k, new_v, row_stride, k, v, capacity, first, last, slots, shared);             \
      cpu::attend_of<T>({false}, *heads, rows, q, is_stored ? nullptr : new_k, new_v, row_stride, k, v, capacity,       \
                        first, last, slots, slots || shared, shared,                                                    \
                        [=](int64_t row, int64_t head, const T* made) {                                                 \
                          std::memcpy(out + (row * count + head) * dim, made, dim * sizeof(T));                         \
                        });                                                                                             \
    }                                                                                                                   \
  }

EXPORT(float32, float)
using cpu::bfloat16;
EXPORT(bfloat16, bfloat16)
