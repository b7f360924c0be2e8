// Micro-kernels for weights in blocks of 32 inputs (blocks.h), by VNNI or by `maddubs`, with AVX-512 or AVX2, and on AMX
// tiles. Integer products of a block are exact, and every kernel adds them in float32 in the same order, so all of them
// give the same bits.

#pragma once

#include "numbers.h"

#include <array>
#include <utility>

namespace cpu {

// The block formats of GGUF. A weight of 4 bits is q - 8 (Q4_0) or q (Q4_1) times the block's scale, plus its minimum
// (Q4_1); one of 8 bits is stored as q + 128, since byte products want one side unsigned.
enum BlockFormat { NO_BLOCKS, Q4_0, Q4_1, Q8_0 };

// The blocks of 32 outputs for 32 inputs: numbers of two tiles of 16 outputs, 32 scales, and for Q4_1 32 minima (float16).
// A tile has lines of 64 bytes with four inputs of each output; with 4 bits line i has inputs 4 i to 4 i + 3 in its low
// bits, and 16 inputs further on in its high ones.
template <int FORMAT>
struct Blocks {
  static constexpr bool HAS_MINIMA = FORMAT == Q4_1, IS_WIDE = FORMAT == Q8_0;
  static constexpr int64_t TILE = IS_WIDE ? 512 : 256, SCALES = 2 * TILE, MINIMA = SCALES + 64;
  static constexpr int64_t BYTES = SCALES + (HAS_MINIMA ? 128 : 64);
};

constexpr int64_t bytes_of(int format) {
  return format == Q8_0 ? Blocks<Q8_0>::BYTES : format == Q4_1 ? Blocks<Q4_1>::BYTES : Blocks<Q4_0>::BYTES;
}

// Up to 16 rows of x for 32 inputs, `n` apart: numbers [n][32] in [-127, 127], scales [n], sums [n] of the numbers times
// -8, and sums times scales [n].
struct BlockRows {
  static constexpr int64_t BYTES = 44;  // of a row

  const uint8_t* at;
  int64_t n;

  const int8_t* numbers(int64_t row) const { return reinterpret_cast<const int8_t*>(at) + 32 * row; }
  const float* scales() const { return reinterpret_cast<const float*>(at + 32 * n); }
  const int32_t* sums() const { return reinterpret_cast<const int32_t*>(at + 36 * n); }
  const float* scaled_sums() const { return reinterpret_cast<const float*>(at + 40 * n); }
};

constexpr int64_t BLOCKS_AHEAD = 8192;  // prefetch distance in bytes

#ifdef __AVX512F__
constexpr int BLOCK_ROWS = 6, BLOCK_TILES = 2;  // 12 sums in float32, 12 of integers

inline Floats from_halves(const uint8_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

struct Quads {  // four bytes of each of 16 outputs, or a number of 32 bits
  __m512i v;
};
inline Quads load_quads(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
inline Quads low_bits(Quads x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Quads high_bits(Quads x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline Quads all_quads(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats to_floats(Quads x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Quads add32(Quads x, Quads y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline Quads times16(Quads x) { return {_mm512_slli_epi32(x.v, 4)}; }
#ifndef __AVX512VNNI__
inline Quads add_pairs(Quads sum, Quads q, Quads x) {
  return {_mm512_add_epi16(sum.v, _mm512_maddubs_epi16(q.v, x.v))};
}
inline Quads join_pairs(Quads x) { return {_mm512_madd_epi16(x.v, _mm512_set1_epi16(1))}; }
#endif
#else
constexpr int BLOCK_ROWS = 2, BLOCK_TILES = 1;  // a number of 16 outputs takes two of 16 registers

inline Floats from_halves(const uint8_t* from) {
  const __m128i* at = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

struct Quads {
  __m256i a, b;
};
inline Quads load_quads(const uint8_t* from) {
  const __m256i* at = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Quads low_bits(Quads x) {
  return {_mm256_and_si256(x.a, _mm256_set1_epi8(15)), _mm256_and_si256(x.b, _mm256_set1_epi8(15))};
}
inline Quads high_bits(Quads x) { return low_bits({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
inline Quads all_quads(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats to_floats(Quads x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Quads add32(Quads x, Quads y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Quads times16(Quads x) { return {_mm256_slli_epi32(x.a, 4), _mm256_slli_epi32(x.b, 4)}; }
inline Quads add_pairs(Quads sum, Quads q, Quads x) {
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(q.a, x.a)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(q.b, x.b))};
}
inline Quads join_pairs(Quads x) {
  return {_mm256_madd_epi16(x.a, _mm256_set1_epi16(1)), _mm256_madd_epi16(x.b, _mm256_set1_epi16(1))};
}
#endif

// The integer sums of a block for one row and 16 outputs. `offset`: -8 times the sum of the row's numbers.
template <int FORMAT>
struct BlockSum {
#ifdef __AVX512VNNI__
  Quads sum;

  void start(int32_t offset) { sum = all_quads(FORMAT == Q4_0 ? offset : FORMAT == Q8_0 ? 16 * offset : 0); }
  void add(Quads q, Quads x) { sum.v = _mm512_dpbusd_epi32(sum.v, q.v, x.v); }
  void add_wide(Quads q, Quads x) { add(q, x); }
  Floats total(int32_t) const { return to_floats(sum); }
#else
  // Eight pairs of products of at most 15 * 127 fit into 16 bits; bytes go in halves.
  Quads low, high;

  void start(int32_t) { low = high = all_quads(0); }
  void add(Quads q, Quads x) { low = add_pairs(low, q, x); }
  void add_wide(Quads q, Quads x) {
    low = add_pairs(low, low_bits(q), x);
    high = add_pairs(high, high_bits(q), x);
  }
  Floats total(int32_t offset) const {
    const Quads sum = join_pairs(low);
    if (FORMAT == Q8_0) return to_floats(add32(sum, times16(add32(join_pairs(high), all_quads(offset)))));
    return to_floats(FORMAT == Q4_0 ? add32(sum, all_quads(offset)) : sum);
  }
#endif
};

inline Quads four_of(const int8_t* x) {
  int32_t number;
  std::memcpy(&number, x, 4);
  return all_quads(number);
}

// Multiplies ROWS rows from `row` on by TILES tiles of 16 outputs from `tile` on, `steps` blocks, and adds to `sums`
// [16][32] or overwrites them if `fresh`.
template <int FORMAT, int ROWS, int TILES>
inline void multiply_block_rows(BlockRows x, int row, int tile, const uint8_t* w, int64_t steps, float* sums, bool fresh) {
  using B = Blocks<FORMAT>;
  sums += 32 * row + 16 * tile;
  Floats a[ROWS][TILES];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int t = 0; t < TILES; ++t) a[r][t] = fresh ? all(0.0f) : load16(sums + 32 * r + 16 * t);
  for (int64_t step = 0; step < steps; ++step, w += B::BYTES, x.at += BlockRows::BYTES * x.n) {
#pragma GCC unroll 20
    for (int64_t i = 0; i < B::BYTES; i += 64) _mm_prefetch(w + BLOCKS_AHEAD + i, _MM_HINT_T1);
#pragma GCC unroll 2
    for (int t = 0; t < TILES; ++t) {
      const uint8_t* lines = w + (tile + t) * B::TILE;
      const Floats scale = from_halves(w + B::SCALES + 32 * (tile + t));
      const int32_t* offsets = x.sums() + row;
      BlockSum<FORMAT> dots[ROWS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) dots[r].start(offsets[r]);
#pragma GCC unroll 8
      for (int i = 0; i < (B::IS_WIDE ? 8 : 4); ++i) {
        const Quads line = load_quads(lines + 64 * i), low = low_bits(line), high = high_bits(line);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          const int8_t* numbers = x.numbers(row + r) + 4 * i;
          if (B::IS_WIDE) {
            dots[r].add_wide(line, four_of(numbers));
          } else {
            dots[r].add(low, four_of(numbers));
            dots[r].add(high, four_of(numbers + 16));
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        a[r][t] = fma(dots[r].total(offsets[r]), scale * all(x.scales()[row + r]), a[r][t]);
        if (B::HAS_MINIMA)
          a[r][t] = fma(from_halves(w + B::MINIMA + 32 * (tile + t)), all(x.scaled_sums()[row + r]), a[r][t]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int t = 0; t < TILES; ++t) store16(sums + 32 * r + 16 * t, a[r][t]);
}

using BlockRun = void (*)(BlockRows, int, int, const uint8_t*, int64_t, float*, bool);

template <int FORMAT, int... I>
constexpr std::array<BlockRun, sizeof...(I)> block_runs(std::integer_sequence<int, I...>) {
  return {multiply_block_rows<FORMAT, 1 + I, BLOCK_TILES>...};
}

// Multiplies `count` rows, as evenly split as possible.
template <int FORMAT>
inline void multiply_block_vectors(BlockRows x, int count, const uint8_t* w, int64_t steps, float* sums, bool fresh) {
  static constexpr auto RUNS = block_runs<FORMAT>(std::make_integer_sequence<int, BLOCK_ROWS>());
  const int parts = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int part = 0; part < parts; ++part) {
    const int from = count * part / parts, to = count * (part + 1) / parts;
    for (int tile = 0; tile < 2; tile += BLOCK_TILES) RUNS[to - from - 1](x, from, tile, w, steps, sums, fresh);
  }
}

#ifdef BACKEND_AMX

constexpr int TILED_ROWS = 8;  // from so many rows on tiles are faster (measured 2026-12-01)

// Tiles of 16 rows and 32 inputs (4, 5), of 32 inputs and 16 outputs (6, 7), and of sums, while this is in scope.
struct BlockTiles {
  static constexpr TileConfig CONFIG = {1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};

  BlockTiles() { _tile_loadconfig(&CONFIG); }
  ~BlockTiles() { _tile_loadconfig(&TILES); }
  BlockTiles(const BlockTiles&) = delete;
};

// Writes the numbers of `steps` blocks as signed bytes: [steps][2][8][64], with `BlockFormat`'s offset.
template <int FORMAT>
inline void widen_blocks(const uint8_t* w, int64_t steps, int8_t* to) {
  using B = Blocks<FORMAT>;
  const __m512i offset = _mm512_set1_epi8(FORMAT == Q4_0 ? 8 : FORMAT == Q8_0 ? char(128) : 0);
  for (int64_t step = 0; step < steps; ++step, w += B::BYTES, to += 1024) {
    for (int tile = 0; tile < 2; ++tile)
      for (int i = 0; i < (B::IS_WIDE ? 8 : 4); ++i) {
        const Quads line = load_quads(w + tile * B::TILE + 64 * i);
        int8_t* at = to + 512 * tile + 64 * i;
        _mm512_storeu_si512(at, _mm512_sub_epi8(B::IS_WIDE ? line.v : low_bits(line).v, offset));
        if (!B::IS_WIDE) _mm512_storeu_si512(at + 256, _mm512_sub_epi8(high_bits(line).v, offset));
      }
  }
}

// Multiplies 16 rows, of which some may be anything, by `steps` blocks whose numbers have been widened. Prefetches `lines`
// lines of 64 bytes for each step, twice, from `next` on.
template <int FORMAT>
inline void multiply_block_tiles(BlockRows x, const int8_t* numbers, const uint8_t* w, int64_t steps, float* sums,
                                 bool fresh, const uint8_t* next, int64_t lines) {
  using B = Blocks<FORMAT>;
  alignas(64) int32_t products[2][16 * 16];
  const int64_t apart = BlockRows::BYTES * 16;
  for (int tile = 0; tile < 2; ++tile) {
    const auto multiply = [&](int64_t step) {
      const int8_t *rows = reinterpret_cast<const int8_t*>(x.at) + step * apart, *own = numbers + step * 1024 + 512 * tile;
      if (step % 2) {
        _tile_zero(1);
        _tile_loadd(5, rows, 32);
        _tile_loadd(7, own, 64);
        _tile_dpbssd(1, 5, 7);
        _tile_stored(1, products[1], 64);
      } else {
        _tile_zero(0);
        _tile_loadd(4, rows, 32);
        _tile_loadd(6, own, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, products[0], 64);
      }
    };
    __m512 a[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) a[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + 32 * r + 16 * tile);
    multiply(0);
    for (int64_t step = 0; step < steps; ++step) {
      if (step + 1 < steps) multiply(step + 1);  // while the sums of this one are added
      for (int64_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
      const uint8_t* own = w + step * B::BYTES;
      const BlockRows rows{x.at + step * apart, 16};
      const __m512 scale = from_halves(own + B::SCALES + 32 * tile).v;
      const int32_t* made = products[step % 2];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(made + 16 * r));
        a[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales()[r])), a[r]);
      }
      if (B::HAS_MINIMA) {
        const __m512 minimum = from_halves(own + B::MINIMA + 32 * tile).v;
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) a[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.scaled_sums()[r]), a[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) _mm512_store_ps(sums + 32 * r + 16 * tile, a[r]);
  }
}

#endif

}  // namespace cpu
