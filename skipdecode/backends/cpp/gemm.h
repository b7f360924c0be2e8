// Products with packed weights, fused with a bias and an activation or a residual; for the .cpp files.
//
// Decoding multiplies few rows by weights that come from memory, so the weights are stored in the order in which they are
// read, one stream per thread, and are prefetched. A row's sums run over k in the same order whatever the number of rows,
// so the result is batch invariant. With many rows the weights are read again and again: see `multiply_tiled`.
//
// Packed weights: for each 32 outputs, for each 32 inputs, two tiles of 16 outputs. A tile has one line of 64 bytes for
// each input (float32) or each pair of inputs (bfloat16). T is the type of rows and weights.

#pragma once

#include "buffer.h"
#include "micro.h"
#include "threads.h"

namespace cpu {

constexpr int64_t BLOCK = 1024;           // elements in the weights of 32 outputs and 32 inputs
#ifdef BACKEND_AMX
constexpr int64_t ROWS_BYTES = 3 << 19;   // of x at a time: they stay in the L2 cache with the weights of 32 outputs
#else
constexpr int64_t ROWS_BYTES = 1 << 19;
#endif
constexpr int64_t MANY = 256;             // from this many rows per thread on, it pays that each thread reads all weights
constexpr int64_t ROWS = 256, INPUTS = 2048;  // per thread: 1 MiB of rows in bfloat16; half the inputs if rows are widened
#ifdef HAS_PAIRED
constexpr int64_t DEEP_BYTES = 8192;      // of weights at a time, which stay in the L1 cache
#else
constexpr int64_t DEEP_BYTES = 16384;
#endif
constexpr int64_t NEAR = 8192;            // prefetch distance in bytes where few rows stay in registers (AVX-512)

// What follows a product. SWIGLU and GEGLU: of each 32 outputs the first 16 are gates and the last 16 the values they
// gate; the result is 16 elements, silu(gate) * value or gelu(gate) * value.
enum Epilogue { NOTHING, RELU, ADD, SWIGLU, GEGLU };
constexpr bool is_gated(Epilogue then) { return then == SWIGLU || then == GEGLU; }

// The width of a product's result.
constexpr int64_t made_of(Epilogue then, int64_t outputs) { return is_gated(then) ? outputs / 2 : outputs; }

// How rows are laid out: groups of 32 rows, elements in blocks of 32. Strides of groups, blocks and rows, in elements.
struct Layout {
  int64_t group, block, row;

  int64_t at(int64_t row_, int64_t block_) const { return row_ / 32 * group + block_ * block + row_ % 32 * row; }
};

inline Layout in_lines(int64_t width) { return {32 * width, 32, width}; }  // row-major
// As `multiply_tiles` reads them: 32 elements of each row of a group, then the next 32. Groups of fewer rows are laid out
// more densely, so that they do not compete for the same cache sets; AMX always reads 32 rows.
inline Layout in_tiles(int64_t width, int64_t rows) {
#ifdef BACKEND_AMX
  rows = 32;
#endif
  return {32 * width, rows < 32 ? 32 * rows : BLOCK, 32};
}

// Splits rows into chunks of whole groups of 32, as evenly as possible: at most `most` rows each, and a multiple of
// `threads` chunks, so that every thread gets equally many.
struct Cut {
  int64_t rows, groups, chunks;

  Cut(int64_t rows_, int64_t most, int64_t threads)
      : rows(rows_), groups((rows + 31) / 32), chunks((rows + most * threads - 1) / (most * threads) * threads) {}

  int64_t begin(int64_t chunk) const { return groups * chunk / chunks * 32; }
  int64_t end(int64_t chunk) const { return begin(chunk + 1) < rows ? begin(chunk + 1) : rows; }
  int64_t of(int64_t row) const { return ((row / 32 + 1) * chunks - 1) / groups; }
  int64_t largest() const { return (groups + chunks - 1) / chunks * 32; }
};

// Adds the bias, applies the activation or residual and rounds: the sums of `count` rows of one group, from `row` on, and
// 32 outputs.
template <Epilogue EPILOGUE, typename T>
inline void finish(const float* sums, int64_t row, int count, int64_t block, int64_t outputs, const T* bias,
                   const T* residual, T* y, Layout layout) {
  const int64_t from = 32 * block, at = layout.at(row, block), left = outputs - from;
  const Floats biases[2] = {bias ? load_first(bias + from, left) : all(0.0f),
                            bias ? load_first(bias + from + 16, left - 16) : all(0.0f)};
  if (is_gated(EPILOGUE)) {
    const int64_t to = layout.at(row, block / 2) + block % 2 * 16;
    for (int r = 0; r < count; ++r) {
      const Floats gate = load16(sums + 32 * r) + biases[0], other = load16(sums + 32 * r + 16) + biases[1];
      store_first(y + to + r * layout.row, (EPILOGUE == GEGLU ? gelu(gate) : silu(gate)) * other, 16);
    }
    return;
  }
  for (int r = 0; r < count; ++r)
    for (int half = 0; half < 2; ++half) {
      const int64_t to = at + r * layout.row + 16 * half;
      Floats sum = load16(sums + 32 * r + 16 * half) + biases[half];
      if (EPILOGUE == RELU) sum = max(all(0.0f), sum);  // in this order NaN stays NaN
      if (EPILOGUE == ADD) sum = sum + load_first(residual + to, left - 16 * half);
      store_first(y + to, sum, left - 16 * half);
    }
}

// Copies `rows` rows of x into the `in_tiles` layout, padded with zeros to a multiple of 32 rows where the layout has
// space for them.
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

// x W^T, split by outputs, so that each weight is read by one thread. Called by all threads of a parallel region, each of
// which has a `Unit`; there is no barrier at the end. x: `stride` elements between rows. `last`: the last rows % 32 rows,
// `inputs` elements apart, with space for 32, since a tile reads whole groups. `finish(sums, first row, rows, block of
// outputs)` is called with the sums of some rows and 32 outputs.
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

// The running maximum of each row, rounded to T, in 32 lanes: output 32 * block + lane. The first of equal ones wins,
// since a thread's blocks are in rising order.
struct alignas(64) Largest {
  float values[32];
  int32_t blocks[32];
};

// `allowed`: for each row a bit for each output of the block, `words` apart; null: all are allowed.
template <typename T>
inline void update_largest(const float* sums, int count, int64_t block, int64_t outputs, const uint32_t* allowed,
                           int64_t words, Largest* rows) {
  const int64_t left = outputs - 32 * block;
  const uint32_t real = left < 32 ? (1u << left) - 1 : ~0u;
  for (int r = 0; r < count; ++r) {
    const uint32_t lanes = allowed ? real & allowed[r * words] : real;
    if (lanes == 0) continue;
    for (int half = 0; half < 32; half += 16)
      keep_larger(rounded(load16(sums + 32 * r + half), T{}), lanes >> half, int32_t(block), rows[r].values + half,
                  rows[r].blocks + half);
  }
}

// Prefetches rows that other threads may have written; otherwise the product would wait for one line after another.
template <typename T>
inline void fetch_rows(const T* x, int64_t count) {
  const char *at = reinterpret_cast<const char*>(x), *end = reinterpret_cast<const char*>(x + count);
  for (; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
}

// Rows in the type that a product reads. If that differs from T, the blocks from `first` to `end` are widened into memory
// of the thread, as a single group: the more rows share a line of weights, the less often it is widened.
template <typename T, typename R>
struct Read {
  const R* x;
  Layout layout;
  int64_t group;  // rows per group

  Read(const T* tiles, int64_t rows, int64_t first, int64_t end, Layout from) {
    if constexpr (!std::is_same<R, T>::value) {
      thread_local Buffer<R> buffer;
      R* wide = buffer.reserve(rows * end * 32);
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

// x W^T for rows in tiles. A thread with rows of its own, at most ROWS, processes INPUTS inputs of all its rows at a
// time, which stay in its core's L2 cache. Threads that share rows split the outputs, and take as many rows at a time as
// stay in that cache whole. DEEP_BYTES of a block's weights at a time stay in the L1 cache while the rows pass.
template <typename T, typename Finish>
void multiply_tiled(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* tiles, const T* w, Layout from_,
                    Finish finish) {
  using R = Row<T>;
  constexpr int64_t LINES = BLOCK * sizeof(T) / 64, DEEP = DEEP_BYTES / (64 * LINES);
  const int64_t steps = inputs / 32, blocks = (outputs + 31) / 32, fit = ROWS_BYTES / (32 * sizeof(R) * inputs);
  const int64_t at_once = team.is_alone ? INPUTS * sizeof(T) / sizeof(R) / 32 : steps, all_groups = (rows + 31) / 32;
  const int64_t some = team.is_alone || fit > all_groups ? all_groups : fit < 1 ? 1 : fit;
  const bool is_whole = steps <= at_once;
#ifdef BACKEND_AVX512
  const bool are_few = rows <= AT_ONCE;
#else
  const bool are_few = false;  // AMX takes 32 rows anyway; AVX2 takes half of the outputs, so weights would be read twice
#endif
  thread_local Buffer<float> buffer;
  float* sums = buffer.reserve((is_whole ? 1 : blocks) * some * 1024);
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
          const T* weights = w + (block * steps + k) * BLOCK;
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

template <Epilogue EPILOGUE, typename T>
void of_tiles(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* tiles, const T* w, const T* bias,
              const T* residual, T* y, Layout layout) {
  multiply_tiled(team, rows, outputs, inputs, tiles, w, in_tiles(inputs, rows),
                 [&](const float* sums, int64_t row, int count, int64_t block) {
                   finish<EPILOGUE>(sums, row, count, block, outputs, bias, residual, y, layout);
                 });
}

// The layout in which a product of few rows reads them.
template <typename T>
Layout few_rows(int64_t width, int64_t rows) {
  return READS_LINES<T> ? in_lines(width) : in_tiles(width, rows);
}

// x W^T of few rows in the layout `few_rows`. Where that is row-major, all threads of a parallel region share the rows,
// and x has space for whole groups of 32.
template <Epilogue EPILOGUE, typename T>
void of_few(Team team, int64_t rows, int64_t outputs, int64_t inputs, const T* x, const T* w, const T* bias,
            const T* residual, T* y, Layout layout) {
#ifdef BACKEND_AMX
  if constexpr (READS_LINES<T>)
    return multiply_outputs(rows, outputs, inputs, x, inputs, x + rows / 32 * 32 * inputs, w,
                            [&](const float* sums, int64_t row, int count, int64_t block) {
                              finish<EPILOGUE>(sums, row, count, block, outputs, bias, residual, y, layout);
                            });
#endif
  of_tiles<EPILOGUE>(team, rows, outputs, inputs, x, w, bias, residual, y, layout);
}

}  // namespace cpu
