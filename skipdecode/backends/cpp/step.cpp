// Decoder layers for one new column per row, in one parallel region: norm, query/key/value, attention over the cache,
// output, norm, feed-forward. As separate operators they would be seven calls per layer, each with its entry from Python
// and its fork and join of threads, which is most of a step if layers are small.
//
// The threads split a layer's products by outputs, so that each weight is read once, with a barrier between any two
// products. Many rows are split instead (`OWN_ROWS`): then a thread takes its own rows through all layers, waits for no
// other, and finds what it reads in its own core's caches.

#include "layer.h"

#include <algorithm>
#include <chrono>
#include <omp.h>
#include <vector>

namespace {

using namespace cpu;

// From this many rows per thread on, each thread has its own rows. With fewer, memory would be the limit, as every thread
// reads all weights.
#ifdef BACKEND_AMX
constexpr int64_t OWN_ROWS = int64_t(1) << 40;  // products are too fast for that
#else
constexpr int64_t OWN_ROWS = 32;
#endif

enum Stage { NORMS, QKV, ATTENTION, OUT, FEED, NUM_STAGES };

// The layout in which `p` reads its rows.
template <typename T>
Layout layout_for(const Product& p, int64_t rows) {
  return p.is_quantized() ? in_lines(p.inputs) : few_rows<T>(p.inputs, rows);
}

// Each thread normalises its rows, if there is a norm, and quantises them if the weights that follow are.
template <typename T>
void normalise(Team team, int64_t rows, const Product& next, const Norm* norm, float epsilon, const T* x, T* y,
               QuantizedRows quantized) {
  const Layout layout = layout_for<T>(next, rows);
  team.each(rows, [&](int64_t row) {
    prepare_row(next.inputs, norm, epsilon, x + row * next.inputs, y + layout.at(row, 0), layout.block);
    if (next.is_quantized()) quantize_for(row, next, y + layout.at(row, 0), quantized);
  });
}

// The norm after a residual, in place, once all threads have written their part; each normalises its rows.
template <typename T>
void post_norm(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* h) {
  team.wait();
  team.each(rows, [&](int64_t row) { normalise_row(width, norm, epsilon, h + row * width, h + row * width, 32); });
}

// Adds the norm of x, the output of a sublayer, to h, once all threads have written their part of x.
template <typename T>
void add_normed(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* x, T* h) {
  team.wait();
  team.each(rows, [&](int64_t row) { add_normed_row(width, norm, epsilon, x + row * width, h + row * width); });
}

// Quantises rows of x if `p` has quantised weights.
template <typename T>
void prepare(Team team, int64_t rows, const Product& p, const T* x, QuantizedRows quantized) {
  if (!p.is_quantized()) return;
  team.each(rows, [&](int64_t row) { quantize_for(row, p, x + row * p.inputs, quantized); });
  team.wait();
}

template <Epilogue EPILOGUE, typename T>
void multiply(Team team, int64_t rows, const Product& p, const T* x, QuantizedRows quantized, const T* residual, T* y,
              Layout layout) {
  of_product<EPILOGUE>(team, true, rows, p, x, quantized, residual, y, layout);
}

// Scratch memory that the threads of a team share: rows that a product reads, rows that it writes, and quantised rows.
template <typename T>
struct Scratch {
  T *narrow, *wide;
  QuantizedRows quantized;

  Scratch(const Block* const* blocks, int64_t count, int64_t rows) {
    const int64_t filled = (rows + 31) / 32 * 32;  // a tile reads 32 rows
    int64_t narrowest = 0, widest = 0, deepest = 0;
    bool is_whole = false;
    for (int64_t i = 0; i < count; ++i) {
      const Block& block = *blocks[i];
      narrowest = std::max({narrowest, block.width(), block.heads.width()});
      widest = std::max({widest, block.qkv.outputs, block.inner(), block.width()});
      deepest = std::max({deepest, narrowest, block.inner()});
      is_whole = is_whole || block.qkv.is_quantized();
    }
    thread_local Buffer<T> buffer;
    thread_local Buffer<uint8_t> bytes_buffer;
    thread_local Buffer<float> scales_buffer;
    narrow = buffer.reserve(filled * (narrowest + widest)), wide = narrow + filled * narrowest;
    quantized = quantized_rows(is_whole ? bytes_buffer.reserve(filled * ((deepest + 63) / 64) * 128) : nullptr,
                               scales_buffer.reserve(rows), rows);
  }
};

// The time of a step by stage, as measured by the first thread; none if `seconds` is null.
class Clock {
 public:
  Clock(Team team, double* seconds) : team_(team), seconds_(omp_get_thread_num() ? nullptr : seconds), begun_(now()) {}

  void end(Stage stage) {  // called by all threads of a team
    team_.wait();
    if (!seconds_) return;
    const auto time = now();
    seconds_[stage] += std::chrono::duration<double>(time - begun_).count();
    begun_ = time;
  }

 private:
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

  Team team_;
  double* seconds_;
  std::chrono::steady_clock::time_point begun_;
};

// True if several rows have the same slot.
bool has_shared_slots(const int64_t* slots, int64_t rows) {
  if (!slots || !rows) return false;
  std::vector<bool> is_taken(*std::max_element(slots, slots + rows) + 1);
  for (int64_t row = 0; row < rows; ++row) {
    if (is_taken[slots[row]]) return true;
    is_taken[slots[row]] = true;
  }
  return false;
}

// Runs a layer by all threads of a team.
template <typename T>
void run_layer(Team team, const Block* block, int64_t rows, T* h, int attends, int runs_ffn, T* k, T* v,
               int64_t capacity, const int64_t* first, const int64_t* last, const int64_t* slots, bool shares_slots,
               const Shared* shared, const Scratch<T>& scratch, Clock& clock) {
  const Heads& heads = block->heads;
  const int64_t width = block->width(), attended = heads.width(), made = block->qkv.outputs;
  const bool is_pre = block->is_pre_norm;
  const float epsilon = block->epsilon();
  T *narrow = scratch.narrow, *wide = scratch.wide;
  const QuantizedRows quantized = scratch.quantized;
  if (attends) {
    normalise(team, rows, block->qkv, is_pre ? &block->attn_norm : nullptr, epsilon, h, narrow, quantized);
    clock.end(NORMS);
    multiply<NOTHING>(team, rows, block->qkv, narrow, quantized, static_cast<const T*>(nullptr), wide, in_lines(made));
    clock.end(QKV);
    const T* new_k = made > attended ? wide + attended : nullptr;  // null if they are in the cache already (SwiftKV)
    const T* new_v = new_k ? new_k + heads.kv_width() : nullptr;
    if (shares_slots && new_k) {
      store_all(heads, rows, new_k, new_v, made, k, v, capacity, first, last, slots, shared);
      new_k = nullptr;
    }
    const int64_t dim = heads.dim;
    const Layout layout = layout_for<T>(block->out, rows);
    attend_of<T>(team, heads, rows, wide, new_k, new_v, made, k, v, capacity, first, last, slots,
                 shares_slots || shared, shared, [=](int64_t row, int64_t head, const T* from) {
                   for (int64_t d = 0, n; d < dim; d += n) {  // up to the end of a block of 32
                     const int64_t column = head * dim + d;
                     n = 32 - column % 32 < dim - d ? 32 - column % 32 : dim - d;
                     std::memcpy(narrow + layout.at(row, column / 32) + column % 32, from + d, n * sizeof(T));
                   }
                 });
    clock.end(ATTENTION);
    prepare(team, rows, block->out, narrow, quantized);
    if (block->has_sublayer_norms) {
      multiply<NOTHING>(team, rows, block->out, narrow, quantized, static_cast<const T*>(nullptr), wide, in_lines(width));
      add_normed(team, rows, width, block->attn_out_norm, epsilon, wide, h);
    } else {
      multiply<ADD>(team, rows, block->out, narrow, quantized, static_cast<const T*>(h), h, in_lines(width));
    }
    if (!is_pre) post_norm(team, rows, width, block->attn_norm, epsilon, h);
    clock.end(OUT);
  }
  if (runs_ffn) {
    normalise(team, rows, block->fc1, is_pre ? &block->ffn_norm : nullptr, epsilon, h, narrow, quantized);
    clock.end(NORMS);
    const auto feed = block->activation == SWIGLU  ? multiply<SWIGLU, T>
                      : block->activation == GEGLU ? multiply<GEGLU, T>
                                                   : multiply<RELU, T>;
    feed(team, rows, block->fc1, narrow, quantized, static_cast<const T*>(nullptr), wide, layout_for<T>(block->fc2, rows));
    team.wait();
    prepare(team, rows, block->fc2, wide, quantized);
    if (block->has_sublayer_norms) {
      multiply<NOTHING>(team, rows, block->fc2, wide, quantized, static_cast<const T*>(nullptr), narrow, in_lines(width));
      add_normed(team, rows, width, block->ffn_out_norm, epsilon, narrow, h);
    } else {
      multiply<ADD>(team, rows, block->fc2, wide, quantized, static_cast<const T*>(h), h, in_lines(width));
    }
    if (!is_pre) post_norm(team, rows, width, block->ffn_norm, epsilon, h);
    clock.end(FEED);
  }
}

template <typename T>
void run_step(const Block* const* blocks, int64_t count, int64_t rows, T* h, int attends, int runs_ffn, T* const* k,
              T* const* v, const int64_t* capacities, const int64_t* const* first, const int64_t* const* last,
              const int64_t* slots, const Shared* shared, double* seconds, int num_threads) {
  // rows that share a slot or read a shared prefix are not split among threads
  const bool shares_slots = has_shared_slots(slots, rows);
  const int64_t most = ROWS * num_threads, least = OWN_ROWS * num_threads;
  const bool is_split = num_threads > 1 && rows >= least && rows <= most && !shares_slots && !shared;
  const Scratch<T> together(blocks, is_split ? 0 : count, rows);
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    const Team team{is_split};
    const int64_t thread = is_split ? omp_get_thread_num() : 0, threads = is_split ? omp_get_num_threads() : 1;
    const int64_t from = rows * thread / threads, own = rows * (thread + 1) / threads - from;
    const Scratch<T> scratch = is_split ? Scratch<T>(blocks, count, own) : together;
    Clock clock(team, seconds);
    for (int64_t i = 0; i < count; ++i) {
      const Heads& heads = blocks[i]->heads;
      const int64_t before = slots ? 0 : from * heads.groups * heads.dim * capacities[i];
      run_layer<T>(team, blocks[i], own, h + from * blocks[i]->width(), attends, runs_ffn, k[i] + before, v[i] + before,
                   capacities[i], first[i] + from, last[i] + from, slots ? slots + from : nullptr, shares_slots,
                   shared ? shared + i : nullptr, scratch, clock);
    }
  }
}

}  // namespace

// Runs `count` layers in order on h [rows, width], in place. k, v, capacities, first, last: of each layer; k and v are
// its cache [rows, groups, capacity, dim]. `slots` [rows] or null: of all layers, as in attention.h. `shared` [count]:
// the prefixes in front of the cache; null: none. The time of each stage is added to `seconds`, unless that is null.
#define EXPORT(NAME, T)                                                                                                 \
  extern "C" void step_##NAME(const Block* const* blocks, int64_t count, int64_t rows, T* h, int attends, int runs_ffn, \
                              T* const* k, T* const* v, const int64_t* capacities, const int64_t* const* first,         \
                              const int64_t* const* last, const int64_t* slots, const Shared* shared, double* seconds,  \
                              int num_threads) {                                                                        \
    run_step<T>(blocks, count, rows, h, attends, runs_ffn, k, v, capacities, first, last, slots, shared, seconds,       \
                num_threads);                                                                                           \
  }
FOR_EACH_TYPE(EXPORT)
