// The parts of a decoder layer, in the structs that `cpu_layers.py` fills; for step.cpp and prompt.cpp.

#pragma once

#include "attention.h"
#include "blocks.h"
#include "gemm.h"
#include "int8.h"

namespace cpu {

// T is float or bfloat16, the type of everything but quantised weights.
struct Norm {
  const void *weight, *bias;  // null: 1 and 0
  int64_t is_rms;             // RMS norm: no mean and no bias
};

struct Product {
  int64_t outputs, inputs;
  const void* weight;     // packed; of type T unless quantised
  const float* scales;    // null unless int8
  const int32_t* totals;  // only int8
  const void* bias;       // null: none
  int64_t format;         // a `BlockFormat`

  bool is_quantized() const { return scales || format; }

  template <typename T>
  BlockWeight<T> blocks() const {
    return {outputs, inputs, static_cast<const uint8_t*>(weight), int(format), static_cast<const T*>(bias)};
  }

#ifdef HAS_INT8
  Int8Weight int8() const {
    return {outputs, inputs, static_cast<const int8_t*>(weight), scales, totals, static_cast<const bfloat16*>(bias)};
  }
#endif
};

struct Block {
  Heads heads;
  int64_t is_pre_norm;  // otherwise the norms follow the residuals (OPT-350m)
  int64_t activation;   // an `Epilogue`: RELU, SWIGLU or GEGLU
  Norm attn_norm;
  Product qkv, out;     // qkv: queries, keys, values; or queries alone if the others are in the cache already
  Norm ffn_norm;
  Product fc1, fc2;
  int64_t has_sublayer_norms;       // outputs are normed before they are added to the residual
  Norm attn_out_norm, ffn_out_norm; // only then

  int64_t width() const { return out.outputs; }
  int64_t inner() const { return fc2.inputs; }
  float epsilon() const { return float(heads.epsilon); }
};

// Quantises row `row` of x for a product with `p`, whose weight is quantised.
template <typename T>
void quantize_for(int64_t row, const Product& p, const T* x, QuantizedRows to) {
  if (p.format) return quantize_row(row, p.template blocks<T>(), x, to);
#ifdef HAS_INT8
  if constexpr (std::is_same<T, bfloat16>::value) quantize_row(row, p.int8(), x, to);
#endif
}

// The product of quantised rows with `w`, an `Int8Weight` or a `BlockWeight`, with its bias and what follows.
template <Epilogue EPILOGUE, typename W>
void of_quantized(Team team, int64_t rows, QuantizedRows x, const W& w, const typename W::Number* residual,
                  typename W::Number* y, Layout layout) {
  multiply_rows(team, rows, x, w, [&](const float* numbers, int64_t row, int count, int64_t block) {
    finish<EPILOGUE>(numbers, row, count, block, w.outputs, w.bias, residual, y, layout);
  });
}

// The product of rows of x (or of the quantised rows if the weight is quantised) with `p`. few: x is in the layout `few_rows`.
template <Epilogue EPILOGUE, typename T>
void of_product(Team team, bool few, int64_t rows, const Product& p, const T* x, QuantizedRows quantized,
                const T* residual, T* y, Layout layout) {
  if (p.format) return of_quantized<EPILOGUE>(team, rows, quantized, p.template blocks<T>(), residual, y, layout);
#ifdef HAS_INT8
  if constexpr (std::is_same<T, bfloat16>::value)
    if (p.scales) return of_quantized<EPILOGUE>(team, rows, quantized, p.int8(), residual, y, layout);
#endif
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  if (few)
    of_few<EPILOGUE>(team, rows, p.outputs, p.inputs, x, weight, bias, residual, y, layout);
  else
    of_tiles<EPILOGUE>(team, rows, p.outputs, p.inputs, x, weight, bias, residual, y, layout);
}

// RMS norm of one row; parameters as in `normalise_row`.
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

// Layer or RMS norm of one row of `width` elements, computed in float32 and rounded once. y: `apart` elements from one
// block of 32 to the next. Not inlined: the compiler may reorder sums, and the order must be the same everywhere.
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

// Adds the norm of a row of x, which is overwritten, to h.
template <typename T>
void add_normed_row(int64_t width, const Norm& norm, float epsilon, T* x, T* h) {
  normalise_row(width, norm, epsilon, x, x, 32);
  for (int64_t i = 0; i < width; i += 16) store_first(h + i, load_first(h + i, 16) + load_first(x + i, 16), 16);
}

// Copies a row of x to where a product reads it, through a norm if there is one. y: as in `normalise_row`.
template <typename T>
void prepare_row(int64_t width, const Norm* norm, float epsilon, const T* x, T* y, int64_t apart) {
  if (norm) return normalise_row(width, *norm, epsilon, x, y, apart);
  for (int64_t from = 0; from < width; from += 32) std::memcpy(y + from / 32 * apart, x + from, 32 * sizeof(T));
}

}  // namespace cpu

// Exports NAME_float32 and, where there are products of bfloat16, NAME_bfloat16.
#ifdef HAS_BFLOAT16
#define FOR_EACH_TYPE(EXPORT) EXPORT(float32, float) EXPORT(bfloat16, cpu::bfloat16)
#else
#define FOR_EACH_TYPE(EXPORT) EXPORT(float32, float)
#endif
