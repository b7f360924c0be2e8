// What a decoder layer is made of, as `layer.py` hands it over; for step.cpp and prompt.cpp.

#pragma once

#include "attention.h"
#include "gemm.h"
#include "int8.h"

namespace cpu {

// T: float or bfloat16, which all numbers but int8 weights are.
struct Norm {
  const void *weight, *bias;  // null: 1 and 0
  int64_t is_rms;             // not around the mean, and no bias
};

struct Product {
  int64_t outputs, inputs;
  const void* weight;     // packed; of T, but for int8 ones
  const float* scales;    // of int8, else null
  const int32_t* totals;  // of int8
  const void* bias;       // null: none

#ifdef HAS_INT8
  Int8Weight int8() const {
    return {outputs, inputs, static_cast<const int8_t*>(weight), scales, totals, static_cast<const bfloat16*>(bias)};
  }
#endif
};

struct Block {
  Heads heads;
  int64_t is_pre_norm;  // else the norms are behind the residuals (OPT-350m)
  int64_t is_gated;     // SwiGLU, else ReLU
  Norm attn_norm;
  Product qkv, out;     // queries, keys, values; or queries alone, where the others are in the cache already
  Norm ffn_norm;
  Product fc1, fc2;

  int64_t width() const { return out.outputs; }
  int64_t inner() const { return fc2.inputs; }
  float epsilon() const { return float(heads.epsilon); }
};

// Row `row` of x as whole numbers, for a product with `p`, whose weight is int8.
template <typename T>
void to_int8(int64_t row, const Product& p, const T* x, WholeRows to) {
#ifdef HAS_INT8
  if constexpr (std::is_same<T, bfloat16>::value) to_whole(row, p.inputs, x, to);
#endif
}

// Rows of x, or `whole` ones where the weight is int8, times `p`; few: as `few_rows` lays them.
template <Then THEN, typename T>
void of_product(Team team, bool few, int64_t rows, const Product& p, const T* x, WholeRows whole, const T* residual, T* y,
                Layout layout) {
#ifdef HAS_INT8
  if constexpr (std::is_same<T, bfloat16>::value)
    if (p.scales) return of_whole<THEN>(team, rows, whole, p.int8(), residual, y, layout);
#endif
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  if (few)
    of_few<THEN>(team, rows, p.outputs, p.inputs, x, weight, bias, residual, y, layout);
  else
    of_tiles<THEN>(team, rows, p.outputs, p.inputs, x, weight, bias, residual, y, layout);
}

// A row's RMS norm; as the layer norm below.
template <typename T>
[[gnu::noinline]] void scale_row(int64_t width, const Norm& norm, float epsilon, const T* x, T* y, int64_t apart) {
  const T* weight = static_cast<const T*>(norm.weight);
  Floats squares[2] = {all(0.0f), all(0.0f)};
  for (int64_t i = 0; i < width; i += 32)
    for (int half = 0; half < 2; ++half) {
      const Floats part = load_first(x + i + 16 * half, 16);
      squares[half] = fma(part, part, squares[half]);
    }
  const Floats scale = all(1.0f / std::sqrt(sum(squares[0] + squares[1]) / width + epsilon));
  for (int64_t from = 0; from < width; from += 32, y += apart)
    for (int64_t i = 0; i < 32; i += 16) {
      const Floats part = load_first(x + from + i, 16) * scale;
      store_first(y + i, weight ? part * load_first(weight + from + i, 16) : part, 16);
    }
}

// A row's norm over `width` numbers, in float32, rounded once. y: `apart` numbers from one 32 of them to the next.
// Not inlined: sums may be reordered, and are to be in one order everywhere.
template <typename T>
[[gnu::noinline]] void normalise_row(int64_t width, const Norm& norm, float epsilon, const T* x, T* y, int64_t apart) {
  if (norm.is_rms) return scale_row(width, norm, epsilon, x, y, apart);
  const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
  float sum = 0.0f, squares = 0.0f;
  for (int64_t i = 0; i < width; ++i) sum += load(x[i]);
  const float mean = sum / width;
  for (int64_t i = 0; i < width; ++i) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
  const float scale = 1.0f / std::sqrt(squares / width + epsilon);
  for (int64_t from = 0; from < width; from += 32, y += apart) {
    if (weight && bias)
      for (int64_t i = 0; i < 32; ++i)
        store(y[i], (load(x[from + i]) - mean) * scale * load(weight[from + i]) + load(bias[from + i]));
    else if (weight)
      for (int64_t i = 0; i < 32; ++i) store(y[i], (load(x[from + i]) - mean) * scale * load(weight[from + i]));
    else
      for (int64_t i = 0; i < 32; ++i) store(y[i], (load(x[from + i]) - mean) * scale);
  }
}

// A row of x as a product takes it, through a norm if there is one. y: as in `normalise_row`.
template <typename T>
void prepare_row(int64_t width, const Norm* norm, float epsilon, const T* x, T* y, int64_t apart) {
  if (norm) return normalise_row(width, *norm, epsilon, x, y, apart);
  for (int64_t from = 0; from < width; from += 32) std::memcpy(y + from / 32 * apart, x + from, 32 * sizeof(T));
}

}  // namespace cpu

// extern "C" functions NAME_float32 and, where products of bfloat16 are had, NAME_bfloat16.
#ifdef HAS_BFLOAT16
#define FOR_EACH_TYPE(EXPORT) EXPORT(float32, float) EXPORT(bfloat16, cpu::bfloat16)
#else
#define FOR_EACH_TYPE(EXPORT) EXPORT(float32, float)
#endif
