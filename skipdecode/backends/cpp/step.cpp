// One decoder layer for one new column per row, in one parallel region: norm, query/key/value, attention over the cache,
// output, norm, feed-forward. As calls of their own these are seven, each with its entry from Python and its fork and
// join of threads; where the layers are small that is most of a step.

#include "layer.h"

#ifdef HAS_TILES

#include <chrono>

namespace {

using namespace cpu;

enum Stage { NORMS, QKV, ATTENTION, OUT, FEED, NUM_STAGES };

// A thread's rows of a layer norm.
void normalise(int64_t rows, int64_t width, const Norm& norm, float epsilon, const bfloat16* x, bfloat16* y) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) normalise_row(width, norm, epsilon, x + row * width, y + row * width, 32);
}

// Rows of x for a product with `p`, each by the thread that `omp for` gives it.
void prepare(int64_t rows, const Product& p, const uint16_t* x, WholeRows whole) {
  if (!p.scales) return;
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < rows; ++row) to_whole(row, p.inputs, x + row * p.inputs, whole);
}

// x, or `whole` where the weight is int8.
template <Then THEN>
void multiply_rows(int64_t rows, const Product& p, const uint16_t* x, WholeRows whole, const uint16_t* residual,
                   uint16_t* y) {
  if (p.scales)
    of_whole<THEN>({false}, rows, whole, p.int8(), residual, y, in_lines(p.outputs));
  else
    by_outputs<THEN>(rows, p.outputs, p.inputs, x, p.inputs, x + rows / 32 * 32 * p.inputs,
                     static_cast<const uint16_t*>(p.weight), p.bias, residual, y);
}

}  // namespace

// h [rows, width], in place. k, v: the cache of the layer [rows, heads, capacity, width / heads]. `seconds` by stage are
// added to, where asked for.
extern "C" void block_tiles(const Block* block, int64_t rows, uint16_t* h, int attends, int feeds, uint16_t* k,
                            uint16_t* v, int64_t capacity, const int64_t* first, const int64_t* last, double* seconds,
                            int num_threads) {
  const int64_t width = block->qkv.inputs, room = (rows + 31) / 32 * 32;  // a tile reads 32 rows
  const int64_t widest = 3 * width > block->fc1.outputs ? 3 * width : block->fc1.outputs;
  const int64_t deepest = width > block->fc2.inputs ? width : block->fc2.inputs;
  thread_local Buffer<uint16_t> kept;
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  uint16_t *narrow = kept.room(room * (width + widest)), *wide = narrow + room * width;
  const WholeRows whole = {block->qkv.scales ? tiles_kept.room(room * ((deepest + 63) / 64) * 128) : nullptr,
                           scales_kept.room(rows)};
  bfloat16 *states = reinterpret_cast<bfloat16*>(h), *normed = reinterpret_cast<bfloat16*>(narrow);
#pragma omp parallel num_threads(num_threads)
  {
    configure_tiles();
    auto begun = std::chrono::steady_clock::now();
    auto end = [&](Stage stage) {
#pragma omp barrier
      if (seconds) {
#pragma omp master
        {
          const auto now = std::chrono::steady_clock::now();
          seconds[stage] += std::chrono::duration<double>(now - begun).count();
          begun = now;
        }
      }
    };
    if (attends) {
      normalise(rows, width, block->attn_norm, float(block->epsilon), states, normed);
      prepare(rows, block->qkv, narrow, whole);  // the rows that this thread has made
      end(NORMS);
      multiply_rows<NOTHING>(rows, block->qkv, narrow, whole, nullptr, wide);
      end(QKV);
      const int64_t made = block->qkv.outputs;  // queries alone where keys and values are in the cache (SwiftKV)
      const bfloat16 *q = reinterpret_cast<bfloat16*>(wide), *new_k = made > width ? q + width : nullptr;
      attend_of<bfloat16>(width / block->heads, rows, block->heads, q, new_k, new_k ? new_k + width : nullptr, made,
                          reinterpret_cast<bfloat16*>(k), reinterpret_cast<bfloat16*>(v), capacity, first, last, normed);
      end(ATTENTION);
      if (block->out.scales) {
        prepare(rows, block->out, narrow, whole);
#pragma omp barrier
      }
      multiply_rows<ADD>(rows, block->out, narrow, whole, h, h);
      end(OUT);
    }
    if (feeds) {
      normalise(rows, width, block->ffn_norm, float(block->epsilon), states, normed);
      prepare(rows, block->fc1, narrow, whole);
      end(NORMS);
      multiply_rows<RELU>(rows, block->fc1, narrow, whole, nullptr, wide);
#pragma omp barrier
      if (block->fc2.scales) {
        prepare(rows, block->fc2, wide, whole);
#pragma omp barrier
      }
      multiply_rows<ADD>(rows, block->fc2, wide, whole, h, h);
      end(FEED);
    }
    _tile_release();
  }
}

#endif
