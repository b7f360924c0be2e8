// A linear layer, its weights packed, of float32, bfloat16 or int8; and its
// largest output.

#include "layer.h"

#include <cfloat>

#ifdef BACKEND_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using namespace cpu;

// x [rows, inputs] of `stride` as `few_rows` lays them, by all threads of a parallel region, which wait for each other.
template <typename T>
void to_few(int64_t rows, int64_t inputs, const T* x, int64_t stride, T* to) {
  const Layout layout = few_rows<T>(inputs, rows);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < inputs / 32; ++k)
      std::memcpy(to + layout.at(row, k), x + row * stride + 32 * k, 32 * sizeof(T));
}

template <Then THEN, typename T, typename W>
void linear(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const W* w, const T* bias,
            const T* residual, T* y, int num_threads) {
  const bool is_many = rows >= MANY * num_threads;
  const int64_t made = made_of(THEN, outputs);
  thread_local Buffer<T> kept;
  T* few = is_many ? nullptr : kept.room((rows + 31) / 32 * 32 * inputs);
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    if (is_many) {
      thread_local Buffer<T> own;
      T* tiles = own.room(ROWS * inputs);
      const Cut cut(rows, ROWS, num_threads);
#pragma omp for schedule(dynamic) nowait
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t from = cut.begin(chunk), count = cut.end(chunk) - from;
        to_tiles(count, inputs / 32, x + from * stride, stride, tiles, in_tiles(inputs, count));
        of_tiles<THEN>({true}, count, outputs, inputs, tiles, w, bias, residual ? residual + from * made : nullptr,
                       y + from * made, in_lines(made));
      }
    } else {
      to_few(rows, inputs, x, stride, few);
      if constexpr (std::is_same<T, W>::value)
        of_few<THEN>({false}, rows, outputs, inputs, few, w, bias, residual, y, in_lines(made));
      else
        of_tiles<THEN>({false}, rows, outputs, inputs, few, w, bias, residual, y, in_lines(made));
    }
  }
}

// Of each 32 outputs and 32 inputs two tiles of 16 outputs; `together` inputs of an output lie side by side.
template <typename T>
void pack(int64_t outputs, int64_t inputs, const T* weight, T* packed) {
  constexpr int64_t together = 4 / sizeof(T);
  const int64_t steps = inputs / 32, tiles = (outputs + 31) / 32 * 2;
#pragma omp parallel for schedule(static)
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t k = 0; k < steps; ++k) {
      T* to = packed + ((tile / 2 * steps + k) * 2 + tile % 2) * (BLOCK / 2);
      for (int64_t line = 0; line < 32 / together; ++line)
        for (int64_t column = 0; column < 16; ++column)
          for (int64_t i = 0; i < together; ++i) {
            const int64_t output = tile * 16 + column;
            *to++ = output < outputs ? weight[output * inputs + k * 32 + line * together + i] : T{};
          }
    }
}

// The output with the largest number of each row, the lowest where several are equal as T: argmax of what `linear` gives,
// which is never written. `multiply`, called by each thread, hands its numbers on to what it is given.
template <typename T, typename Multiply>
void argmax_of(int64_t rows, int64_t outputs, int64_t* out, int num_threads, Multiply multiply) {
  std::vector<float> best(rows, -FLT_MAX);
  for (int64_t row = 0; row < rows; ++row) out[row] = 0;  // where there is nothing but NaN
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    thread_local Buffer<Largest> kept;
    Largest* largest = kept.room(rows);
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) largest[row].values[lane] = -FLT_MAX, largest[row].blocks[lane] = 0;
    multiply([&](const float* sums, int64_t row, int count, int64_t block) {
      see_largest<T>(sums, count, block, outputs, largest + row);
    });
#pragma omp critical
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) {
        const float value = largest[row].values[lane];
        const int64_t at = int64_t(largest[row].blocks[lane]) * 32 + lane;
        if (value > best[row] || (value == best[row] && at < out[row])) best[row] = value, out[row] = at;
      }
  }
}

template <typename T, typename W>
void argmax_linear(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const W* w, int64_t* out,
                   int num_threads) {
  thread_local Buffer<T> kept;
  T* few = kept.room((rows + 31) / 32 * 32 * inputs);
  argmax_of<T>(rows, outputs, out, num_threads, [&](auto see) {
    to_few(rows, inputs, x, stride, few);
#ifdef BACKEND_AMX
    if constexpr (READS_LINES<T>)
      return multiply_outputs(rows, outputs, inputs, few, inputs, few + rows / 32 * 32 * inputs, w, see);
#endif
    multiply_tiled(Team{false}, rows, outputs, inputs, few, w, in_tiles(inputs, rows), see);
  });
}

}  // namespace

#ifdef BACKEND_AMX
// The system saves the state of tiles for processes that ask for it.
extern "C" int is_allowed() {
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#else
extern "C" int is_allowed() { return 1; }
#endif

#define EXPORT_PACK(NAME, T)                                                                                             \
  extern "C" void pack_##NAME(int64_t outputs, int64_t inputs, const T* weight, T* packed) {                             \
    pack(outputs, inputs, weight, packed);                                                                               \
  }
#define EXPORT(NAME, T, W)                                                                                               \
  extern "C" void linear_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const W* w,   \
                                const T* bias, int then, const T* residual, T* y, int num_threads) {                     \
    const auto run = then == RELU     ? linear<RELU, T, W>                                                               \
                     : then == ADD    ? linear<ADD, T, W>                                                                \
                     : then == SWIGLU ? linear<SWIGLU, T, W>                                                             \
                                      : linear<NOTHING, T, W>;                                                           \
    run(rows, outputs, inputs, x, stride, w, bias, residual, y, num_threads);                                            \
  }                                                                                                                      \
  extern "C" void argmax_linear_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride,        \
                                       const W* w, int64_t* out, int num_threads) {                                      \
    argmax_linear(rows, outputs, inputs, x, stride, w, out, num_threads);                                                \
  }
#define EXPORT_TYPE(NAME, T) EXPORT_PACK(NAME, T) EXPORT(NAME, T, T)
FOR_EACH_TYPE(EXPORT_TYPE)

#ifdef HAS_INT8

namespace {

constexpr int64_t WHOLE_BYTES = 1 << 25;  // of rows as whole numbers, at a time

template <Then THEN>
void linear_whole(int64_t rows, const bfloat16* x, int64_t stride, const Int8Weight& w, const bfloat16* residual,
                  bfloat16* y, int num_threads) {
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  const int64_t made = made_of(THEN, w.outputs);
  const int64_t group_bytes = w.steps() * LINES, fit = (WHOLE_BYTES / group_bytes + 1) * 16;
  for (int64_t from = 0; from < rows; from += fit) {
    const int64_t count = rows - from < fit ? rows - from : fit;
    const WholeRows whole = {tiles_kept.room((count + 15) / 16 * group_bytes), scales_kept.room(count), apart_of(count)};
#pragma omp parallel num_threads(num_threads)
    {
      const Unit unit;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < count; ++row) to_whole(row, w.inputs, x + (from + row) * stride, whole);
      of_whole<THEN>({false}, count, whole, w, residual ? residual + from * made : nullptr, y + from * made,
                     in_lines(made));
    }
  }
}

}  // namespace

extern "C" void linear_int8(int64_t rows, int64_t outputs, int64_t inputs, const bfloat16* x, int64_t stride,
                            const int8_t* w, const float* scales, const int32_t* totals, const bfloat16* bias, int then,
                            const bfloat16* residual, bfloat16* y, int num_threads) {
  const auto run = then == RELU     ? linear_whole<RELU>
                   : then == ADD    ? linear_whole<ADD>
                   : then == SWIGLU ? linear_whole<SWIGLU>
                                    : linear_whole<NOTHING>;
  run(rows, x, stride, {outputs, inputs, w, scales, totals, bias}, residual, y, num_threads);
}

extern "C" void argmax_linear_int8(int64_t rows, int64_t outputs, int64_t inputs, const bfloat16* x, int64_t stride,
                                   const int8_t* w, const float* scales, const int32_t* totals, int64_t* out,
                                   int num_threads) {
  thread_local Buffer<uint8_t> tiles_kept;
  thread_local Buffer<float> scales_kept;
  const Int8Weight weight = {outputs, inputs, w, scales, totals, nullptr};
  const WholeRows whole = {tiles_kept.room((rows + 15) / 16 * weight.steps() * LINES), scales_kept.room(rows),
                           apart_of(rows)};
  argmax_of<bfloat16>(rows, outputs, out, num_threads, [&](auto see) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) to_whole(row, inputs, x + row * stride, whole);
    multiply_int8({false}, rows, whole, weight, see);
  });
}

#endif
