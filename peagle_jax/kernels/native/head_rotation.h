// Norms of heads of queries or keys, and their rotation, for decoding on a CPU.
//
//     a, b = the halves of gain * norm(head);  y = [a cos - b sin, b cos + a sin]
//
// Shapes: x and y [n, N, H], of n tokens; cos and sin [n, H/2]; gain [H], or null where heads have
// no norm. All are float32, and H/2 is a multiple of kLanes.

#ifndef PEAGLE_HEAD_ROTATION_H_
#define PEAGLE_HEAD_ROTATION_H_

#include <cstdint>

#include "parallel_for.h"
#include "row_preparation.h"
#include "vectors.h"

namespace head_rotation {

// Numbers for each thread: fewer are rotated sooner than another thread wakes up.
constexpr int64_t kLeastNumbers = 16 << 10;

struct Problem {
  const float *x, *gain, *cos, *sin;
  int64_t tokens, heads, head_dim;
  float eps;
  float* y;
};

inline void Rotate(const float* x, const float* gain, const float* cos, const float* sin,
                   int64_t head_dim, float eps, float* y) {
  const int64_t half = head_dim / 2;
  const float factor = gain ? row_preparation::NormFactor(x, head_dim, eps) : 1;
  for (int64_t i = 0; i < half; i += kLanes) {
    Floats a = Load<Floats>(x + i), b = Load<Floats>(x + half + i);
    if (gain) {
      a = Load<Floats>(gain + i) * (a * factor);
      b = Load<Floats>(gain + half + i) * (b * factor);
    }
    const Floats c = Load<Floats>(cos + i), s = Load<Floats>(sin + i);
    Store(y + i, MultiplyAdd(a, c, -(b * s)));
    Store(y + half + i, MultiplyAdd(b, c, a * s));
  }
}

// All heads of all tokens, which threads divide.
inline void Run(xla::ffi::ThreadPool& pool, const Problem& p) {
  const int64_t H = p.head_dim, numbers = p.tokens * p.heads * H;
  ParallelFor(pool, p.tokens, NumThreads(pool, numbers, kLeastNumbers), [&](int64_t t) {
    for (int64_t i = t * p.heads; i < (t + 1) * p.heads; ++i)
      Rotate(p.x + i * H, p.gain, p.cos + t * H / 2, p.sin + t * H / 2, H, p.eps, p.y + i * H);
  });
}

}  // namespace head_rotation

#endif  // PEAGLE_HEAD_ROTATION_H_
