// What a decoder layer is made of, as `layer.py` hands it over; for step.cpp and prompt.cpp.

#pragma once

#include "attention.h"
#include "int8.h"
#include "tiles.h"

#ifdef HAS_TILES

namespace cpu {

struct Norm {
  const bfloat16 *weight, *bias;  // null: 1 and 0
};

struct Product {
  int64_t outputs, inputs;
  const void* weight;    // packed
  const float* scales;   // of int8; null: the weight is bfloat16
  const uint16_t* bias;  // null: none

  Int8Weight int8() const { return {outputs, inputs, static_cast<const int8_t*>(weight), scales, bias}; }
};

struct Block {
  int64_t heads;
  double epsilon;
  Norm attn_norm;
  Product qkv, out;
  Norm ffn_norm;
  Product fc1, fc2;
};

// A row's layer norm over `width` numbers, in float32, rounded once. y: `apart` numbers from one 32 of them to the next.
// Not inlined: sums may be reordered, and are to be in one order everywhere.
[[gnu::noinline]] inline void normalise_row(int64_t width, const Norm& norm, float epsilon, const bfloat16* x, bfloat16* y, int64_t apart) {
  float sum = 0.0f, squares = 0.0f;
  for (int64_t i = 0; i < width; ++i) sum += load(x[i]);
  const float mean = sum / width;
  for (int64_t i = 0; i < width; ++i) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
  const float scale = 1.0f / std::sqrt(squares / width + epsilon);
  for (int64_t from = 0; from < width; from += 32, y += apart) {
    if (norm.weight && norm.bias)
      for (int64_t i = 0; i < 32; ++i)
        store(y[i], (load(x[from + i]) - mean) * scale * load(norm.weight[from + i]) + load(norm.bias[from + i]));
    else
      for (int64_t i = 0; i < 32; ++i) store(y[i], (load(x[from + i]) - mean) * scale);
  }
}

}  // namespace cpu

#endif
