// What becomes of rows before they are multiplied: an RMS norm, or the gate of an MLP.

#ifndef PEAGLE_ROW_PREPARATION_H_
#define PEAGLE_ROW_PREPARATION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace row_preparation {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// Where rows come from. At most one of `gain` and `up` is there.
struct Source {
  const float* x;  // [rows, size]
  int64_t size;
  const float* gain = nullptr;  // [size]: rows are normalized, and then multiplied by it
  float eps = 0;                // of the norm
  const float* up = nullptr;    // [rows, size]: a row becomes activation(x) * up
  Activation activation = Activation::kSilu;
};

// Calls of(i, count) for each vector of `size` numbers: where it begins, and its numbers.
template <typename Body>
inline void ForVectors(int64_t size, const Body& of) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) of(i, kLanes);
  if (i < size) of(i, static_cast<int>(size - i));
}

// The first `count` lanes; the others are 0.
inline Floats LoadPart(const float* from, int count) {
  if (count == kLanes) return Load<Floats>(from);
  Floats value = {};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void StorePart(float* to, Floats value, int count) {
  if (count == kLanes) return Store(to, value);
  std::memcpy(to, &value, count * sizeof(float));
}

// The factor that scales `size` numbers to a root mean square of 1.
inline float NormFactor(const float* x, int64_t size, float eps) {
  Floats sums = {};
  ForVectors(size, [&](int64_t i, int count) {
    const Floats value = LoadPart(x + i, count);
    sums = MultiplyAdd(value, value, sums);
  });
  float sum = 0;
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  return 1 / std::sqrt(sum / size + eps);
}

// x / (1 + exp(-z)), of which only exp(-|z|) is computed.
inline Floats TimesSigmoid(Floats x, Floats z) {
  const Floats e = Exp(z < 0.0f ? z : -z);
  return x * (z < 0.0f ? e : Broadcast(1)) / (1.0f + e);
}

inline Floats Activate(Activation activation, Floats x) {
  if (activation == Activation::kSilu) return TimesSigmoid(x, x);
  // 1 + tanh(u) is 2 / (1 + exp(-2 u))
  return TimesSigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x));
}

// Writes row r.
inline void Prepare(const Source& source, int64_t r, float* y) {
  const int64_t size = source.size;
  const float* x = source.x + r * size;
  if (source.gain) {
    const float factor = NormFactor(x, size, source.eps);
    ForVectors(size, [&](int64_t i, int count) {
      StorePart(y + i, LoadPart(source.gain + i, count) * (LoadPart(x + i, count) * factor), count);
    });
  } else if (source.up) {
    const float* up = source.up + r * size;
    ForVectors(size, [&](int64_t i, int count) {
      const Floats gate = Activate(source.activation, LoadPart(x + i, count));
      StorePart(y + i, gate * LoadPart(up + i, count), count);
    });
  } else {
    std::memcpy(y, x, size * sizeof(float));
  }
}

}  // namespace row_preparation

#endif  // PEAGLE_ROW_PREPARATION_H_
