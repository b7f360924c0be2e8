// The shape of attention heads, and the transforms of queries and keys before they are used: an RMS norm per head, where
// a model has one (Qwen3), and the rotary embedding, both in float32 and rounded once. Keys are cached after these
// transforms.

#pragma once

#include <cmath>

#include "numbers.h"

namespace cpu {

// Filled by `cpu_layers.py` and `cpu_backend.py`.
struct Heads {
  int64_t count, groups, dim;      // query heads; K/V heads, each shared by count / groups neighbouring query heads
  const float* rotations;          // [positions, rotary]: rotary / 2 cosines, then as many sines; null: none
  int64_t positions, rotary;
  double epsilon;                  // of all norms
  const void *q_norm, *k_norm;     // [dim] of T; null: none
  int64_t window;                  // the newest columns that a token attends to, its own included; 0: all

  int64_t each() const { return count / groups; }
  int64_t width() const { return count * dim; }
  int64_t kv_width() const { return groups * dim; }
  bool transforms_queries() const { return rotations || q_norm; }
  bool transforms_keys() const { return rotations || k_norm; }
  // How many of `seen` columns, the oldest ones, the token of the last of them does not attend to.
  int64_t hidden(int64_t seen) const { return window && window < seen ? seen - window : 0; }
};

// Columns in front of a row's own that several rows read: the shared prefix of their prompts
// (`skipdecode.engine.prefix_sharing`). Their number is even for bfloat16, whose values are added in pairs.
struct Shared {
  const void *k, *v;     // of T: [.., capacity, dim]; `capacity` columns from one K/V head to the next
  int64_t capacity;
  const int64_t* where;  // [rows]: the first shared column in the first K/V head, in columns from k and v
  const int64_t* counts; // [rows]: number of shared columns

  template <typename T>
  const T* line(const void* from, int64_t row, int64_t group, int64_t dim) const {
    return static_cast<const T*>(from) + (where[row] + group * capacity) * dim;
  }
};

inline int64_t count_of(const Shared* shared, int64_t row) { return shared ? shared->counts[row] : 0; }

// x [dim] -> y [dim], which may be x: the RMS norm of the head if it has a weight, then the rotary embedding for
// `position`, which pairs element i with i + rotary / 2 (`rotate_half` of Hugging Face); elements from `rotary` on are
// not rotated. Only rows that have ended have positions beyond the table. Not inlined: the compiler may reorder sums, and
// the order must be the same everywhere.
template <typename T>
[[gnu::noinline]] void norm_and_rotate(const Heads& heads, const void* norm, int64_t position, const T* x, T* y) {
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

// Prefetches a line: into the L1 cache on AMD cores; into the L2 cache on Intel's, whose line fill buffers of the L1
// cache would limit this to half of the memory bandwidth.
template <typename T>
inline void fetch(const T* number) {
#ifdef IS_AMD
  __builtin_prefetch(number, 0, 3);
#else
  __builtin_prefetch(number, 0, 2);
#endif
}

// Prefetches the lines of `count` elements.
template <typename T>
inline void fetch_all(const T* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) fetch(numbers + i);
}

// Stores a row's new key and value of one K/V head in the cache; a row's heads are adjacent, rows `row_stride` apart.
template <typename T>
inline void store_new(const Heads& heads, int64_t row, int64_t group, int64_t position, const T* new_k, const T* new_v,
                      int64_t row_stride, T* key, T* value) {
  const int64_t at = row * row_stride + group * heads.dim;
  if (heads.transforms_keys())
    norm_and_rotate(heads, heads.k_norm, position, new_k + at, key);
  else
    std::memcpy(key, new_k + at, heads.dim * sizeof(T));
  std::memcpy(value, new_v + at, heads.dim * sizeof(T));
}

// The row and K/V head of a unit of work, and the index of that row's head in the cache (its slot in `slots`, or the row
// itself). `by_head` is for rows that read the same keys and values, which then stay in a core's cache: units of a head
// are consecutive. Otherwise those of a row are, as they are stored.
struct UnitOf {
  int64_t row, head, memory;

  UnitOf(int64_t unit, int64_t rows, int64_t heads, const int64_t* slots, bool by_head)
      : row(by_head ? unit % rows : unit / heads),
        head(by_head ? unit / rows : unit % heads),
        memory((slots ? slots[row] : row) * heads + head) {}
};

// Stores new keys and values of rows that share slots of the cache, before any of them attends; called by all threads of
// a parallel region, with a barrier at the end.
template <typename T>
void store_all(const Heads& heads, int64_t rows, const T* new_k, const T* new_v, int64_t row_stride, T* k, T* v,
               int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* slots, const Shared* shared) {
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < rows * heads.groups; ++unit) {
    const UnitOf of(unit, rows, heads.groups, slots, true);
    const int64_t at = (of.memory * capacity + last[of.row]) * heads.dim;
    const int64_t position = count_of(shared, of.row) + last[of.row] - first[of.row];
    store_new(heads, of.row, of.head, position, new_k, new_v, row_stride, k + at, v + at);
  }
}

}  // namespace cpu
