// Attention of one new column, and the choice of the likeliest token, for any CPU.

#include "attention.h"

namespace {

constexpr int64_t BLOCK = 512;

template <typename T>
void argmax(int64_t rows, int64_t size, const T* x, int64_t* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* line = x + row * size;
    float best = -FLT_MAX;
    int64_t at = 0;  // the first block that holds `best`: only there its place is looked for, one by one
    for (int64_t from = 0; from < size; from += BLOCK) {
      const int64_t to = from + BLOCK < size ? from + BLOCK : size;
      float top = -FLT_MAX;
      for (int64_t i = from; i < to; ++i) top = cpu::load(line[i]) > top ? cpu::load(line[i]) : top;
      if (top > best) best = top, at = from;
    }
    const int64_t stop = at + BLOCK < size ? at + BLOCK : size;
    while (at < stop && cpu::load(line[at]) != best) ++at;
    out[row] = at < stop ? at : 0;  // nothing but NaN, or -inf, which is below all that `best` can be
  }
}

}  // namespace

// out [rows, heads of queries, dim]; places [rows] or null: as in attention.h
#define EXPORT(NAME, T)                                                                                             \
  extern "C" void attend_##NAME(const cpu::Heads* heads, int64_t rows, const T* q, const T* new_k, const T* new_v, \
                                int64_t row_stride, T* k, T* v, int64_t capacity, const int64_t* first,            \
                                const int64_t* last, const int64_t* places, const cpu::Shared* shared, T* out,      \
                                int num_threads) {                                                                  \
    const int64_t count = heads->count, dim = heads->dim;                                                           \
    const bool is_stored = places && new_k;                                                                         \
    _Pragma("omp parallel num_threads(num_threads)") {                                                              \
      if (is_stored)                                                                                                \
        cpu::store_all(*heads, rows, new_k, new_v, row_stride, k, v, capacity, first, last, places, shared);        \
      cpu::attend_of<T>({false}, *heads, rows, q, is_stored ? nullptr : new_k, new_v, row_stride, k, v, capacity,   \
                        first, last, places, places || shared, shared,                                              \
                        [=](int64_t row, int64_t head, const T* made) {                                             \
                          std::memcpy(out + (row * count + head) * dim, made, dim * sizeof(T));                     \
                        });                                                                                         \
    }                                                                                                               \
  }                                                                                                                 \
  extern "C" void argmax_##NAME(int64_t rows, int64_t size, const T* x, int64_t* out, int num_threads) {           \
    argmax<T>(rows, size, x, out, num_threads);                                                                    \
  }

EXPORT(float32, float)
using cpu::bfloat16;
EXPORT(bfloat16, bfloat16)
