// Attention of one new column per row over that row's cached keys and values, at the speed of memory; for attention.cpp
// and layer.h. Several new columns of one row of the cache are as many rows here, with the same slot.
//
// A line of keys or values is loaded once for all queries of its group. Scores are computed 16 columns at a time, so that
// the horizontal sums of registers cost little; values are accumulated for as many queries and elements as fit in
// registers. Columns count from a row's first one, so padding does not change the order of any sum.
//
// While keys are read, the values of the same row and group are prefetched, and while values are read, the next unit's
// keys: hardware prefetchers stop at the end of a page, which is smaller than one group's cache. A core has few
// outstanding misses, so prefetches are spread between other instructions; in a burst they would hold those up.

#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "buffer.h"
#include "heads.h"
#include "threads.h"

namespace cpu {

#ifdef __AVX512F__

using Lanes = __m512;
// In registers: COLUMNS keys, SUMS sums of 16 for up to QUERIES_AT_ONCE queries and PARTS_AT_ONCE parts of a value, each
// WIDE times 16 elements.
constexpr int COLUMNS = 16, SUMS = 16, QUERIES_AT_ONCE = 8, PARTS_AT_ONCE = 4, WIDE = 2;

inline Lanes no_lanes() { return _mm512_setzero_ps(); }

// The horizontal sum of each of 16 registers, in their order.
inline Lanes sums_of(const Lanes* x) {
  Lanes quarters[4];
  for (int i = 0; i < 4; ++i) {
    const Lanes* y = x + 4 * i;
    const Lanes low = _mm512_add_ps(_mm512_unpacklo_ps(y[0], y[1]), _mm512_unpackhi_ps(y[0], y[1]));
    const Lanes high = _mm512_add_ps(_mm512_unpacklo_ps(y[2], y[3]), _mm512_unpackhi_ps(y[2], y[3]));
    const __m512d first = _mm512_castps_pd(low), second = _mm512_castps_pd(high);
    quarters[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  Lanes halves[2];
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                       _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// sum + x * y of PART<T> elements, of which y has the first `left`; x is zero beyond them.
template <typename T>
constexpr int PART = 16;
inline Lanes dot(Lanes sum, const float* x, const float* y, int64_t left) {
  return _mm512_fmadd_ps(_mm512_loadu_ps(x), load_first(y, left).v, sum);
}
#ifdef HAS_BFLOAT16
template <>
constexpr int PART<bfloat16> = 32;
inline Lanes dot(Lanes sum, const bfloat16* x, const bfloat16* y, int64_t left) {
  const __mmask32 some = left < 32 ? (1u << left) - 1 : ~0u;
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)),
                          reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(some, y)));
}
#else
inline Lanes dot(Lanes sum, const bfloat16* x, const bfloat16* y, int64_t left) {
  return _mm512_fmadd_ps(load_first(x, 16).v, load_first(y, left).v, sum);
}
#endif

#else

using Lanes = __m256;
constexpr int COLUMNS = 8, SUMS = 8, QUERIES_AT_ONCE = 6, PARTS_AT_ONCE = 8, WIDE = 1;

inline Lanes no_lanes() { return _mm256_setzero_ps(); }

inline Lanes sums_of(const Lanes* x) {  // of 8 registers
  const Lanes low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Lanes high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

template <typename T>
constexpr int PART = 16;
template <typename T>
inline Lanes dot(Lanes sum, const T* x, const T* y, int64_t left) {
  const Floats a = load_first(x, 16), b = load_first(y, left);
  return _mm256_fmadd_ps(a.b, b.b, _mm256_fmadd_ps(a.a, b.a, sum));
}

#endif

// A query, padded with zeros to a multiple of 32, times `count` <= 16 keys; the remaining scores are undefined. FETCHES:
// prefetches as many elements from `next` on.
template <int DIM, bool ALL, bool FETCHES, typename T>
inline void score(const T* query, const T* keys, int64_t count, int64_t dim_, float* scores, const T* next) {
  const int64_t dim = DIM ? DIM : dim_;
#pragma GCC unroll 2
  for (int from = 0; from < 16; from += COLUMNS) {
    Lanes sums[COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < COLUMNS; ++i) sums[i] = no_lanes();
#pragma GCC unroll 8
    for (int64_t d = 0; d < dim; d += PART<T>) {
#pragma GCC unroll 16
      for (int i = 0; i < COLUMNS; ++i) {
        const int64_t key = ALL || from + i < count ? from + i : count - 1;  // memory may end there
        sums[i] = dot(sums[i], query + d, keys + key * dim + d, dim - d);
        if (FETCHES) fetch(next + from * dim + d * COLUMNS + i * PART<T>);
      }
    }
    const Lanes made = sums_of(sums);
    std::memcpy(scores + from, &made, sizeof(made));
  }
}

// The type of attention weights that `add_values` takes, and the order of 32 sums while values are accumulated:
// unchanged, or, where two columns of bfloat16 are added at a time, interleaved as unpacking leaves them.
template <typename T>
struct Weights {
  using Type = float;
  static Floats rounded(Floats x) { return x; }
  static void order(float*) {}
};
#ifdef HAS_BFLOAT16
template <>
struct Weights<bfloat16> {
  using Type = bfloat16;
  static Floats rounded(Floats x) { return cpu::rounded(x, bfloat16{}); }
  static void order(float* sums) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
    const __m512 first = _mm512_shuffle_f32x4(low, high, 0x44), second = _mm512_shuffle_f32x4(low, high, 0xee);
    _mm512_storeu_ps(sums, _mm512_shuffle_f32x4(first, first, 0xd8));
    _mm512_storeu_ps(sums + 16, _mm512_shuffle_f32x4(second, second, 0xd8));
  }
};
#endif

// Adds `count` values, PARTS parts of each from `values` on, times their weights to `sums`, for QUERIES queries whose
// weights are `apart` and whose sums are `width` elements apart. Not ALL: a single part with only `left` elements.
// `ahead` elements from `next` on are prefetched with each value.
template <int QUERIES, int PARTS, bool ALL, typename T>
[[gnu::noinline]] void add_values(int64_t count, const float* weights, int64_t apart, const T* values, int64_t dim,
                                  int64_t left, float* sums, int64_t width, const T* next, int64_t ahead) {
  constexpr int N = PARTS * WIDE;
  Floats sum[QUERIES][N];
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[r][j] = load16(sums + r * width + 16 * j);
  for (int64_t s = 0; s < count; ++s, values += dim, next += ahead) {
    fetch_all(next, ahead);
    Floats numbers[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) numbers[j] = load_first(values + 16 * j, ALL ? 16 : left - 16 * j);
#pragma GCC unroll 8
    for (int r = 0; r < QUERIES; ++r) {
      const Floats weight = all(weights[r * apart + s]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[r][j] = fma(weight, numbers[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store16(sums + r * width + 16 * j, sum[r][j]);
}

#ifdef HAS_BFLOAT16
// Two columns at a time; the weight after the last one is zero.
template <int QUERIES, int PARTS, bool ALL>
[[gnu::noinline]] void add_values(int64_t count, const bfloat16* weights, int64_t apart, const bfloat16* values, int64_t dim,
                                  int64_t left, float* sums, int64_t width, const bfloat16* next, int64_t ahead) {
  const __mmask32 some = ALL ? ~0u : (1u << left) - 1;
  __m512 sum[QUERIES][2 * PARTS];
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < 2 * PARTS; ++j) sum[r][j] = _mm512_loadu_ps(sums + r * width + 16 * j);
  for (int64_t s = 0; s < count; s += 2, values += 2 * dim, next += 2 * ahead) {
    fetch_all(next, 2 * ahead);
    const bfloat16* other = s + 1 < count ? values + dim : values;  // memory may end there
    __m512bh pairs[2 * PARTS];
#pragma GCC unroll 4
    for (int j = 0; j < PARTS; ++j) {
      const __m512i a = ALL ? _mm512_loadu_si512(values + 32 * j) : _mm512_maskz_loadu_epi16(some, values);
      const __m512i b = ALL ? _mm512_loadu_si512(other + 32 * j) : _mm512_maskz_loadu_epi16(some, other);
      pairs[2 * j] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
      pairs[2 * j + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
    }
#pragma GCC unroll 8
    for (int r = 0; r < QUERIES; ++r) {
      int32_t both;
      std::memcpy(&both, weights + r * apart + s, 4);
      const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 8
      for (int j = 0; j < 2 * PARTS; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], pairs[j], weight);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < 2 * PARTS; ++j) _mm512_storeu_ps(sums + r * width + 16 * j, sum[r][j]);
}
#endif

template <typename T>
using AddValues = void (*)(int64_t, const typename Weights<T>::Type*, int64_t, const T*, int64_t, int64_t, float*, int64_t,
                           const T*, int64_t);

template <int QUERIES, int PARTS, bool ALL, typename T>
constexpr AddValues<T> adder() {
  if constexpr (QUERIES * PARTS * WIDE > SUMS || PARTS > PARTS_AT_ONCE)
    return nullptr;
#ifdef HAS_BFLOAT16
  else if constexpr (std::is_same<T, bfloat16>::value)
    return &add_values<QUERIES, PARTS, ALL>;
#endif
  else
    return &add_values<QUERIES, PARTS, ALL, T>;
}

// Indexed by the number of whole parts; 0 is an incomplete last part.
template <int QUERIES, typename T>
constexpr std::array<AddValues<T>, 9> adders() {
  return {adder<QUERIES, 1, false, T>(), adder<QUERIES, 1, true, T>(), adder<QUERIES, 2, true, T>(),
          adder<QUERIES, 3, true, T>(),  adder<QUERIES, 4, true, T>(), adder<QUERIES, 5, true, T>(),
          adder<QUERIES, 6, true, T>(),  adder<QUERIES, 7, true, T>(), adder<QUERIES, 8, true, T>()};
}

// `add_values` for any number of queries and all elements of a value. One value from `next` on is prefetched for each.
template <typename T>
void add_all_values(int64_t queries, int64_t count, const typename Weights<T>::Type* weights, int64_t apart,
                    const T* values, int64_t dim, float* sums, int64_t width, const T* next) {
  static constexpr std::array<AddValues<T>, 9> RUNS[8] = {adders<1, T>(), adders<2, T>(), adders<3, T>(), adders<4, T>(),
                                                          adders<5, T>(), adders<6, T>(), adders<7, T>(), adders<8, T>()};
  constexpr int64_t PART_NUMBERS = 16 * WIDE;
  if (queries > 1) fetch_all(next, count * dim);  // there is so much to do per line that a burst does no harm
  for (int64_t from = 0; from < queries; from += QUERIES_AT_ONCE) {
    const int64_t some = std::min(queries - from, int64_t(QUERIES_AT_ONCE));
    const int64_t most = std::min(SUMS / WIDE / some, int64_t(PARTS_AT_ONCE));
    for (int64_t d = 0; d < dim;) {
      const int64_t parts = std::min((dim - d) / PART_NUMBERS, most);
      RUNS[some - 1][parts](count, weights + from * apart, apart, values + d, dim, dim - d, sums + from * width + d, width,
                            next, queries == 1 && d == 0 ? dim : 0);
      d += std::max(parts, int64_t(1)) * PART_NUMBERS;
    }
  }
}

// A thread's scratch memory for one row and group: see `attend`.
template <typename T>
struct GroupScratch {
  int64_t apart, width;  // strides of the queries' weights, and of their elements
  T *queries, *made;
  float *scores, *sums, *tops;
  typename Weights<T>::Type* weights;

  GroupScratch(const Heads& heads, int64_t capacity)
      : apart((capacity + 31) / 16 * 16), width((heads.dim + 31) / 32 * 32) {
    thread_local Buffer<T> buffer;
    thread_local Buffer<float> floats_buffer;
    const int64_t each = heads.each();
    queries = buffer.reserve((each + 1) * width), made = queries + each * width;
    scores = floats_buffer.reserve(each * (2 * apart + width + 16));
    sums = scores + each * apart, tops = sums + each * width;
    weights = reinterpret_cast<typename Weights<T>::Type*>(tops + each * 16);
    std::memset(static_cast<void*>(queries), 0, each * width * sizeof(T));
  }
};

// The scores of all queries of a group with `count` columns from `keys` on, stored from column `from` on. The first
// `hidden` of all columns count for nothing.
template <int DIM, typename T>
void score_all(int64_t each, int64_t from, int64_t count, int64_t hidden, const T* keys, const T* values, int64_t dim_,
               const GroupScratch<T>& scratch) {
  const int64_t dim = DIM ? DIM : dim_;
  const float scale = 1.0f / std::sqrt(float(dim));
  for (int64_t s = 0; s < count; s += 16) {
    const int64_t some = count - s < 16 ? count - s : 16;
    if (each > 1) fetch_all(values + s * dim, some * dim);
    for (int64_t r = 0; r < each; ++r) {
      float* scores = scratch.scores + r * scratch.apart + from + s;
      const auto run = each == 1 ? some == 16 ? score<DIM, true, true, T> : score<DIM, false, true, T>
                              : some == 16 ? score<DIM, true, false, T> : score<DIM, false, false, T>;
      run(scratch.queries + r * scratch.width, keys + s * dim, some, dim, scores, values + s * dim);
      const Floats seen = first_of(some, load16(scores) * all(scale), all(-FLT_MAX));
      const Floats scaled = hidden ? first_of(hidden - from - s, all(-FLT_MAX), seen) : seen;
      store16(scores, scaled);
      store16(scratch.tops + 16 * r, max(load16(scratch.tops + 16 * r), scaled));
    }
  }
}

// Scores to unnormalised weights, with one over their sum in tops[16 * query]. The first `hidden` weights are zero.
template <typename T>
void weigh(int64_t each, int64_t count, int64_t hidden, const GroupScratch<T>& scratch) {
  for (int64_t r = 0; r < each; ++r) {
    const Floats top = all(largest(load16(scratch.tops + 16 * r)));
    Floats total = all(0.0f);
    for (int64_t s = 0; s < count; s += 16) {
      const int64_t at = r * scratch.apart + s;
      const Floats seen = first_of(count - s, exp_of_negatives(load16(scratch.scores + at) - top), all(0.0f));
      const Floats weight = hidden ? first_of(hidden - s, all(0.0f), seen) : seen;
      store_first(scratch.weights + at, weight, 16);
      total = total + Weights<T>::rounded(weight);
    }
    scratch.tops[16 * r] = 1.0f / sum(total);
  }
}

// A thread's share of the attention, called by all threads of a team, without a barrier at the end. q, new_k, new_v:
// `row_stride` elements between rows. DIM: the head dimension, or 0 if it is only known at run time. `slots` [rows]: each
// row's slot in the cache; null: its own index. Where rows share a slot, all new keys and values are stored already
// (`store_all`). `by_head`: the order of `UnitOf`, which changes no result. `shared` (null: none) comes in front of a
// row's own columns; the result is bitwise the same as with all columns in one piece. put(row, head, result [dim]) is
// called for each row and head.
template <typename T, int DIM, typename Put>
void attend(Team team, const Heads& heads, int64_t rows, const T* q, const T* new_k, const T* new_v, int64_t row_stride,
            T* k, T* v, int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* slots,
            bool by_head, const Shared* shared, Put put) {
  constexpr int64_t AT_ONCE = 64;  // columns: their values stay in the L1 cache for all queries
  const int64_t dim = DIM ? DIM : heads.dim, each = heads.each(), units = rows * heads.groups, step = capacity * dim;
  const GroupScratch<T> scratch(heads, capacity + (shared ? shared->capacity : 0));
  team.share(units, [&](int64_t unit) {
    const UnitOf of(unit, rows, heads.groups, slots, by_head);
    const int64_t row = of.row, group = of.head, all_shared = count_of(shared, row), newest = last[row];
    const int64_t position = all_shared + newest - first[row];
    if (new_k) {
      const int64_t at = of.memory * step + newest * dim;
      store_new(heads, row, group, position, new_k, new_v, row_stride, k + at, v + at);
    }
    // columns beyond the window are not read, but for one if their number is odd: values may be added in pairs
    const int64_t unseen = heads.hidden(position + 1), skipped = unseen / 2 * 2, hidden = unseen - skipped;
    const int64_t skipped_shared = skipped < all_shared ? skipped : all_shared, before = all_shared - skipped_shared;
    const int64_t start = first[row] + skipped - skipped_shared, count = newest - start + 1;
    const T *keys = k + of.memory * step + start * dim, *values = v + of.memory * step + start * dim;
    const T *shared_keys = before ? shared->line<T>(shared->k, row, group, dim) + skipped_shared * dim : nullptr;
    const T *shared_values = before ? shared->line<T>(shared->v, row, group, dim) + skipped_shared * dim : nullptr;
    for (int64_t r = 0; r < each; ++r) {
      const T* from = q + row * row_stride + (group * each + r) * dim;
      if (heads.transforms_queries())
        norm_and_rotate(heads, heads.q_norm, position, from, scratch.queries + r * scratch.width);
      else
        std::memcpy(scratch.queries + r * scratch.width, from, dim * sizeof(T));
    }
    for (int64_t r = 0; r < each; ++r) store16(scratch.tops + 16 * r, all(-FLT_MAX));
    if (before) score_all<DIM>(each, 0, before, hidden, shared_keys, shared_values, dim, scratch);
    score_all<DIM>(each, before, count, hidden, keys, values, dim, scratch);
    weigh(each, before + count, hidden, scratch);
    std::memset(scratch.sums, 0, each * scratch.width * sizeof(float));
    const UnitOf following(unit + 1 < units ? unit + 1 : unit, rows, heads.groups, slots, by_head);
    const T* next = k + following.memory * step + start * dim;
    for (int64_t s = 0; s < before; s += AT_ONCE) {
      const int64_t some = before - s < AT_ONCE ? before - s : AT_ONCE;
      add_all_values(each, some, scratch.weights + s, scratch.apart, shared_values + s * dim, dim, scratch.sums,
                     scratch.width, shared_values + s * dim);
    }
    for (int64_t s = 0; s < count; s += AT_ONCE) {
      const int64_t some = count - s < AT_ONCE ? count - s : AT_ONCE;
      add_all_values(each, some, scratch.weights + before + s, scratch.apart, values + s * dim, dim, scratch.sums,
                     scratch.width, next + s * dim);
    }
    for (int64_t r = 0; r < each; ++r) {
      for (int64_t d = 0; d < dim; d += 32) Weights<T>::order(scratch.sums + r * scratch.width + d);
      for (int64_t d = 0; d < dim; d += 16)
        store_first(scratch.made + d, load16(scratch.sums + r * scratch.width + d) * all(scratch.tops[16 * r]), dim - d);
      put(row, group * each + r, scratch.made);
    }
  });
}

template <typename T, typename Put>
void attend_of(Team team, const Heads& heads, int64_t rows, const T* q, const T* new_k, const T* new_v,
               int64_t row_stride, T* k, T* v, int64_t capacity, const int64_t* first, const int64_t* last,
               const int64_t* slots, bool by_head, const Shared* shared, Put put) {
  const auto run = heads.dim == 32    ? attend<T, 32, Put>    // the demo model
                   : heads.dim == 64  ? attend<T, 64, Put>    // OPT-125m to 1.3B
                   : heads.dim == 80  ? attend<T, 80, Put>    // 2.7B
                   : heads.dim == 96  ? attend<T, 96, Put>
                   : heads.dim == 128 ? attend<T, 128, Put>   // 6.7B and larger
                   : heads.dim == 256 ? attend<T, 256, Put>   // Gemma
                                      : attend<T, 0, Put>;
  run(team, heads, rows, q, new_k, new_v, row_stride, k, v, capacity, first, last, slots, by_head, shared, put);
}

}  // namespace cpu
