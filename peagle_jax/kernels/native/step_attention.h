// Attention of queries over the KV caches of their sequences, for decoding on a CPU.
//
//     k[first + i], v[first + i] = new_k[i], new_v[i]
//     scores[t, s] = scale * q[t] . k[s] + mask[t, s];  y[t] = softmax(scores[t]) v
//
// Shapes: q and y [B, T, N, H]; new_k and new_v [B, I, G, H], or null where nothing is new; first
// [B]; k and v [B, G, S, H]; mask [B, T, S], which is 0 where a query sees a slot and at most -1e30
// elsewhere. Numbers are float32; those of k and v may be bfloat16, to which new ones are rounded
// then. `first` has whole numbers. Heads are grouped, N / G of them to a KV head. Tokens are
// divided into blocks, of which each reads slots from the first to the last that any of its queries
// sees. A query's result depends on its row of the mask and these slots, and on no other query.
// (The weight of a slot that only others see is 0, and 0 times NaN is NaN.)

#ifndef PEAGLE_STEP_ATTENTION_H_
#define PEAGLE_STEP_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel_for.h"
#include "vectors.h"

namespace step_attention {

// Queries of a block, whose scores of kLanes slots fill the registers.
constexpr int kScoreRows = kRegisters - 8;
// Vectors of a value that are summed at once, and queries of a block, whose sums then fill them.
constexpr int kPieces = 4;
constexpr int kValueRows = kRegisters / 5;
// Slots whose values stay in the fastest cache while all queries pass.
constexpr int64_t kSlots = 128;
// Queries of a block of tokens, all heads that read a KV head, whose scores stay in a larger cache.
constexpr int64_t kBlockRows = 64;
// Numbers of keys and values for each thread: fewer are read sooner than another thread wakes up.
constexpr int64_t kLeastNumbers = 8 << 10;
// What the mask adds where nothing is seen, and a bound that tells this from 0.
constexpr float kMasked = -1e30f, kSeesNothing = -1e29f;

// The caches' numbers are `Number`s: float, or uint16_t for the bits of bfloat16.
template <typename Number>
struct Problem {
  int64_t batch, tokens, heads, kv_heads, slots, head_dim;
  const float *q, *mask;
  Number *k, *v;
  const float *new_k = nullptr, *new_v = nullptr;
  const int32_t* first = nullptr;
  int64_t num_new = 0;
  const float* sinks;  // [N], or null: one more logit of each head, without a value
  float scale;
  float* y;
};

// Scores of kRows queries and kLanes slots, whose keys are columns: `keys` is [H, kLanes].
template <int kRows>
void Scores(int64_t rows, const float* q, const float* keys, int64_t head_dim, float* scores,
            int64_t stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return Scores<kRows - 1>(rows, q, keys, head_dim, scores, stride);
  Floats sums[kRows] = {};
  for (int64_t h = 0; h < head_dim; ++h) {
    const Floats key = Load<Floats>(keys + h * kLanes);
    PEAGLE_UNROLL
    for (int r = 0; r < kRows; ++r)
      sums[r] = MultiplyAdd(Broadcast(q[r * head_dim + h]), key, sums[r]);
  }
  PEAGLE_UNROLL
  for (int r = 0; r < kRows; ++r) Store(scores + r * stride, sums[r]);
}

// Adds to kRows sums of values those of `count` slots, by their weights; kVectors of each value.
template <int kRows, int kVectors, typename Number>
void AddValues(int64_t rows, const float* weights, int64_t stride, const Number* v, int64_t count,
               int64_t head_dim, float* sums) {
  if constexpr (kRows > 1)
    if (rows < kRows)
      return AddValues<kRows - 1, kVectors>(rows, weights, stride, v, count, head_dim, sums);
  Floats all[kRows][kVectors];
  PEAGLE_UNROLL
  for (int r = 0; r < kRows; ++r)
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) all[r][i] = Load<Floats>(sums + r * head_dim + i * kLanes);
  for (int64_t s = 0; s < count; ++s) {
    Floats value[kVectors];
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) value[i] = LoadNumbers(v + s * head_dim + i * kLanes);
    PEAGLE_UNROLL
    for (int r = 0; r < kRows; ++r)
      PEAGLE_UNROLL
      for (int i = 0; i < kVectors; ++i)
        all[r][i] = MultiplyAdd(Broadcast(weights[r * stride + s]), value[i], all[r][i]);
  }
  PEAGLE_UNROLL
  for (int r = 0; r < kRows; ++r)
    PEAGLE_UNROLL
    for (int i = 0; i < kVectors; ++i) Store(sums + r * head_dim + i * kLanes, all[r][i]);
}

// Adds to the sums of all rows the values of some slots, by their weights.
template <typename Number>
void AddSlots(int64_t rows, const float* weights, int64_t stride, const Number* v, int64_t count,
              int64_t head_dim, float* sums) {
  constexpr int64_t kWidth = kPieces * kLanes;
  for (int64_t r = 0; r < rows; r += kValueRows) {
    const int64_t num_rows = std::min<int64_t>(kValueRows, rows - r);
    const float* of_rows = weights + r * stride;
    float* to = sums + r * head_dim;
    int64_t h = 0;
    for (; h + kWidth <= head_dim; h += kWidth)
      AddValues<kValueRows, kPieces>(num_rows, of_rows, stride, v + h, count, head_dim, to + h);
    for (; h < head_dim; h += kLanes)
      AddValues<kValueRows, 1>(num_rows, of_rows, stride, v + h, count, head_dim, to + h);
  }
}

// Scores become weights exp(score - largest), whose sum is returned; `sink` may be null.
inline float ToWeights(float* scores, int64_t count, const float* mask, float scale,
                       const float* sink) {
  Floats largest = Broadcast(-3e38f);
  for (int64_t s = 0; s < count; s += kLanes) {
    const Floats score = Load<Floats>(scores + s) * scale + Load<Floats>(mask + s);
    Store(scores + s, score);
    largest = Max(score, largest);
  }
  float top = sink ? *sink : -3e38f;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) top = std::max(top, largest[i]);
  Floats sums = {};
  for (int64_t s = 0; s < count; s += kLanes) {
    // a query that sees nothing gets no weights, though all of its scores are the largest
    const Floats score = Load<Floats>(scores + s), masked = Load<Floats>(mask + s);
    const Floats weight = masked < kSeesNothing ? Floats{} : Exp(score - top);
    Store(scores + s, weight);
    sums += weight;
  }
  float sum = 0;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  return sink ? sum + Exp(Broadcast(*sink - top))[0] : sum;
}

struct Span {
  int64_t begin, end;
};

// The slots that any query of these tokens sees, from a whole number of vectors on.
template <typename Number>
Span Visible(const Problem<Number>& p, int64_t b, Span tokens) {
  int64_t begin = p.slots, end = 0;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* row = p.mask + (b * p.tokens + t) * p.slots;
    int64_t first = 0, last = p.slots;
    while (first < begin && row[first] != 0) ++first;
    while (last > end && row[last - 1] != 0) --last;
    begin = std::min(begin, first), end = std::max(end, last);
  }
  return {std::min(begin, end) / kLanes * kLanes, end};
}

template <typename Number>
inline Number AsStored(float x) {
  if constexpr (sizeof(Number) == 4) return x;
  return static_cast<Number>(Rounded(x));
}

// Keys and values of new tokens of one KV head of one sequence go to its cache.
template <typename Number>
void Write(const Problem<Number>& p, int64_t b, int64_t g) {
  const int64_t last = std::max<int64_t>(0, p.slots - p.num_new), H = p.head_dim;
  const int64_t first = std::clamp<int64_t>(p.first[b], 0, last);  // as XLA's updates, from 0 on
  for (int64_t i = 0; i < std::min(p.num_new, p.slots); ++i) {
    const int64_t from = ((b * p.num_new + i) * p.kv_heads + g) * H;
    const int64_t to = ((b * p.kv_heads + g) * p.slots + first + i) * H;
    for (int64_t h = 0; h < H; ++h) {
      p.k[to + h] = AsStored<Number>(p.new_k[from + h]);
      p.v[to + h] = AsStored<Number>(p.new_v[from + h]);
    }
  }
}

// One KV head of one sequence, and the query heads that read it, of some tokens.
template <typename Number>
void Attend(const Problem<Number>& p, int64_t b, int64_t g, Span tokens, Span span) {
  const int64_t group = p.heads / p.kv_heads, T = tokens.end - tokens.begin, rows = group * T;
  const int64_t H = p.head_dim, first_token = b * p.tokens + tokens.begin;
  const float* mask = p.mask + first_token * p.slots;
  const int64_t begin = span.begin, count = span.end - span.begin;
  const int64_t stride = (count + kLanes - 1) / kLanes * kLanes + kLanes;
  // queries, sums of values, scores, the mask with whole vectors, keys as columns, sums of weights,
  // values of kSlots
  Scratch<float> scratch(rows * (2 * H + stride + 1) + T * stride + H * (kLanes + kSlots));
  float* q = scratch.data();
  float* sums = q + rows * H;
  float* scores = sums + rows * H;
  float* mask_rows = scores + rows * stride;
  float* keys = mask_rows + T * stride;
  float* totals = keys + H * kLanes;
  float* values = totals + rows;
  for (int64_t t = 0; t < T; ++t) {
    float* mask_row = mask_rows + t * stride;
    std::memcpy(mask_row, mask + t * p.slots + begin, count * sizeof(float));
    std::fill(mask_row + count, mask_row + stride, kMasked);
    for (int64_t r = 0; r < group; ++r)
      std::memcpy(q + (r * T + t) * H,
                  p.q + ((first_token + t) * p.heads + g * group + r) * H, H * sizeof(float));
  }
  std::fill(sums, sums + rows * H, 0.0f);
  const Number* k = p.k + (b * p.kv_heads + g) * p.slots * H;
  const Number* v = p.v + (b * p.kv_heads + g) * p.slots * H;
  for (int64_t s = 0; s < count; s += kLanes) {
    for (int64_t h = 0; h < H; h += kLanes) {
      Floats square[kLanes];
      PEAGLE_UNROLL
      for (int i = 0; i < kLanes; ++i)  // past the end of the cache its last slot again
        square[i] = LoadNumbers(k + std::min(begin + s + i, p.slots - 1) * H + h);
      Transpose(square);
      PEAGLE_UNROLL
      for (int i = 0; i < kLanes; ++i) Store(keys + (h + i) * kLanes, square[i]);
    }
    for (int64_t r = 0; r < rows; r += kScoreRows)
      Scores<kScoreRows>(std::min<int64_t>(kScoreRows, rows - r), q + r * H, keys, H,
                         scores + r * stride + s, stride);
  }
  for (int64_t r = 0; r < rows; ++r)
    totals[r] = ToWeights(scores + r * stride, count, mask_rows + r % T * stride, p.scale,
                          p.sinks ? p.sinks + g * group + r / T : nullptr);
  for (int64_t s = 0; s < count; s += kSlots) {
    const int64_t num_slots = std::min(kSlots, count - s);
    const Number* from = v + (begin + s) * H;
    if (sizeof(Number) == 4 || rows <= kValueRows) {
      AddSlots(rows, scores + s, stride, from, num_slots, H, sums);
      continue;
    }
    for (int64_t h = 0; h < num_slots * H; h += kLanes)  // once for all passes
      Store(values + h, LoadNumbers(from + h));
    AddSlots(rows, scores + s, stride, values, num_slots, H, sums);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* y = p.y + ((first_token + r % T) * p.heads + g * group + r / T) * H;
    const float factor = totals[r] == 0 ? 0 : 1 / totals[r];
    for (int64_t h = 0; h < H; ++h) y[h] = sums[r * H + h] * factor;
  }
}

// All sequences, heads and blocks of tokens, which threads divide.
template <typename Number>
void Run(xla::ffi::ThreadPool& pool, const Problem<Number>& p) {
  const int64_t group = p.heads / p.kv_heads, size = std::max<int64_t>(1, kBlockRows / group);
  const int64_t blocks = (p.tokens + size - 1) / size, heads = p.batch * p.kv_heads;
  std::vector<Span> tokens, spans;
  int64_t numbers = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < blocks; ++i) {  // of nearly equal sizes
      tokens.push_back({p.tokens * i / blocks, p.tokens * (i + 1) / blocks});
      spans.push_back(Visible(p, b, tokens.back()));
      numbers += 2 * p.kv_heads * p.head_dim * (spans.back().end - spans.back().begin);
    }
  const int64_t threads = NumThreads(pool, numbers, kLeastNumbers);
  const auto write = [&](int64_t i) { Write(p, i / p.kv_heads, i % p.kv_heads); };
  if (p.num_new && blocks != 1) ParallelFor(pool, heads, threads, write);
  ParallelFor(pool, heads * blocks, threads, [&](int64_t i) {
    const int64_t head = i % heads, b = head / p.kv_heads, g = head % p.kv_heads;
    if (p.num_new && blocks == 1) write(head);
    const int64_t block = b * blocks + i / heads;
    Attend(p, b, g, tokens[block], spans[block]);
  });
}

}  // namespace step_attention

#endif  // PEAGLE_STEP_ATTENTION_H_
