// Rows of an embedding, read where they lie, for decoding on a CPU.
//
// A table is [V, K], or the tiles of its transpose (tiled_products.h), of which a row is a column.
// It is bfloat16 or float32, and rows are float32.

#ifndef PEAGLE_EMBEDDING_ROWS_H_
#define PEAGLE_EMBEDDING_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "parallel_for.h"
#include "tiled_products.h"
#include "vectors.h"

namespace embedding_rows {

struct Table {
  const void* numbers;
  int64_t vocab, width;
  bool is_bfloat16, is_tiled;
};

// Numbers for each thread: fewer are read sooner than another thread wakes up.
constexpr int64_t kLeastNumbers = 64 << 10;

// The row of a token, as JAX counts: from the end where it is negative, and of one that is out of
// range, the nearest.
inline void Read(const Table& table, int64_t token, float* y) {
  constexpr int64_t kColumns = tiled_products::kColumns;
  token = std::clamp<int64_t>(token < 0 ? token + table.vocab : token, 0, table.vocab - 1);
  const int64_t part = table.is_bfloat16 ? 2 : 1, words = table.width / part;
  const auto* all = static_cast<const uint32_t*>(table.numbers);
  const uint32_t* from = all + (table.is_tiled ? token / kColumns * words * kColumns +
                                                     token % kColumns
                                               : token * words);
  const int64_t step = table.is_tiled ? kColumns : 1;
  for (int64_t i = 0; i < words; ++i) {
    const uint32_t word = from[i * step];
    if (table.is_bfloat16) {
      const uint32_t low = word << 16, high = word & 0xffff0000u;
      y[2 * i] = Load<float>(&low);
      y[2 * i + 1] = Load<float>(&high);
    } else {
      y[i] = Load<float>(&word);
    }
  }
}

// The rows of all tokens, which threads divide.
inline void Run(xla::ffi::ThreadPool& pool, const Table& table, const int32_t* tokens,
                int64_t count, float* y) {
  ParallelFor(pool, count, NumThreads(pool, count * table.width, kLeastNumbers),
              [&](int64_t i) { Read(table, tokens[i], y + i * table.width); });
}

}  // namespace embedding_rows

#endif  // PEAGLE_EMBEDDING_ROWS_H_
