// Decoder layers for one new column per row, in one parallel region: norm, query/key/value, attention over the cache,
// output, norm, feed-forward. As calls of their own these are seven per layer, each with its entry from Python and its
// fork and join of threads; where the layers are small that is most of a step.
//
// The threads share a layer's products by outputs, so that each weight is read once, and wait for each other between any
// two of these. Many rows are shared instead (`OWN_ROWS`): then a thread takes its own through all layers, waits for
// nobody, and finds what it reads in its own core's caches.

#include "layer.h"

#include <algorithm>
#include <chrono>
#include <omp.h>
#include <vector>

namespace {

using namespace cpu;

// Rows per thread from which on each has its own. Fewer would make memory, where each thread reads all weights, the limit.
#ifdef BACKEND_AMX
constexpr int64_t OWN_ROWS = int64_t(1) << 40;  // there products are too fast for that
#else
constexpr int64_t OWN_ROWS = 32;
#endif

enum Stage { NORMS, QKV, ATTENTION, OUT, FEED, NUM_STAGES };

// How `p` reads its rows.
template <typename T>
Layout layout_for(const Product& p, int64_t rows) {
  return p.scales ? in_lines(p.inputs) : few_rows<T>(p.inputs, rows);
}

// A thread's rows of a norm, if there is one, and as whole numbers where the product that follows takes these.
template <typename T>
void normalise(Team team, int64_t rows, const Product& next, const Norm* norm, float epsilon, const T* x, T* y,
               WholeRows whole) {
  const Layout layout = layout_for<T>(next, rows);
  team.each(rows, [&](int64_t row) {
    prepare_row(next.inputs, norm, epsilon, x + row * next.inputs, y + layout.at(row, 0), layout.block);
    if (next.scales) to_int8(row, next, y + layout.at(row, 0), whole);
  });
}

// A thread's rows of the norm behind a residual, in place, once all of them are there.
template <typename T>
void settle(Team team, int64_t rows, int64_t width, const Norm& norm, float epsilon, T* h) {
  team.wait();
  team.each(rows, [&](int64_t row) { normalise_row(width, norm, epsilon, h + row * width, h + row * width, 32); });
}

// Rows of x as whole numbers, for a product with `p` that takes these.
template <typename T>
void prepare(Team team, int64_t rows, const Product& p, const T* x, WholeRows whole) {
  if (!p.scales) return;
  team.each(rows, [&](int64_t row) { to_int8(row, p, x + row * p.inputs, whole); });
  team.wait();
}

template <Then THEN, typename T>
void multiply(Team team, int64_t rows, const Product& p, const T* x, WholeRows whole, const T* residual, T* y,
              Layout layout) {
  of_product<THEN>(team, true, rows, p, x, whole, residual, y, layout);
}

// What the threads of a team share: rows that a product reads, rows that it makes, and rows as whole numbers.
template <typename T>
struct Room {
  T *narrow, *wide;
  WholeRows whole;

  Room(const Block* const* blocks, int64_t count, int64_t rows) {
    const int64_t filled = (rows + 31) / 32 * 32;  // a tile reads 32 rows
    int64_t narrowest = 0, widest = 0, deepest = 0;
    bool is_whole = false;
    for (int64_t i = 0; i < count; ++i) {
      const Block& block = *blocks[i];
      narrowest = std::max({narrowest, block.width(), block.heads.width()});
      widest = std::max({widest, block.qkv.outputs, block.inner()});
      deepest = std::max({deepest, narrowest, block.inner()});
      is_whole = is_whole || block.qkv.scales;
    }
    thread_local Buffer<T> kept;
    thread_local Buffer<uint8_t> bytes_kept;
    thread_local Buffer<float> scales_kept;
    narrow = kept.room(filled * (narrowest + widest)), wide = narrow + filled * narrowest;
    whole = {is_whole ? bytes_kept.room(filled * ((deepest + 63) / 64) * 128) : nullptr, scales_kept.room(rows),
             apart_of(rows)};
  }
};

// Where the time of a step goes, by stage, as the first thread has it; nowhere where nobody asks.
class Clock {
 public:
  Clock(Team team, double* seconds) : team_(team), seconds_(omp_get_thread_num() ? nullptr : seconds), begun_(now()) {}

  void end(Stage stage) {  // for all threads of a team
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

// Whether several rows have one of the `places`.
bool meet(const int64_t* places, int64_t rows) {
  if (!places || !rows) return false;
  std::vector<bool> is_taken(*std::max_element(places, places + rows) + 1);
  for (int64_t row = 0; row < rows; ++row) {
    if (is_taken[places[row]]) return true;
    is_taken[places[row]] = true;
  }
  return false;
}

// A layer, by all threads of a team. `meets`: several rows have one place.
template <typename T>
void run_layer(Team team, const Block* block, int64_t rows, T* h, int attends, int feeds, T* k, T* v, int64_t capacity,
               const int64_t* first, const int64_t* last, const int64_t* places, bool meets, const Shared* shared,
               const Room<T>& room, Clock& clock) {
  const Heads& heads = block->heads;
  const int64_t width = block->width(), attended = heads.width(), made = block->qkv.outputs;
  const bool is_pre = block->is_pre_norm;
  const float epsilon = block->epsilon();
  T *narrow = room.narrow, *wide = room.wide;
  const WholeRows whole = room.whole;
  if (attends) {
    normalise(team, rows, block->qkv, is_pre ? &block->attn_norm : nullptr, epsilon, h, narrow, whole);
    clock.end(NORMS);
    multiply<NOTHING>(team, rows, block->qkv, narrow, whole, static_cast<const T*>(nullptr), wide, in_lines(made));
    clock.end(QKV);
    const T* new_k = made > attended ? wide + attended : nullptr;  // not where they are in the cache (SwiftKV)
    const T* new_v = new_k ? new_k + heads.kv_width() : nullptr;
    if (meets && new_k) {
      store_all(heads, rows, new_k, new_v, made, k, v, capacity, first, last, places, shared);
      new_k = nullptr;
    }
    const int64_t dim = heads.dim;
    const Layout layout = layout_for<T>(block->out, rows);
    attend_of<T>(team, heads, rows, wide, new_k, new_v, made, k, v, capacity, first, last, places,
                 meets || shared, shared, [=](int64_t row, int64_t head, const T* from) {
                   for (int64_t d = 0, n; d < dim; d += n) {  // up to the end of a block of 32
                     const int64_t column = head * dim + d;
                     n = 32 - column % 32 < dim - d ? 32 - column % 32 : dim - d;
                     std::memcpy(narrow + layout.at(row, column / 32) + column % 32, from + d, n * sizeof(T));
                   }
                 });
    clock.end(ATTENTION);
    prepare(team, rows, block->out, narrow, whole);
    multiply<ADD>(team, rows, block->out, narrow, whole, static_cast<const T*>(h), h, in_lines(width));
    if (!is_pre) settle(team, rows, width, block->attn_norm, epsilon, h);
    clock.end(OUT);
  }
  if (feeds) {
    normalise(team, rows, block->fc1, is_pre ? &block->ffn_norm : nullptr, epsilon, h, narrow, whole);
    clock.end(NORMS);
    const auto feed = block->is_gated ? multiply<SWIGLU, T> : multiply<RELU, T>;
    feed(team, rows, block->fc1, narrow, whole, static_cast<const T*>(nullptr), wide, layout_for<T>(block->fc2, rows));
    team.wait();
    prepare(team, rows, block->fc2, wide, whole);
    multiply<ADD>(team, rows, block->fc2, wide, whole, static_cast<const T*>(h), h, in_lines(width));
    if (!is_pre) settle(team, rows, width, block->ffn_norm, epsilon, h);
    clock.end(FEED);
  }
}

template <typename T>
void run_step(const Block* const* blocks, int64_t count, int64_t rows, T* h, int attends, int feeds, T* const* k,
              T* const* v, const int64_t* capacities, const int64_t* const* first, const int64_t* const* last,
              const int64_t* places, const Shared* shared, double* seconds, int num_threads) {
  // rows of one place, or with columns that several read, stay together
  const bool meets = meet(places, rows);
  const int64_t most = ROWS * num_threads, least = OWN_ROWS * num_threads;
  const bool is_apart = num_threads > 1 && rows >= least && rows <= most && !meets && !shared;
  const Room<T> together(blocks, is_apart ? 0 : count, rows);
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    const Team team{is_apart};
    const int64_t thread = is_apart ? omp_get_thread_num() : 0, threads = is_apart ? omp_get_num_threads() : 1;
    const int64_t from = rows * thread / threads, own = rows * (thread + 1) / threads - from;
    const Room<T> room = is_apart ? Room<T>(blocks, count, own) : together;
    Clock clock(team, seconds);
    for (int64_t i = 0; i < count; ++i) {
      const Heads& heads = blocks[i]->heads;
      const int64_t before = places ? 0 : from * heads.groups * heads.dim * capacities[i];
      run_layer<T>(team, blocks[i], own, h + from * blocks[i]->width(), attends, feeds, k[i] + before, v[i] + before,
                   capacities[i], first[i] + from, last[i] + from, places ? places + from : nullptr, meets,
                   shared ? shared + i : nullptr, room, clock);
    }
  }
}

}  // namespace

// `count` layers, one behind the other: h [rows, width], in place. k, v, capacities, first, last: of each layer; k and v are
// its cache [rows, groups, capacity, dim]. `places` [rows] or null: of all layers, as in attention.h. `shared` [count]: what
// is before the cache; null: nothing. `seconds` by stage are added to, where asked for.
#define EXPORT(NAME, T)                                                                                                  \
  extern "C" void step_##NAME(const Block* const* blocks, int64_t count, int64_t rows, T* h, int attends, int feeds,    \
                              T* const* k, T* const* v, const int64_t* capacities, const int64_t* const* first,         \
                              const int64_t* const* last, const int64_t* places, const Shared* shared, double* seconds, \
                              int num_threads) {                                                                        \
    run_step<T>(blocks, count, rows, h, attends, feeds, k, v, capacities, first, last, places, shared, seconds,         \
                num_threads);                                                                                           \
  }
FOR_EACH_TYPE(EXPORT)
