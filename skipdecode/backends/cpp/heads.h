// What attention has for heads, and what becomes of a query or a key before it is used: an RMS norm of its own, where a
// model has one (Qwen3), and a rotation by its position (RoPE), both in float32, rounded once. Keys are in the cache as they
// are used.

#pragma once

#include <cmath>

#include "numbers.h"

namespace cpu {

// As `layer.py` and `cpu.py` hand it over.
struct Heads {
  int64_t count, groups, dim;      // heads of queries; those of keys and values, each for count / groups neighbours
  const float* rotations;          // [positions, rotary]: rotary / 2 cosines, then as many sines; null: none
  int64_t positions, rotary;
  double epsilon;                  // of all norms
  const void *q_norm, *k_norm;     // [dim] of T; null: none

  int64_t each() const { return count / groups; }
  int64_t width() const { return count * dim; }
  int64_t kv_width() const { return groups * dim; }
  bool turns_queries() const { return rotations || q_norm; }
  bool turns_keys() const { return rotations || k_norm; }
};

// Columns before a row's own that several rows read: the head of their prompts (`skipdecode.engine.prefix_sharing`). An even number of
// them for bfloat16, whose values are added two at a time.
struct Shared {
  const void *k, *v;     // of T: [.., capacity, dim], from one group of heads to the next `capacity` columns
  int64_t capacity;
  const int64_t* where;  // [rows]: the first of them in the first group, in columns from k and v on
  const int64_t* counts; // [rows]: how many

  template <typename T>
  const T* line(const void* from, int64_t row, int64_t group, int64_t dim) const {
    return static_cast<const T*>(from) + (where[row] + group * capacity) * dim;
  }
};

inline int64_t count_of(const Shared* shared, int64_t row) { return shared ? shared->counts[row] : 0; }

// x [dim] -> y [dim], which may be x: x / rms(x) * weight where there is one, then number i and the one half of `rotary`
// behind it as a point that is turned by the i-th angle of `position` (`rotate_half` of Hugging Face); numbers behind
// `rotary` stay. Positions past the table are those of rows that have ended. Not inlined: sums may be reordered, and are
// to be in one order everywhere.
template <typename T>
[[gnu::noinline]] void turn(const Heads& heads, const void* norm, int64_t position, const T* x, T* y) {
  const T* weight = static_cast<const T*>(norm);
  float scale = 1.0f;
  if (weight) {
    Floats squares = all(0.0f);
    for (int64_t i = 0; i < heads.dim; i += 16) {
      const Floats part = load_first(x + i, heads.dim - i);
      squares = fma(part, part, squares);
    }
    scale = 1.0f / std::sqrt(sum(squares) / heads.dim + float(heads.epsilon));
  }
  auto part = [&](int64_t at, int64_t count) {
    const Floats numbers = load_first(x + at, count);
    return weight ? numbers * all(scale) * load_first(weight + at, count) : numbers;
  };
  const int64_t half = heads.rotations ? heads.rotary / 2 : 0;
  const int64_t line = position < heads.positions ? position : heads.positions - 1;
  const float *cosines = heads.rotations + line * heads.rotary, *sines = cosines + half;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const Floats first = part(i, left), second = part(half + i, left);
    const Floats cosine = load_first(cosines + i, left), sine = load_first(sines + i, left);
    store_first(y + i, first * cosine - second * sine, left);
    store_first(y + half + i, second * cosine + first * sine, left);
  }
  for (int64_t i = 2 * half; i < heads.dim; i += 16) store_first(y + i, part(i, heads.dim - i), heads.dim - i);
}

// The line of memory at `number`, on its way: to the L1 cache of AMD's cores. On Intel's, which have as many lines on their
// way there as are half of memory's speed, to the L2 cache.
template <typename T>
inline void fetch(const T* number) {
#ifdef IS_AMD
  __builtin_prefetch(number, 0, 3);
#else
  __builtin_prefetch(number, 0, 2);
#endif
}

// The lines of `count` numbers.
template <typename T>
inline void fetch_all(const T* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) fetch(numbers + i);
}

// A row's new key and value of one group into the cache; those of a row lie side by side, `row_stride` from row to row.
template <typename T>
inline void store_new(const Heads& heads, int64_t row, int64_t group, int64_t position, const T* new_k, const T* new_v,
                      int64_t row_stride, T* key, T* value) {
  const int64_t at = row * row_stride + group * heads.dim;
  if (heads.turns_keys())
    turn(heads, heads.k_norm, position, new_k + at, key);
  else
    std::memcpy(key, new_k + at, heads.dim * sizeof(T));
  std::memcpy(value, new_v + at, heads.dim * sizeof(T));
}

// Which row and head the work on a part of the cache is for, and which head of which row of the cache that is (`places`, or
// the row itself). `by_head`: for rows that read the same keys and values, which then stay in a core's cache: those of a head
// come one behind the other. Else those of a row do, as they lie in memory.
struct UnitOf {
  int64_t row, head, memory;

  UnitOf(int64_t unit, int64_t rows, int64_t heads, const int64_t* places, bool by_head)
      : row(by_head ? unit % rows : unit / heads),
        head(by_head ? unit / rows : unit % heads),
        memory((places ? places[row] : row) * heads + head) {}
};

// New keys and values of rows that have `places` in the cache, several in one, before any of them attends; for all threads
// of a parallel region, which wait for each other at the end.
template <typename T>
void store_all(const Heads& heads, int64_t rows, const T* new_k, const T* new_v, int64_t row_stride, T* k, T* v,
               int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* places, const Shared* shared) {
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < rows * heads.groups; ++unit) {
    const UnitOf of(unit, rows, heads.groups, places, true);
    const int64_t at = (of.memory * capacity + last[of.row]) * heads.dim;
    const int64_t position = count_of(shared, of.row) + last[of.row] - first[of.row];
    store_new(heads, of.row, of.head, position, new_k, new_v, row_stride, k + at, v + at);
  }
}

}  // namespace cpu
