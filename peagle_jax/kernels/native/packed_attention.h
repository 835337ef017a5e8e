// Attention of COD training and its gradient, for a CPU.
//
//     scores[i, s] = scale * q[i] . k[s];  y[i] = softmax(scores[i]) v;  lse[i] = log sum exp
//
// Shapes: q and y [B, Q, N, H], of the last Q of P rows; k and v [B, P, G, H]; lse [B, Q, N]. All
// are float32, and H is a multiple of kLanes. Heads are grouped, N / G of them to a KV head. Row i
// of P sees the keys first[i] .. last[i] of the first `depth0` rows. If it is one of the others, it
// sees the last chain_len[i] keys up to its own, too, and ahead[i] behind it. A row that sees
// nothing has y = 0, lse = -1e30 and no gradient. `first` to `ahead` are [B, P], and their numbers
// may be out of range.
//
// Blocks of rows visit the keys that any of their rows sees, some at a time, and keep no scores: a
// gradient computes them again (FlashAttention, arXiv:2205.14135). The order of all sums follows
// from the shapes and from what rows see, and not from the number of threads. NaN in a key that one
// row of a block sees reaches the block's other rows, as 0 times NaN is NaN.

#ifndef PEAGLE_PACKED_ATTENTION_H_
#define PEAGLE_PACKED_ATTENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "parallel_for.h"
#include "vectors.h"

namespace packed_attention {

// Keys that have scores at one time, and the largest number of queries that do, of all heads of a
// group. Both sets of scores of a gradient stay in a core's second cache. Fewer queries compute
// fewer scores that nobody sees; with 48 to 192 of them, and 64 to 256 keys, times differ by less
// than a third (LOG.md, 2026-11-30, night).
constexpr int64_t kKeys = 128, kBlockRows = 48;
// Rows and vectors of a product whose sums fill the registers.
constexpr int kSumRows = kRegisters / 5, kSumVectors = 4;
// Pieces of a gradient that threads share. Each sums gradients of all keys of one KV head, which are
// then added up: that pays for so many blocks and more, and the sums have a limit.
constexpr int64_t kPieces = 32, kLeastBlocks = 24, kMostSums = 64 << 20;
constexpr float kNothing = -1e30f;

struct Problem {
  int64_t batch, rows, queries, heads, kv_heads, depth0, head_dim;
  const float *q, *k, *v;
  const int32_t *first, *last, *chain_len, *ahead;  // the last may be null
  float scale;
  int64_t group() const { return heads / kv_heads; }
  // Tokens whose queries of one KV head are a block.
  int64_t block() const { return std::max<int64_t>(1, kBlockRows / group()); }
  int64_t blocks() const { return (queries + block() - 1) / block(); }
};

struct Gradient {
  const float *y, *lse, *dy, *dlse;
  float *dq, *dk, *dv;
};

// A matrix in memory: the number at (i, j) stands at data[i * row + j * column].
struct View {
  const float* data;
  int64_t row, column = 1;
};

// A matrix that is written, whose rows are so far apart.
struct Target {
  float* data;
  int64_t row;
};

template <int kRows, int kVectors>
void AddTile(int64_t rows, int64_t depth, View a, View b, Target c) {
  if constexpr (kRows > 1)
    if (rows < kRows) return AddTile<kRows - 1, kVectors>(rows, depth, a, b, c);
  Floats sums[kRows][kVectors];
  PEAGLE_UNROLL
  for (int r = 0; r < kRows; ++r)
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) sums[r][i] = Load<Floats>(c.data + r * c.row + i * kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    Floats right[kVectors];
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) right[i] = Load<Floats>(b.data + d * b.row + i * kLanes);
    PEAGLE_UNROLL
    for (int r = 0; r < kRows; ++r)
      PEAGLE_UNROLL
      for (int i = 0; i < kVectors; ++i)
        sums[r][i] =
            MultiplyAdd(Broadcast(a.data[r * a.row + d * a.column]), right[i], sums[r][i]);
  }
  PEAGLE_UNROLL
  for (int r = 0; r < kRows; ++r)
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) Store(c.data + r * c.row + i * kLanes, sums[r][i]);
}

// c [rows, columns] += a [rows, depth] times b [depth, columns]; columns fill whole vectors. It is
// compiled once, and not in each of five places, for the compiler's sake.
__attribute__((noinline)) inline void AddProduct(int64_t rows, int64_t columns, int64_t depth,
                                                 View a, View b, Target c) {
  constexpr int64_t kWidth = kSumVectors * kLanes;
  for (int64_t j = 0; j < columns;) {
    const bool is_wide = j + kWidth <= columns;
    for (int64_t r = 0; r < rows; r += kSumRows) {
      const View left = {a.data + r * a.row, a.row, a.column}, right = {b.data + j, b.row};
      const Target to = {c.data + r * c.row + j, c.row};
      const int64_t count = std::min<int64_t>(kSumRows, rows - r);
      is_wide ? AddTile<kSumRows, kSumVectors>(count, depth, left, right, to)
              : AddTile<kSumRows, 1>(count, depth, left, right, to);
    }
    j += is_wide ? kWidth : kLanes;
  }
}

// y [H, kKeys] becomes the columns of `count` rows; behind them stands the last one again.
inline void TransposeRows(View rows, int64_t count, int64_t head_dim, float* y) {
  for (int64_t s = 0; s < count; s += kLanes)
    for (int64_t h = 0; h < head_dim; h += kLanes) {
      Floats square[kLanes];
      PEAGLE_UNROLL
      for (int i = 0; i < kLanes; ++i)
        square[i] = Load<Floats>(rows.data + std::min(s + i, count - 1) * rows.row + h);
      Transpose(square);
      PEAGLE_UNROLL
      for (int i = 0; i < kLanes; ++i) Store(y + (h + i) * kKeys + s, square[i]);
    }
}

struct Span {
  int64_t begin, end;  // empty where begin >= end
};

inline Span Cut(int64_t begin, int64_t end, Span to) {
  return {std::max(begin, to.begin), std::min(end, to.end)};
}

// The keys that row i of sequence b sees: of depth 0, or of the others.
inline Span Seen(const Problem& p, int64_t b, int64_t i, bool is_depth0) {
  const int64_t at = b * p.rows + i;
  if (is_depth0) return Cut(p.first[at], p.last[at] + int64_t{1}, {0, p.depth0});
  if (i < p.depth0) return {0, 0};
  const int64_t ahead = p.ahead ? p.ahead[at] : 0;
  return Cut(i - p.chain_len[at] + 1, i + ahead + 1, {p.depth0, p.rows});
}

// `x` where the keys from s on are seen, and `otherwise` elsewhere.
inline Floats WhereSeen(Span seen, int64_t s, Floats x, Floats otherwise) {
  Integers key;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) key[i] = i;
  key += static_cast<int32_t>(s);
  const Integers is_seen = (key >= static_cast<int32_t>(seen.begin)) &
                           (key < static_cast<int32_t>(seen.end));
  return is_seen ? x : otherwise;
}

inline float Sum(Floats x) {
  float sum = 0;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// A block's queries: `tokens` of one sequence, of the heads that share KV head g.
struct Block {
  int64_t b, g;
  Span tokens;  // numbers of queries
};

inline Block BlockAt(const Problem& p, int64_t b, int64_t g, int64_t i) {  // of nearly equal sizes
  return {b, g, {p.queries * i / p.blocks(), p.queries * (i + 1) / p.blocks()}};
}

// Where query row r of a block stands in arrays of [B, Q, N].
inline int64_t Place(const Problem& p, const Block& block, int64_t r) {
  const int64_t T = block.tokens.end - block.tokens.begin;
  return (block.b * p.queries + block.tokens.begin + r % T) * p.heads + block.g * p.group() + r / T;
}

// The rows of a block from an array of [B, Q, N, H], one behind the other.
inline void Gather(const Problem& p, const Block& block, int64_t rows, const float* from,
                   float* to) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to + r * p.head_dim, from + Place(p, block, r) * p.head_dim,
                p.head_dim * sizeof(float));
}

// Calls of(keys, seen) for up to kKeys keys at a time that any token of the block sees; `seen` are
// the keys that each token sees, counted from the first of these.
template <typename Body>
void ForKeys(const Problem& p, const Block& block, const Body& of) {
  const int64_t T = block.tokens.end - block.tokens.begin;
  std::vector<Span> seen(T), here(T);
  for (const bool is_depth0 : {true, false}) {
    Span all = {p.rows, 0};
    for (int64_t t = 0; t < T; ++t) {
      const int64_t row = p.rows - p.queries + block.tokens.begin + t;
      seen[t] = Seen(p, block.b, row, is_depth0);
      if (seen[t].begin >= seen[t].end) continue;
      all = {std::min(all.begin, seen[t].begin), std::max(all.end, seen[t].end)};
    }
    for (int64_t begin = all.begin; begin < all.end; begin += kKeys) {
      const Span keys = {begin, std::min(begin + kKeys, all.end)};
      for (int64_t t = 0; t < T; ++t) {
        const Span some = Cut(seen[t].begin, seen[t].end, keys);
        here[t] = {some.begin - begin, some.end - begin};
      }
      of(keys, here);
    }
  }
}

// The keys or values from `begin` on, of one sequence and KV head.
inline View KeyRows(const Problem& p, const float* of, const Block& block, int64_t begin) {
  const int64_t stride = p.kv_heads * p.head_dim;
  return {of + (block.b * p.rows + begin) * stride + block.g * p.head_dim, stride};
}

// Scores become weights exp(score - largest). Sums and totals of before are scaled to the largest
// score of all.
inline void ToWeights(Span seen, int64_t count, float scale, int64_t head_dim, float* scores,
                      float* sums, float* total, float* largest) {
  Floats peaks = Broadcast(kNothing);
  for (int64_t s = 0; s < count; s += kLanes) {
    const Floats score = WhereSeen(seen, s, Load<Floats>(scores + s) * scale, Broadcast(kNothing));
    Store(scores + s, score);
    peaks = Max(score, peaks);
  }
  float peak = *largest;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) peak = std::max(peak, peaks[i]);
  if (peak > *largest) {
    const float factor = Exp(Broadcast(*largest - peak))[0];
    for (int64_t h = 0; h < head_dim; h += kLanes)
      Store(sums + h, Load<Floats>(sums + h) * factor);
    *total *= factor;
    *largest = peak;
  }
  Floats all = {};
  for (int64_t s = 0; s < count; s += kLanes) {
    const Floats weight = WhereSeen(seen, s, Exp(Load<Floats>(scores + s) - peak), Floats{});
    Store(scores + s, weight);
    all += weight;
  }
  *total += Sum(all);
}

inline void Attend(const Problem& p, const Block& block, float* y, float* lse) {
  const int64_t T = block.tokens.end - block.tokens.begin, rows = p.group() * T, H = p.head_dim;
  Scratch<float> scratch(rows * (2 * H + kKeys + 2) + H * kKeys);
  float* q = scratch.data();
  float* sums = q + rows * H;
  float* scores = sums + rows * H;
  float* keys = scores + rows * kKeys;
  float* totals = keys + H * kKeys;
  float* largest = totals + rows;
  Gather(p, block, rows, p.q, q);
  std::fill(sums, sums + rows * H, 0.0f);
  std::fill(totals, totals + rows, 0.0f);
  std::fill(largest, largest + rows, kNothing);
  ForKeys(p, block, [&](Span at, const std::vector<Span>& seen) {
    const int64_t count = at.end - at.begin, columns = (count + kLanes - 1) / kLanes * kLanes;
    TransposeRows(KeyRows(p, p.k, block, at.begin), count, H, keys);
    std::fill(scores, scores + rows * kKeys, 0.0f);
    AddProduct(rows, columns, H, {q, H}, {keys, kKeys}, {scores, kKeys});
    for (int64_t r = 0; r < rows; ++r)
      ToWeights(seen[r % T], columns, p.scale, H, scores + r * kKeys, sums + r * H, totals + r,
                largest + r);
    AddProduct(rows, H, count, {scores, kKeys}, KeyRows(p, p.v, block, at.begin), {sums, H});
  });
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t place = Place(p, block, r);
    const float factor = totals[r] == 0 ? 0 : 1 / totals[r];
    for (int64_t h = 0; h < H; ++h) y[place * H + h] = sums[r * H + h] * factor;
    lse[place] = totals[r] == 0 ? kNothing : largest[r] + std::log(totals[r]);
  }
}

// Where gradients of keys and of values are summed, and how far their rows are apart.
struct Sums {
  float *dk, *dv;
  int64_t row;
};

// Of weights w = softmax(scores): d score = scale * w * (dy . v - sum(dy * y) + dlse).
inline void AddGradient(const Problem& p, const Gradient& g, const Block& block, Sums sums) {
  const int64_t T = block.tokens.end - block.tokens.begin, rows = p.group() * T, H = p.head_dim;
  Scratch<float> scratch(rows * (3 * H + 2 * kKeys + 2) + 2 * H * kKeys);
  float* q = scratch.data();
  float* dy = q + rows * H;
  float* dq = dy + rows * H;
  float* weights = dq + rows * H;
  float* dscores = weights + rows * kKeys;
  float* columns = dscores + rows * kKeys;
  float* shifts = columns + 2 * H * kKeys;
  float* lse = shifts + rows;
  Gather(p, block, rows, p.q, q);
  Gather(p, block, rows, g.dy, dy);
  std::fill(dq, dq + rows * H, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t place = Place(p, block, r);
    Floats all = {};
    for (int64_t h = 0; h < H; h += kLanes)
      all += Load<Floats>(dy + r * H + h) * Load<Floats>(g.y + place * H + h);
    shifts[r] = g.dlse[place] - Sum(all);
    lse[r] = g.lse[place];
  }
  ForKeys(p, block, [&](Span at, const std::vector<Span>& seen) {
    const int64_t count = at.end - at.begin, wide = (count + kLanes - 1) / kLanes * kLanes;
    const View k = KeyRows(p, p.k, block, at.begin), v = KeyRows(p, p.v, block, at.begin);
    TransposeRows(k, count, H, columns);
    TransposeRows(v, count, H, columns + H * kKeys);
    std::fill(weights, weights + 2 * rows * kKeys, 0.0f);  // and of dscores
    AddProduct(rows, wide, H, {q, H}, {columns, kKeys}, {weights, kKeys});
    AddProduct(rows, wide, H, {dy, H}, {columns + H * kKeys, kKeys}, {dscores, kKeys});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t s = 0; s < wide; s += kLanes) {
        float* to = weights + r * kKeys + s;
        float* dto = dscores + r * kKeys + s;
        const Floats score = Load<Floats>(to) * p.scale - lse[r];
        const Floats weight = WhereSeen(seen[r % T], s, Exp(score), Floats{});
        Store(to, weight);
        Store(dto, weight * (Load<Floats>(dto) + shifts[r]) * p.scale);
      }
    const int64_t first = at.begin * sums.row;
    AddProduct(rows, H, count, {dscores, kKeys}, k, {dq, H});
    AddProduct(count, H, rows, {dscores, 1, kKeys}, {q, H}, {sums.dk + first, sums.row});
    AddProduct(count, H, rows, {weights, 1, kKeys}, {dy, H}, {sums.dv + first, sums.row});
  });
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(g.dq + Place(p, block, r) * H, dq + r * H, H * sizeof(float));
}

// All sequences, heads and blocks, which threads divide.
inline void Run(xla::ffi::ThreadPool& pool, const Problem& p, float* y, float* lse) {
  const int64_t heads = p.batch * p.kv_heads;
  ParallelFor(pool, heads * p.blocks(), std::max<int64_t>(1, pool.num_threads()), [&](int64_t i) {
    const int64_t head = i % heads;
    Attend(p, BlockAt(p, head / p.kv_heads, head % p.kv_heads, i / heads), y, lse);
  });
}

// How many pieces a gradient has: a number that follows from the shapes alone.
inline int64_t NumPieces(const Problem& p) {
  const int64_t heads = p.batch * p.kv_heads, numbers = heads * 2 * p.rows * p.head_dim;
  const int64_t wanted = (kPieces + heads - 1) / heads, most = p.blocks() / kLeastBlocks;
  return std::max<int64_t>(1, std::min({wanted, most, 1 + kMostSums / numbers}));
}

// Whether there was memory for it.
inline bool RunGradient(xla::ffi::ThreadPool& pool, const Problem& p, const Gradient& g) {
  const int64_t heads = p.batch * p.kv_heads, H = p.head_dim, threads = pool.num_threads();
  const int64_t pieces = NumPieces(p), stride = p.kv_heads * H, numbers = p.rows * H;
  // the first piece of each head sums where the result stands
  const std::unique_ptr<float[]> others(new (std::nothrow)
                                            float[heads * (pieces - 1) * 2 * numbers]);
  if (!others) return false;
  const auto sums_of = [&](int64_t head, int64_t piece) -> Sums {
    const int64_t at = (head / p.kv_heads * p.rows) * stride + head % p.kv_heads * H;
    if (piece == 0) return {g.dk + at, g.dv + at, stride};
    float* data = others.get() + (head * (pieces - 1) + piece - 1) * 2 * numbers;
    return {data, data + numbers, H};
  };
  ParallelFor(pool, heads * pieces, threads, [&](int64_t i) {
    const int64_t head = i % heads, piece = i / heads;
    const Sums sums = sums_of(head, piece);
    for (int64_t r = 0; r < p.rows; ++r) {
      std::fill_n(sums.dk + r * sums.row, H, 0.0f);
      std::fill_n(sums.dv + r * sums.row, H, 0.0f);
    }
    for (int64_t j = piece; j < p.blocks(); j += pieces)
      AddGradient(p, g, BlockAt(p, head / p.kv_heads, head % p.kv_heads, j), sums);
  });
  if (pieces == 1) return true;
  constexpr int64_t kRows = 64;  // that are added up at a time
  const int64_t parts = (p.rows + kRows - 1) / kRows;
  ParallelFor(pool, heads * parts, threads, [&](int64_t i) {
    const Sums to = sums_of(i % heads, 0);
    const int64_t begin = i / heads * kRows, end = std::min(p.rows, begin + kRows);
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const Sums from = sums_of(i % heads, piece);
      for (int64_t r = begin; r < end; ++r)
        for (int64_t h = 0; h < H; ++h) {
          to.dk[r * to.row + h] += from.dk[r * from.row + h];
          to.dv[r * to.row + h] += from.dv[r * from.row + h];
        }
    }
  });
  return true;
}

}  // namespace packed_attention

#endif  // PEAGLE_PACKED_ATTENTION_H_
