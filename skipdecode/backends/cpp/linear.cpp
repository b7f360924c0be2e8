// A linear layer in bfloat16 on a CPU's matrix tiles, its weights, bfloat16 or int8, packed for them; and its largest output.

#include "int8.h"
#include "tiles.h"

#ifdef HAS_TILES

#include <cfloat>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

using namespace cpu;

template <Then THEN>
void linear(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride, const uint16_t* w,
            const uint16_t* bias, const uint16_t* residual, uint16_t* y, int num_threads) {
  const bool is_many = rows >= MANY * num_threads;
  const int64_t left = is_many ? 0 : rows % 32;
  std::vector<uint16_t> last(left ? 32 * inputs : 0);
  for (int64_t r = 0; r < left; ++r) std::memcpy(&last[r * inputs], x + (rows - left + r) * stride, inputs * 2);
#pragma omp parallel num_threads(num_threads)
  {
    configure_tiles();
    if (is_many) {
      thread_local Buffer<uint16_t> kept;
      uint16_t* tiles = kept.room(ROWS * inputs);
      const Cut cut(rows, ROWS, num_threads);
#pragma omp for schedule(dynamic) nowait
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t from = cut.begin(chunk), count = cut.end(chunk) - from;
        to_tiles(count, inputs / 32, x + from * stride, stride, tiles);
        of_tiles<THEN>({true}, count, outputs, inputs, tiles, w, bias, residual ? residual + from * outputs : nullptr,
                       y + from * outputs, in_lines(outputs));
      }
    } else
      by_outputs<THEN>(rows, outputs, inputs, x, stride, last.data(), w, bias, residual, y);
    _tile_release();
  }
}

constexpr int64_t WHOLE_BYTES = 1 << 25;  // of rows as whole numbers, at a time

template <Then THEN>
void linear_whole(int64_t rows, const uint16_t* x, int64_t stride, const Int8Weight& w, const uint16_t* residual,
                  uint16_t* y, int num_threads) {
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  const int64_t group_bytes = w.steps() * LINES, fit = (WHOLE_BYTES / group_bytes + 1) * 16;
  for (int64_t from = 0; from < rows; from += fit) {
    const int64_t count = rows - from < fit ? rows - from : fit;
    const WholeRows whole = {tiles_kept.room((count + 15) / 16 * group_bytes), scales_kept.room(count)};
#pragma omp parallel num_threads(num_threads)
    {
      configure_tiles();
#pragma omp for schedule(static)
      for (int64_t row = 0; row < count; ++row) to_whole(row, w.inputs, x + (from + row) * stride, whole);
      of_whole<THEN>({false}, count, whole, w, residual ? residual + from * w.outputs : nullptr, y + from * w.outputs,
                     in_lines(w.outputs));
      _tile_release();
    }
  }
}

}  // namespace

// The system saves the state of tiles for processes that ask for it.
extern "C" int is_allowed() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

extern "C" void pack_tiles(int64_t outputs, int64_t inputs, const uint16_t* weight, uint16_t* packed) {
  const int64_t steps = inputs / 32, tiles = (outputs + 31) / 32 * 2;
#pragma omp parallel for schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t k = 0; k < steps; ++k) {
      uint16_t* to = packed + ((tile / 2 * steps + k) * 2 + tile % 2) * TILE;
      for (int pair = 0; pair < 16; ++pair)
        for (int column = 0; column < 16; ++column)
          for (int i = 0; i < 2; ++i) {
            const int64_t output = tile * 16 + column;
            to[pair * 32 + column * 2 + i] = output < outputs ? weight[output * inputs + k * 32 + pair * 2 + i] : 0;
          }
    }
}

extern "C" void linear_tiles(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride,
                             const uint16_t* w, const uint16_t* bias, int then, const uint16_t* residual, uint16_t* y,
                             int num_threads) {
  const auto run = then == RELU ? linear<RELU> : then == ADD ? linear<ADD> : linear<NOTHING>;
  run(rows, outputs, inputs, x, stride, w, bias, residual, y, num_threads);
}

// The output with the largest sum of each row, the lowest where several are equal as bfloat16: argmax of what `linear_tiles`
// gives, which is never written.
extern "C" void likeliest_tiles(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride,
                                const uint16_t* w, int64_t* out, int num_threads) {
  const int64_t left = rows % 32;
  std::vector<uint16_t> last(left ? 32 * inputs : 0);
  for (int64_t r = 0; r < left; ++r) std::memcpy(&last[r * inputs], x + (rows - left + r) * stride, inputs * 2);
  std::vector<float> best(rows, -FLT_MAX);
  for (int64_t row = 0; row < rows; ++row) out[row] = 0;  // where there is nothing but NaN
#pragma omp parallel num_threads(num_threads)
  {
    configure_tiles();
    thread_local Buffer<Largest> kept;
    Largest* largest = kept.room(rows);
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) largest[row].values[lane] = -FLT_MAX, largest[row].blocks[lane] = 0;
    multiply_outputs(rows, outputs, inputs, x, stride, last.data(), w,
                     [&](const float* sums, int64_t row, int count, int64_t block) {
                       see_largest(sums, count, block, outputs, largest + row);
                     });
    _tile_release();
#pragma omp critical
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) {
        const float value = largest[row].values[lane];
        const int64_t at = int64_t(largest[row].blocks[lane]) * 32 + lane;
        if (value > best[row] || (value == best[row] && at < out[row])) best[row] = value, out[row] = at;
      }
  }
}

extern "C" void linear_int8(int64_t rows, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t stride,
                            const int8_t* w, const float* scales, const uint16_t* bias, int then,
                            const uint16_t* residual, uint16_t* y, int num_threads) {
  const auto run = then == RELU ? linear_whole<RELU> : then == ADD ? linear_whole<ADD> : linear_whole<NOTHING>;
  run(rows, x, stride, {outputs, inputs, w, scales, bias}, residual, y, num_threads);
}

#else

extern "C" int is_allowed() { return 1; }

#endif
