// Vectors of float32: the extensions of GCC and Clang, and what they lack; bfloat16 in memory.

#ifndef PEAGLE_VECTORS_H_
#define PEAGLE_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Lanes of a vector, and registers for vectors.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

// before a loop over vectors that shall stay in registers
#if defined(__clang__)
#define PEAGLE_UNROLL _Pragma("unroll")
#else
#define PEAGLE_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <typename T>
inline T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
inline void Store(void* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// A vector of numbers that lie in memory as float32, or as the upper halves of such: bfloat16.
template <typename Number>
inline Floats LoadNumbers(const Number* from) {
  if constexpr (sizeof(Number) == 4) return Load<Floats>(from);
  return (Floats)(__builtin_convertvector(Load<Halves>(from), Words) << 16);
}

// A float32 number rounded to bfloat16, to the nearest, ties to even.
inline uint32_t Rounded(float x) {
  const uint32_t bits = Load<uint32_t>(&x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// x in every lane: x - 0 is x, where x + 0 would make 0 of -0.
inline Floats Broadcast(float x) { return x - Floats{}; }

// The larger number of each lane; b where a is NaN.
inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c. Always one instruction where there is one: a compiler that is free to choose rounds
// the product in some functions and not in others, and a row's sums would depend on the rows beside
// it.
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// exp(x) for x of at most 0, to 2e-7 of itself; 0 below -87, where float32 has no normal numbers.
// x = n log(2) + r, and exp(r) by its Taylor series, of which r^7 / 7! is below 2^-23.
inline Floats Exp(Floats x) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
  const Floats shifted = x * 1.44269504f + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log(2) in two parts
  Floats y = Broadcast(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + factor;
  const Integers exponent = ((Integers)shifted << 23) + (127 << 23);
  return x < -87.0f ? Floats{} : y * (Floats)exponent;
}

// A step of `Transpose`: where a bit D of a lane is set, a has b's lane D below, and b a's D above
// where it is not.
template <int D, int... Lane>
inline void Exchange(Floats& a, Floats& b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  const Floats first = __builtin_shufflevector(a, b, (Lane & D ? kLanes + Lane - D : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & D ? kLanes + Lane : Lane + D)...);
#else  // GCC has Clang's name since version 12
  const Floats first =
      __builtin_shuffle(a, b, Integers{(Lane & D ? kLanes + Lane - D : Lane)...});
  b = __builtin_shuffle(a, b, Integers{(Lane & D ? kLanes + Lane : Lane + D)...});
#endif
  a = first;
}

// Rows become columns.
template <int D = 1>
inline void Transpose(Floats (&rows)[kLanes]) {
  PEAGLE_UNROLL
  for (int i = 0; i < kLanes; ++i)
    if (!(i & D)) Exchange<D>(rows[i], rows[i + D], std::make_integer_sequence<int, kLanes>());
  if constexpr (2 * D < kLanes) Transpose<2 * D>(rows);
}

// Memory of a call, not initialized. Up to kMostKept numbers of it are the thread's, for its next
// call, too: a thread may have one Scratch of a type at a time.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) {
    static thread_local std::vector<T> kept;
    if (size > kMostKept) {
      own_.reset(new T[size]);
      data_ = own_.get();
    } else {
      if (static_cast<int64_t>(kept.size()) < size) kept.resize(size);
      data_ = kept.data();
    }
  }

  T* data() { return data_; }

 private:
  static constexpr int64_t kMostKept = 2 << 20;
  std::unique_ptr<T[]> own_;
  T* data_;
};

#endif  // PEAGLE_VECTORS_H_
