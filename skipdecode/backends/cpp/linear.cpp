// Linear layers with packed weights in float32, bfloat16, int8 or blocks, and the argmax of their output.

#include "layer.h"

#include <cfloat>

#ifdef BACKEND_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using namespace cpu;

// Copies x [rows, inputs], `stride` elements between rows, into the layout `few_rows`; called by all threads of a
// parallel region, with a barrier at the end.
template <typename T>
void to_few(int64_t rows, int64_t inputs, const T* x, int64_t stride, T* to) {
  const Layout layout = few_rows<T>(inputs, rows);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < inputs / 32; ++k)
      std::memcpy(to + layout.at(row, k), x + row * stride + 32 * k, 32 * sizeof(T));
}

template <Epilogue EPILOGUE, typename T>
void linear(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const T* w, const T* bias,
            const T* residual, T* y, int num_threads) {
  const bool is_many = rows >= MANY * num_threads;
  const int64_t made = made_of(EPILOGUE, outputs);
  thread_local Buffer<T> buffer;
  T* few = is_many ? nullptr : buffer.reserve((rows + 31) / 32 * 32 * inputs);
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    if (is_many) {
      thread_local Buffer<T> own;
      T* tiles = own.reserve(ROWS * inputs);
      const Cut cut(rows, ROWS, num_threads);
#pragma omp for schedule(dynamic) nowait
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t from = cut.begin(chunk), count = cut.end(chunk) - from;
        to_tiles(count, inputs / 32, x + from * stride, stride, tiles, in_tiles(inputs, count));
        of_tiles<EPILOGUE>({true}, count, outputs, inputs, tiles, w, bias, residual ? residual + from * made : nullptr,
                       y + from * made, in_lines(made));
      }
    } else {
      to_few(rows, inputs, x, stride, few);
      of_few<EPILOGUE>({false}, rows, outputs, inputs, few, w, bias, residual, y, in_lines(made));
    }
  }
}

// For each 32 outputs and 32 inputs two tiles of 16 outputs; `together` inputs of an output are adjacent.
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

// The output with the largest value of each row, the lowest index if several are equal as T: the argmax of what `linear`
// computes, which is never written; NO_TOKEN if one is NaN or +inf. `allowed` [rows, ceil(outputs / 32)]: a bit for each
// output that counts, the others are -inf; null: all count. Each thread calls `multiply` with a callback that receives
// its sums.
template <typename T, typename Multiply>
void argmax_of(int64_t rows, int64_t outputs, const uint32_t* allowed, int64_t* out, int num_threads, Multiply multiply) {
  const int64_t words = (outputs + 31) / 32;
  std::vector<float> best(rows, -FLT_MAX);
  for (int64_t row = 0; row < rows; ++row) out[row] = 0;  // if all values are -inf
#pragma omp parallel num_threads(num_threads)
  {
    const Unit unit;
    thread_local Buffer<Largest> buffer;
    Largest* largest = buffer.reserve(rows);
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) largest[row].values[lane] = -FLT_MAX, largest[row].blocks[lane] = 0;
    multiply([&](const float* sums, int64_t row, int count, int64_t block) {
      const uint32_t* own = allowed ? allowed + row * words + block : nullptr;
      update_largest<T>(sums, count, block, outputs, own, words, largest + row);
    });
#pragma omp critical
    for (int64_t row = 0; row < rows; ++row)
      for (int lane = 0; lane < 32; ++lane) {
        const float value = largest[row].values[lane];
        const int64_t at = int64_t(largest[row].blocks[lane]) * 32 + lane;
        if (value > best[row] || (value == best[row] && at < out[row])) best[row] = value, out[row] = at;
      }
  }
  for (int64_t row = 0; row < rows; ++row)
    if (is_wrong(best[row])) out[row] = NO_TOKEN;
}

template <typename T>
void argmax_linear(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const T* w,
                   const uint32_t* allowed, int64_t* out, int num_threads) {
  thread_local Buffer<T> buffer;
  T* few = buffer.reserve((rows + 31) / 32 * 32 * inputs);
  argmax_of<T>(rows, outputs, allowed, out, num_threads, [&](auto see) {
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
// The kernel saves tile state only for processes that request it.
extern "C" int is_allowed() {
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#else
extern "C" int is_allowed() { return 1; }
#endif

#define EXPORT(NAME, T)                                                                                                 \
  extern "C" void pack_##NAME(int64_t outputs, int64_t inputs, const T* weight, T* packed) {                            \
    pack(outputs, inputs, weight, packed);                                                                              \
  }                                                                                                                     \
  extern "C" void linear_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride, const T* w,  \
                                const T* bias, int epilogue, const T* residual, T* y, int num_threads) {                \
    const auto run = epilogue == RELU     ? linear<RELU, T>                                                             \
                     : epilogue == ADD    ? linear<ADD, T>                                                              \
                     : epilogue == GEGLU  ? linear<GEGLU, T>                                                            \
                     : epilogue == SWIGLU ? linear<SWIGLU, T>                                                           \
                                          : linear<NOTHING, T>;                                                         \
    run(rows, outputs, inputs, x, stride, w, bias, residual, y, num_threads);                                           \
  }                                                                                                                     \
  extern "C" void argmax_linear_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride,       \
                                       const T* w, const uint32_t* allowed, int64_t* out, int num_threads) {            \
    argmax_linear(rows, outputs, inputs, x, stride, w, allowed, out, num_threads);                                      \
  }
FOR_EACH_TYPE(EXPORT)

namespace {

constexpr int64_t QUANTIZED_BYTES = 1 << 25;  // of quantised rows at a time

// Quantised rows for weights W, in memory of this thread.
template <typename W>
QuantizedRows quantized_for(const W& w, int64_t rows) {
  thread_local Buffer<uint8_t> bytes_buffer;
  thread_local Buffer<float> scales_buffer;
  return quantized_rows(bytes_buffer.reserve((rows + 15) / 16 * w.group_bytes()), scales_buffer.reserve(rows), rows);
}

template <Epilogue EPILOGUE, typename W, typename T>
void linear_quantized(int64_t rows, const T* x, int64_t stride, const W& w, const T* residual, T* y, int num_threads) {
  const int64_t made = made_of(EPILOGUE, w.outputs), fit = (QUANTIZED_BYTES / w.group_bytes() + 1) * 16;
  for (int64_t from = 0; from < rows; from += fit) {
    const int64_t count = rows - from < fit ? rows - from : fit;
    const QuantizedRows quantized = quantized_for(w, count);
#pragma omp parallel num_threads(num_threads)
    {
      const Unit unit;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < count; ++row) quantize_row(row, w, x + (from + row) * stride, quantized);
      of_quantized<EPILOGUE>({false}, count, quantized, w, residual ? residual + from * made : nullptr, y + from * made,
                             in_lines(made));
    }
  }
}

template <typename W, typename T = typename W::Number>
void linear_quantized(int epilogue, int64_t rows, const T* x, int64_t stride, const W& w, const T* residual, T* y,
                      int num_threads) {
  const auto run = epilogue == RELU     ? linear_quantized<RELU, W, T>
                   : epilogue == ADD    ? linear_quantized<ADD, W, T>
                   : epilogue == GEGLU  ? linear_quantized<GEGLU, W, T>
                   : epilogue == SWIGLU ? linear_quantized<SWIGLU, W, T>
                                        : linear_quantized<NOTHING, W, T>;
  run(rows, x, stride, w, residual, y, num_threads);
}

template <typename W, typename T = typename W::Number>
void argmax_quantized(int64_t rows, const T* x, int64_t stride, const W& w, const uint32_t* allowed, int64_t* out,
                      int num_threads) {
  const QuantizedRows quantized = quantized_for(w, rows);
  argmax_of<T>(rows, w.outputs, allowed, out, num_threads, [&](auto see) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) quantize_row(row, w, x + row * stride, quantized);
    multiply_rows({false}, rows, quantized, w, see);
  });
}

}  // namespace

#define EXPORT_BLOCKS(NAME, T)                                                                                          \
  extern "C" void linear_blocks_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x, int64_t stride,       \
                                       const uint8_t* w, int64_t format, const T* bias, int epilogue,                   \
                                       const T* residual, T* y, int num_threads) {                                      \
    const BlockWeight<T> weight = {outputs, inputs, w, int(format), bias};                                              \
    linear_quantized(epilogue, rows, x, stride, weight, residual, y, num_threads);                                      \
  }                                                                                                                     \
  extern "C" void argmax_linear_blocks_##NAME(int64_t rows, int64_t outputs, int64_t inputs, const T* x,                \
                                              int64_t stride, const uint8_t* w, int64_t format,                         \
                                              const uint32_t* allowed, int64_t* out, int num_threads) {                 \
    const BlockWeight<T> weight = {outputs, inputs, w, int(format), nullptr};                                           \
    argmax_quantized(rows, x, stride, weight, allowed, out, num_threads);                                               \
  }
FOR_EACH_TYPE(EXPORT_BLOCKS)

#ifdef HAS_INT8

extern "C" void linear_int8(int64_t rows, int64_t outputs, int64_t inputs, const bfloat16* x, int64_t stride,
                            const int8_t* w, const float* scales, const int32_t* totals, const bfloat16* bias, int epilogue,
                            const bfloat16* residual, bfloat16* y, int num_threads) {
  const Int8Weight weight = {outputs, inputs, w, scales, totals, bias};
  linear_quantized(epilogue, rows, x, stride, weight, residual, y, num_threads);
}

extern "C" void argmax_linear_int8(int64_t rows, int64_t outputs, int64_t inputs, const bfloat16* x, int64_t stride,
                                   const int8_t* w, const float* scales, const int32_t* totals, const uint32_t* allowed,
                                   int64_t* out, int num_threads) {
  const Int8Weight weight = {outputs, inputs, w, scales, totals, nullptr};
  argmax_quantized(rows, x, stride, weight, allowed, out, num_threads);
}

#endif
