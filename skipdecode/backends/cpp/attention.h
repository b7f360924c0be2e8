// Attention of one new column per row over that row's cached keys and values, at the speed of memory; for
// attention.cpp and step.cpp. Several new columns of one row of the cache are as many rows here, with one `place`.
//
// Plain C++ that a compiler vectorises; no intrinsics, no torch headers, so that it compiles in a second. The prefetches
// are what matters: while keys are read, the values of the same row and head are on their way, and while values are
// read, the next head's keys. Hardware prefetchers stop at the end of a page, which is less than one head's cache.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "groups.h"

namespace cpu {

// exp(x) for x <= 0, relative error below 4e-7: 2^n e^r, |r| <= ln(2) / 2, the polynomial of Cephes. In the open, since
// a call into the C library would not be vectorised everywhere.
inline float exp_of_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const int32_t n = int32_t(x * 1.44269504f - 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

// The numbers of one head in the order in which they are cheapest to widen: as they lie.
template <typename T, int DIM>
struct Head {
  static void load_scaled(const T* from, float scale, int64_t dim, float* to) {
    for (int64_t d = 0; d < dim; ++d) to[d] = load(from[d]) * scale;
  }
  static float dot(const float* x, const T* y, int64_t dim) {
    float sum = 0.0f;
    for (int64_t d = 0; d < dim; ++d) sum += x[d] * load(y[d]);
    return sum;
  }
  static void add(float* sum, float weight, const T* y, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * load(y[d]);
  }
  static void store_scaled(const float* from, float scale, int64_t dim, T* to) {
    for (int64_t d = 0; d < dim; ++d) store(to[d], from[d] * scale);
  }
};

// Two bfloat16 in a word: a shift widens the first, a mask the second. First all the first ones, then all the second.
template <int DIM>
struct Pairs {
  static constexpr int HALF = DIM / 2;
  static uint32_t word(const bfloat16* at, int i) {
    uint32_t bits;
    std::memcpy(&bits, at + 2 * i, 4);
    return bits;
  }
  static float number(uint32_t bits) {
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
  }
  static void load_scaled(const bfloat16* from, float scale, int64_t, float* to) {
    for (int i = 0; i < HALF; ++i) to[i] = load(from[2 * i]) * scale, to[HALF + i] = load(from[2 * i + 1]) * scale;
  }
  static float dot(const float* x, const bfloat16* y, int64_t) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < HALF; ++i)
      sum += x[i] * number(word(y, i) << 16) + x[HALF + i] * number(word(y, i) & 0xffff0000u);
    return sum;
  }
  static void add(float* sum, float weight, const bfloat16* y, int64_t) {
#pragma omp simd
    for (int i = 0; i < HALF; ++i) {
      sum[i] += weight * number(word(y, i) << 16);
      sum[HALF + i] += weight * number(word(y, i) & 0xffff0000u);
    }
  }
  static void store_scaled(const float* from, float scale, int64_t, bfloat16* to) {
    for (int i = 0; i < HALF; ++i) store(to[2 * i], from[i] * scale), store(to[2 * i + 1], from[HALF + i] * scale);
  }
};
template <> struct Head<bfloat16, 32> : Pairs<32> {};
template <> struct Head<bfloat16, 64> : Pairs<64> {};
template <> struct Head<bfloat16, 80> : Pairs<80> {};
template <> struct Head<bfloat16, 96> : Pairs<96> {};
template <> struct Head<bfloat16, 128> : Pairs<128> {};

// Scores of `count` columns, and the largest of them and of `top`. Not inlined, here and below: sums may be reordered, and are
// to be in one order for columns of a row's own and those it shares.
template <typename T, int DIM>
[[gnu::noinline]] void score_columns(int64_t count, int64_t dim, const float* x, const T* keys, const T* values,
                                     float* scores, float* top) {
  auto run = [&](const float* query) {
    float most = *top;
    for (int64_t s = 0; s < count; ++s) {
      prefetch(values + s * dim, dim);
      scores[s] = Head<T, DIM>::dot(query, keys + s * dim, dim);
      most = scores[s] > most ? scores[s] : most;
    }
    *top = most;
  };
  if constexpr (DIM > 0) {
    float query[DIM];  // in registers
    std::memcpy(query, x, sizeof(query));
    run(query);
  } else {
    run(x);
  }
}

// Their values times their weights, added to `sum`, while what is behind `next` is on its way.
template <typename T, int DIM>
[[gnu::noinline]] void add_columns(int64_t count, int64_t dim, const float* weights, const T* values, const T* next,
                                   float* sum_) {
  auto run = [&](float* sum) {
    for (int64_t s = 0; s < count; ++s) {
      prefetch(next + s * dim, dim);
      Head<T, DIM>::add(sum, weights[s], values + s * dim, dim);
    }
  };
  if constexpr (DIM > 0) {
    float sum[DIM];  // in registers
    std::memcpy(sum, sum_, sizeof(sum));
    run(sum);
    std::memcpy(sum_, sum, sizeof(sum));
  } else {
    run(sum_);
  }
}

// A thread's part of it, to be called by all threads of a parallel region, which wait for none at the end.
// q, new_k, new_v: `row_stride` numbers from row to row. DIM: the head dimension, or 0 where it is known at run time only.
// `places` [rows]: the row of the cache that each row has, where several may have one, whose keys and values are all there
// (`store_all`); null: its own. `shared` (null: none) comes before a row's own columns; a row's bits are those it has with
// all columns in one piece. put(row, head, numbers) is called with each row's and head's result [dim]. Here each head has
// keys and values of its own.
template <typename T, int DIM, typename Put>
void attend(const Heads& heads, int64_t rows, const T* q, const T* new_k, const T* new_v, int64_t row_stride, T* k, T* v,
            int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* places, const Shared* shared,
            Put put) {
  const int64_t dim = DIM ? DIM : heads.dim, count = heads.count;
  const float scale = 1.0f / std::sqrt(float(dim));
  const int64_t step = capacity * dim;  // from one head's cache to the next
  std::vector<float> weights(capacity + (shared ? shared->capacity : 0)), query(dim), sums(dim);
  std::vector<T> made(dim);
  share(rows * count, [&](int64_t unit) {
    const UnitOf of(unit, rows, count, places, shared);
    const int64_t row = of.row, head = of.head, start = first[row], own = last[row] - start + 1;
    const int64_t before = count_of(shared, row), seen = before + own;
    T *keys = k + of.memory * step + start * dim, *values = v + of.memory * step + start * dim;
    if (new_k)
      store_new(heads, row, head, seen - 1, new_k, new_v, row_stride, keys + (own - 1) * dim, values + (own - 1) * dim);
    const T* from = q + row * row_stride + head * dim;
    if (heads.turns_queries()) {
      turn(heads, heads.q_norm, seen - 1, from, made.data());
      from = made.data();
    }
    auto run = [&](float* x, float* sum) {
      Head<T, DIM>::load_scaled(from, scale, dim, x);
      float top = -FLT_MAX;
      if (before)
        score_columns<T, DIM>(before, dim, x, shared->line<T>(shared->k, row, head, dim),
                              shared->line<T>(shared->v, row, head, dim), weights.data(), &top);
      score_columns<T, DIM>(own, dim, x, keys, values, weights.data() + before, &top);
      float total = 0.0f;
      for (int64_t s = 0; s < seen; ++s) {
        weights[s] = exp_of_negative(weights[s] - top);
        total += weights[s];
      }
      const UnitOf following(unit + 1 < rows * count ? unit + 1 : unit, rows, count, places, shared);
      const T* next = k + following.memory * step + start * dim;
      for (int64_t d = 0; d < dim; ++d) sum[d] = 0.0f;
      if (before) {
        const T* line = shared->line<T>(shared->v, row, head, dim);
        add_columns<T, DIM>(before, dim, weights.data(), line, line, sum);  // and nothing is fetched ahead
      }
      add_columns<T, DIM>(own, dim, weights.data() + before, values, next, sum);
      Head<T, DIM>::store_scaled(sum, 1.0f / total, dim, made.data());
      put(row, head, made.data());
    };
    if constexpr (DIM > 0) {
      float x[DIM], sum[DIM];  // in registers
      run(x, sum);
    } else {
      run(query.data(), sums.data());
    }
  });
}

template <typename T, int DIM, typename Put>
void attend_any(const Heads& heads, int64_t rows, const T* q, const T* new_k, const T* new_v, int64_t row_stride, T* k,
                T* v, int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* places,
                const Shared* shared, Put put) {
  const auto run = heads.count > heads.groups ? attend_groups<T, DIM, Put> : attend<T, DIM, Put>;
  run(heads, rows, q, new_k, new_v, row_stride, k, v, capacity, first, last, places, shared, put);
}

template <typename T, typename Put>
void attend_of(const Heads& heads, int64_t rows, const T* q, const T* new_k, const T* new_v, int64_t row_stride, T* k,
               T* v, int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* places,
               const Shared* shared, Put put) {
  const auto run = heads.dim == 32    ? attend_any<T, 32, Put>    // the demo model
                   : heads.dim == 64  ? attend_any<T, 64, Put>    // OPT-125m to 1.3B
                   : heads.dim == 80  ? attend_any<T, 80, Put>    // 2.7B
                   : heads.dim == 96  ? attend_any<T, 96, Put>
                   : heads.dim == 128 ? attend_any<T, 128, Put>   // 6.7B and larger
                                      : attend_any<T, 0, Put>;
  run(heads, rows, q, new_k, new_v, row_stride, k, v, capacity, first, last, places, shared, put);
}

}  // namespace cpu
