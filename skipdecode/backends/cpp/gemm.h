// Products with packed weights, with a bias, and an activation or a residual, in the same pass; for the .cpp files.
//
// Decoding multiplies few rows by weights that come from memory, so the weights lie in the order in which they are read,
// one stream per thread, and are prefetched ahead of their use. A row's sums run over k in one order, whatever the number
// of rows: a row's bits do not depend on its batch. With many rows the weights are what is read again and again: see
// `of_tiles`.
//
// Packed weights: for each 32 outputs, for each 32 inputs, two tiles of 16 outputs; a tile is a line of 64 bytes for each
// input of float32 or pair of bfloat16. T is the type of rows; W, of weights, is T, or bfloat16 beside rows in float32.

#pragma once

#include "buffer.h"
#include "micro.h"
#include "threads.h"

namespace cpu {

constexpr int64_t BLOCK = 1024;           // numbers in the weights of 32 outputs and 32 inputs
#ifdef BACKEND_AMX
constexpr int64_t ROWS_BYTES = 3 << 19;   // of x, at a time: with the weights of 32 outputs they stay in the L2 cache
#else
constexpr int64_t ROWS_BYTES = 1 << 19;
#endif
constexpr int64_t MANY = 256;             // rows per thread that are worth that each thread reads all weights
constexpr int64_t ROWS = 256, INPUTS = 2048;  // of a thread: 1 MiB of rows in bfloat16; of widened ones half the inputs
#ifdef HAS_PAIRED
constexpr int64_t DEEP_BYTES = 8192;      // of weights at a time, which stay in the L1 cache
#else
constexpr int64_t DEEP_BYTES = 16384;
#endif
constexpr int64_t NEAR = 8192;            // bytes that weights are fetched ahead where few rows stay in registers (AVX-512)

// What follows on a product. SWIGLU: of each 32 outputs the first 16 are gates, the last 16 what they let through, and
// what comes out are 16 numbers, silu(gate) * other.
enum Then { NOTHING, RELU, ADD, SWIGLU };

// Numbers per row that come out of a product.
constexpr int64_t made_of(Then then, int64_t outputs) { return then == SWIGLU ? outputs / 2 : outputs; }

// How rows lie, in groups of 32 and their numbers in blocks of 32: numbers from one group, block or row to the next.
struct Layout {
  int64_t group, block, row;

  int64_t at(int64_t row_, int64_t block_) const { return row_ / 32 * group + block_ * block + row_ % 32 * row; }
};

inline Layout in_lines(int64_t width) { return {32 * width, 32, width}; }  // one row behind the other
// As `multiply_tiles` reads them: 32 numbers of each row of a group, then the next 32. Where `rows` are fewer than a
// group they lie closer, lest they share a few lines of the cache; AMX reads all 32.
inline Layout in_tiles(int64_t width, int64_t rows) {
#ifdef BACKEND_AMX
  rows = 32;
#endif
  return {32 * width, rows < 32 ? 32 * rows : BLOCK, 32};
}

// Rows cut into chunks of whole groups of 32, as evenly as these allow: not more than `most` each, and a multiple of
// `threads` chunks, so that all have as many.
struct Cut {
  int64_t rows, groups, chunks;

  Cut(int64_t rows_, int64_t most, int64_t threads)
      : rows(rows_), groups((rows + 31) / 32), chunks((rows + most * threads - 1) / (most * threads) * threads) {}

  int64_t begin(int64_t chunk) const { return groups * chunk / chunks * 32; }
  int64_t end(int64_t chunk) const { return begin(chunk + 1) < rows ? begin(chunk + 1) : rows; }
  int64_t of(int64_t row) const { return ((row / 32 + 1) * chunks - 1) / groups; }
  int64_t largest() const { return (groups + chunks - 1) / chunks * 32; }
};

// Bias, activation or residual, and rounding, of the sums of `count` rows from `row` on, in one group, and 32 outputs.
template <Then THEN, typename T>
inline void finish(const float* sums, int64_t row, int count, int64_t block, int64_t outputs, const T* bias,
                   const T* residual, T* y, Layout layout) {
  const int64_t from = 32 * block, at = layout.at(row, block), left = outputs - from;
  const Floats biases[2] = {bias ? load_first(bias + from, left) : all(0.0f),
                            bias ? load_first(bias + from + 16, left - 16) : all(0.0f)};
  if (THEN == SWIGLU) {
    const int64_t to = layout.at(row, block / 2) + block % 2 * 16;
    for (int r = 0; r < count; ++r) {
      const Floats gate = load16(sums + 32 * r) + biases[0], other = load16(sums + 32 * r + 16) + biases[1];
      store_first(y + to + r * layout.row, silu(gate) * other, 16);
    }
    return;
  }
  for (int r = 0; r < count; ++r)
    for (int half = 0; half < 2; ++half) {
      const int64_t to = at + r * layout.row + 16 * half;
      Floats sum = load16(sums + 32 * r + 16 * half) + biases[half];
      if (THEN == RELU) sum = max(all(0.0f), sum);  // in this order NaN stays NaN
      if (THEN == ADD) sum = sum + load_first(residual + to, left - 16 * half);
      store_first(y + to, sum, left - 16 * half);
    }
}

// `rows` rows of x as `in_tiles` has them, filled up with zeros to 32 rows where a layout has room for these.
template <typename T>
inline void to_tiles(int64_t rows, int64_t steps, const T* x, int64_t stride, T* tiles, Layout layout) {
  const int64_t filled = layout.block == BLOCK ? (rows + 31) / 32 * 32 : rows;
  for (int64_t row = 0; row < filled; ++row)
    for (int64_t k = 0; k < steps; ++k) {
      T* to = tiles + layout.at(row, k);
      if (row < rows)
        std::memcpy(to, x + row * stride + k * 32, 32 * sizeof(T));
      else
        std::memset(to, 0, 32 * sizeof(T));
    }
}

#ifdef BACKEND_AMX

// x W^T, cut by outputs: each weight is read by one thread. For all threads of a parallel region that have a `Unit`; they
// wait for none at the end. x: `stride` numbers from row to row. `last`: the last rows % 32 rows, `inputs` apart, with room
// behind them for 32, since a tile reads whole rows.
// `finish` is called with the sums of some rows and 32 outputs: (sums, first row, rows, block of outputs).
template <typename Finish>
void multiply_outputs(int64_t rows, int64_t outputs, int64_t inputs, const bfloat16* x, int64_t stride,
                      const bfloat16* last, const bfloat16* w, Finish finish) {
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32;
  const int64_t at_once = ROWS_BYTES / (2 * inputs) < 32 ? 32 : ROWS_BYTES / (2 * inputs) / 32 * 32;
  alignas(64) float sums[32 * 32];
  for (int64_t from = 0; from < rows; from += at_once) {
    const int64_t to = from + at_once < rows ? from + at_once : rows;
    share(blocks, [&](int64_t block) {
      const bfloat16* weights = w + block * steps * BLOCK;
      for (int64_t row = from; row < to; row += 32) {
        const int count = to - row < 32 ? int(to - row) : 32;
        const bfloat16* part = count < 32 ? last : x + row * stride;
        const int64_t apart = count < 32 ? inputs : stride;
        const auto run = count > 16 ? (row == from ? multiply_lines<true, true> : multiply_lines<true, false>)
                                    : (row == from ? multiply_lines<false, true> : multiply_lines<false, false>);
        run(part, apart, weights, steps, sums);
        finish(sums, row, count, block);
      }
    });
  }
}

#endif

// The largest sums so far of each row, rounded as T is, in 32 lanes: output 32 block + lane. The first of equals, since a
// thread's blocks rise.
struct alignas(64) Largest {
  float values[32];
  int32_t blocks[32];
};

template <typename T>
inline void see_largest(const float* sums, int count, int64_t block, int64_t outputs, Largest* rows) {
  const int64_t left = outputs - 32 * block;
  for (int r = 0; r < count; ++r)
    for (int half = 0; half < 32; half += 16)
      keep_larger(rounded(load16(sums + 32 * r + half), T{}), left - half, int32_t(block), rows[r].values + half,
                  rows[r].blocks + half);
}

// Rows that other threads may have made, on their way from there: a product would wait for line after line.
template <typename T>
inline void fetch_rows(const T* x, int64_t count) {
  const char *at = reinterpret_cast<const char*>(x), *end = reinterpret_cast<const char*>(x + count);
  for (; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
}

// Rows as a product reads them. Where that takes other numbers, the blocks from `first` to `end` are widened in memory of
// the thread's own, and all rows are one group: the more of them share a line of weights, the less often it is widened.
template <typename T, typename R>
struct Read {
  const R* x;
  Layout layout;
  int64_t group;  // rows of one

  Read(const T* tiles, int64_t rows, int64_t first, int64_t end, Layout from) {
    if constexpr (!std::is_same<R, T>::value) {
      thread_local Buffer<R> kept;
      R* wide = kept.room(rows * end * 32);
      layout = {1024, 32 * rows, 32}, group = rows, x = wide;
      for (int64_t k = first; k < end; ++k)
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t half = 0; half < 32; half += 16)
            store16(wide + layout.at(row, k) + half, load_first(tiles + from.at(row, k) + half, 16));
    } else {
      layout = from, group = 32, x = tiles;
    }
  }
};

// The same for rows in tiles. A thread that has them to itself, not more than ROWS, takes first the first inputs of all rows
// (INPUTS), which stay in its core's L2 cache. Threads that share them have parts of the outputs, and as many rows at a
// time as stay there whole. Of a block's weights DEEP_BYTES at a time stay in the L1 cache while the rows go by.
template <typename T, typename W, typename Finish>
void multiply_tiled(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* tiles, const W* w, Layout from_,
                    Finish finish) {
  using R = Row<T, W>;
  constexpr int64_t LINES = BLOCK * sizeof(W) / 64, DEEP = DEEP_BYTES / (64 * LINES);
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32, fit = ROWS_BYTES / (32 * sizeof(R) * inputs);
  const int64_t at_once = team.is_alone ? INPUTS * sizeof(T) / sizeof(R) / 32 : steps, all_groups = (rows + 31) / 32;
  const int64_t some = team.is_alone || fit > all_groups ? all_groups : fit < 1 ? 1 : fit;
  const bool is_whole = steps <= at_once;
#ifdef BACKEND_AVX512
  const bool are_few = rows <= AT_ONCE;
#else
  const bool are_few = false;  // AMX takes 32 rows anyway; AVX2 takes half of the outputs, so weights would go by twice
#endif
  thread_local Buffer<float> kept;
  float* sums = kept.room((is_whole ? 1 : blocks) * some * 1024);
  for (int64_t from = 0; from < rows; from += 32 * some) {
    const int64_t to = from + 32 * some < rows ? from + 32 * some : rows;
    if (!team.is_alone) fetch_rows(tiles + from_.at(from, 0), (to - from) * inputs);
    for (int64_t first = 0; first < steps; first += at_once) {
      const int64_t end = first + at_once < steps ? first + at_once : steps, most = are_few ? end - first : DEEP;
      const Read<T, R> read(tiles + from_.at(from, 0), to - from, first, end, from_);
      const int64_t groups = (to - from + read.group - 1) / read.group;
      team.share(blocks, [&](int64_t block) {
        float* block_sums = sums + (is_whole ? 0 : block) * some * 1024;
        for (int64_t k = first; k < end; k += most) {
          const int64_t deep = end - k < most ? end - k : most, ahead = (deep * LINES + groups - 1) / groups;
          const W* weights = w + (block * steps + k) * BLOCK;
          const char* next = are_few ? reinterpret_cast<const char*>(weights) + NEAR
                                     : reinterpret_cast<const char*>(weights + (k + deep < end ? deep : steps - k + first) * BLOCK);
          for (int64_t group = 0; group < groups; ++group) {
            const int64_t row = read.group * group, left = to - from - row, count = left < read.group ? left : read.group;
            float* group_sums = block_sums + 32 * row;
            multiply_tiles(read.x + read.layout.at(row, k), read.layout.block, int(count), weights, deep, group_sums, k == 0,
                           next + group * ahead * 64, ahead);
            if (k + deep == steps)
              for (int64_t done = 0; done < count; done += 32)
                finish(group_sums + 32 * done, from + row + done, int(count - done < 32 ? count - done : 32), block);
          }
        }
      });
    }
  }
}

template <Then THEN, typename T, typename W>
void of_tiles(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* tiles, const W* w, const T* bias,
              const T* residual, T* y, Layout layout) {
  multiply_tiled(team, rows, outputs, inputs, tiles, w, in_tiles(inputs, rows),
                 [&](const float* sums, int64_t row, int count, int64_t block) {
                   finish<THEN>(sums, row, count, block, outputs, bias, residual, y, layout);
                 });
}

// How a product of few rows reads them, and how one of many does.
template <typename T>
Layout few_rows(int64_t width, int64_t rows) {
  return READS_LINES<T> ? in_lines(width) : in_tiles(width, rows);
}

// x W^T of few rows as `few_rows` lays them. In lines, which all threads of a parallel region share, there is to be room
// for whole groups of 32 rows.
template <Then THEN, typename T>
void of_few(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* x, const T* w, const T* bias,
            const T* residual, T* y, Layout layout) {
#ifdef BACKEND_AMX
  if constexpr (READS_LINES<T>)
    return multiply_outputs(rows, outputs, inputs, x, inputs, x + rows / 32 * 32 * inputs, w,
                            [&](const float* sums, int64_t row, int count, int64_t block) {
                              finish<THEN>(sums, row, count, block, outputs, bias, residual, y, layout);
                            });
#endif
  of_tiles<THEN>(team, rows, outputs, inputs, x, w, bias, residual, y, layout);
}

}  // namespace cpu
