// Vectors of float32 as GCC and Clang have them for every processor, and what is made of them.

#ifndef PEAGLE_VECTORS_H_
#define PEAGLE_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
#endif

// before a loop whose numbers shall stay in registers
#if defined(__clang__)
#define PEAGLE_UNROLL _Pragma("unroll")
#else
#define PEAGLE_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

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

// b where a is NaN
inline Floats Larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x of at most 0, to 2e-7 of itself; 0 below -87, where float32 has no normal numbers.
// x = n log(2) + r, and exp(r) by its Taylor series, of which r^7 / 7! is below 2^-29.
inline Floats Exp(Floats x) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
  const Floats shifted = x * 1.44269504f + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log(2) in two parts
  Floats y = Floats{} + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + factor;
  const Integers exponent = ((Integers)shifted << 23) + (127 << 23);
  return x < -87.0f ? Floats{} : y * (Floats)exponent;
}

// The numbers J of a, or of b where a bit D of J is set, so that D-th neighbours change places.
template <int D, int... J>
inline void Exchange(Floats& a, Floats& b, std::integer_sequence<int, J...>) {
#if defined(__clang__)
  const Floats first = __builtin_shufflevector(a, b, (J & D ? kLanes + J - D : J)...);
  b = __builtin_shufflevector(a, b, (J & D ? kLanes + J : J + D)...);
#else  // GCC knows the other name since version 12 alone
  const Floats first = __builtin_shuffle(a, b, Integers{(J & D ? kLanes + J - D : J)...});
  b = __builtin_shuffle(a, b, Integers{(J & D ? kLanes + J : J + D)...});
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

#endif  // PEAGLE_VECTORS_H_
