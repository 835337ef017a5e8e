// Products of rows with matrices in tiles of 32 columns, for decoding on a CPU.
//
//     y[r, n] = sum over k of x[r, k] * w[k, n]
//
// x is float32 [R, K], and may be made of other rows first (row_preparation.h). A matrix is
// bfloat16 [N/32, K/2, 32, 2] or float32 [N/32, K, 32, 1], so that it is read from its first byte
// to its last, in the order in which registers want it, and nothing has to be packed. With bfloat16
// the rows are rounded to bfloat16, and sums are float32. A number of y depends on its row of x and
// its column of w alone: not on the other rows, nor on how many there are, nor on the threads,
// because the sum over k always has the same order.
//
// One call multiplies several matrices by the same rows.

#ifndef PEAGLE_TILED_PRODUCTS_H_
#define PEAGLE_TILED_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel_for.h"
#include "row_preparation.h"
#include "vectors.h"

namespace tiled_products {

constexpr int kColumns = 32;  // of a tile; `COLUMNS` of tiled_products.py

// A pass reads two vectors of a tile, and multiplies each by up to kMostRows rows, whose sums fill
// the registers.
constexpr int kPass = 2 * kLanes;
constexpr int kMostRows = kRegisters == 32 ? 12 : 6;
// Few rows take several tiles at once: a sum waits for the one before it, and others fill the time.
constexpr int kMostTiles = std::max(1, kMostRows / 3);

// Fewer bytes are multiplied sooner than a further thread wakes up.
constexpr int64_t kLeastBytes = 64 << 10;
// Numbers of rows that a thread prepares: activations, and others.
constexpr int64_t kLeastActivations = 8 << 10, kLeastNumbers = 64 << 10;
constexpr int kPartsOfThread = 4;  // so that no thread waits long for another

// How a number of a row, or two neighbours in bfloat16, is multiplied with as many of each of
// kLanes columns, and added to their sums.
struct OfFloats {
  using Number = float;
  static Floats Add(Floats sum, float x, Words w) {
    return MultiplyAdd(Broadcast(x), (Floats)w, sum);
  }
};

struct OfBfloat16Pairs {
  using Number = uint32_t;
#if defined(__AVX512BF16__)
  static Floats Add(Floats sum, uint32_t x, Words w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
  }
#else
  static Floats Add(Floats sum, uint32_t x, Words w) {
    const uint32_t low = x << 16, high = x & 0xffff0000u;
    sum = MultiplyAdd(Broadcast(Load<float>(&low)), (Floats)(w << 16), sum);
    return MultiplyAdd(Broadcast(Load<float>(&high)), (Floats)(w & 0xffff0000u), sum);
  }
#endif
};

// Rows as the products read them: one after the other, `stride` numbers apart.
template <typename Kind>
struct Rows {
  const typename Kind::Number* first;
  int64_t stride;
};

// kRows rows by kTiles tiles; `depth` numbers, or pairs, are summed. y has `width` columns.
template <typename Kind, int kRows, int kTiles>
void MultiplyTiles(Rows<Kind> x, const uint32_t* tiles, int64_t depth, float* y, int64_t width) {
  for (int pass = 0; pass < kColumns; pass += kPass) {
    Floats sums[kRows][kTiles][2] = {};
    for (int64_t k = 0; k < depth; ++k) {
      Words w[kTiles][2];
      PEAGLE_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t* from = tiles + (t * depth + k) * kColumns + pass;
        w[t][0] = Load<Words>(from);
        w[t][1] = Load<Words>(from + kLanes);
      }
      PEAGLE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto number = x.first[r * x.stride + k];
        PEAGLE_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          sums[r][t][0] = Kind::Add(sums[r][t][0], number, w[t][0]);
          sums[r][t][1] = Kind::Add(sums[r][t][1], number, w[t][1]);
        }
      }
    }
    PEAGLE_UNROLL
    for (int r = 0; r < kRows; ++r)
      PEAGLE_UNROLL
      for (int t = 0; t < kTiles; ++t) {  // one by one: a block of memory would not be registers
        float* to = y + r * width + t * kColumns + pass;
        Store(to, sums[r][t][0]);
        Store(to + kLanes, sums[r][t][1]);
      }
  }
}

// `rows` rows, at most kRows, by the function for that number, and by `count` tiles.
template <typename Kind, int kRows>
void MultiplyRows(int64_t rows, Rows<Kind> x, const uint32_t* tiles, int64_t count, int64_t depth,
                  float* y, int64_t width) {
  if constexpr (kRows > 1)
    if (rows < kRows)
      return MultiplyRows<Kind, kRows - 1>(rows, x, tiles, count, depth, y, width);
  constexpr int kTiles = std::max(1, kMostTiles / kRows);
  int64_t t = 0;
  for (; t + kTiles <= count; t += kTiles)
    MultiplyTiles<Kind, kRows, kTiles>(x, tiles + t * depth * kColumns, depth, y + t * kColumns,
                                       width);
  for (; t < count; ++t)
    MultiplyTiles<Kind, kRows, 1>(x, tiles + t * depth * kColumns, depth, y + t * kColumns, width);
}

struct Matrix {
  const uint32_t* tiles;
  int64_t count;  // of its tiles
  float* y;
};

// All rows by some tiles of a matrix, of which a few stay in the fastest cache while rows pass.
template <typename Kind>
void Multiply(Rows<Kind> x, int64_t rows, int64_t depth, const Matrix& matrix, int64_t begin,
              int64_t end) {
  const int64_t width = matrix.count * kColumns;
  const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
  for (int64_t t = begin; t < end; t += kMostTiles) {
    for (int64_t b = 0; b < blocks; ++b) {  // of nearly equal sizes
      const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
      MultiplyRows<Kind, kMostRows>(
          last - first, {x.first + first * x.stride, x.stride}, matrix.tiles + t * depth * kColumns,
          std::min<int64_t>(kMostTiles, end - t), depth,
          matrix.y + first * width + t * kColumns, width);
    }
  }
}

// All rows by all matrices, whose tiles, counted through all of them, threads divide.
template <typename Kind>
void MultiplyAll(xla::ffi::ThreadPool& pool, Rows<Kind> x, int64_t rows, int64_t depth,
                 const std::vector<Matrix>& matrices) {
  int64_t num_tiles = 0;
  for (const Matrix& matrix : matrices) num_tiles += matrix.count;
  const int64_t threads = NumThreads(pool, num_tiles * depth * kColumns * 4, kLeastBytes);
  const int64_t count = threads > 1 ? threads * kPartsOfThread : 1;
  const int64_t size = std::max<int64_t>(1, (num_tiles + count - 1) / count);
  ParallelFor(pool, (num_tiles + size - 1) / size, threads, [&](int64_t part) {
    int64_t begin = part * size, end = std::min(begin + size, num_tiles);
    for (const Matrix& matrix : matrices) {
      Multiply(x, rows, depth, matrix, std::max<int64_t>(begin, 0), std::min(end, matrix.count));
      begin -= matrix.count;
      end -= matrix.count;
    }
  });
}

// The rows of a source by the matrices, which are all bfloat16, or all float32.
inline void Run(xla::ffi::ThreadPool& pool, const row_preparation::Source& source, int64_t rows,
                bool is_bfloat16, const std::vector<Matrix>& matrices) {
  const int64_t inputs = source.size, depth = is_bfloat16 ? inputs / 2 : inputs;
  // rows that lie a multiple of 4,096 bytes apart would drive each other out of the fastest cache
  const int64_t stride = depth + 16;
  Scratch<uint32_t> scratch(rows * stride);
  uint32_t* prepared = scratch.data();
  const int64_t least = source.up ? kLeastActivations : kLeastNumbers;
  ParallelFor(pool, rows, NumThreads(pool, rows * inputs, least), [&](int64_t r) {
    uint32_t* to = prepared + r * stride;
    if (!is_bfloat16) return row_preparation::Prepare(source, r, reinterpret_cast<float*>(to));
    Scratch<float> row(inputs);
    row_preparation::Prepare(source, r, row.data());
    const float* from = row.data();
    for (int64_t k = 0; k < depth; ++k)
      to[k] = Rounded(from[2 * k]) | Rounded(from[2 * k + 1]) << 16;
  });
  if (is_bfloat16) {
    MultiplyAll<OfBfloat16Pairs>(pool, {prepared, stride}, rows, depth, matrices);
  } else {
    const auto* numbers = reinterpret_cast<const float*>(prepared);
    MultiplyAll<OfFloats>(pool, {numbers, stride}, rows, depth, matrices);
  }
}

}  // namespace tiled_products

#endif  // PEAGLE_TILED_PRODUCTS_H_
