// PTX instructions in C++, for kernels that tests/cuda/ptx/translate.py translates from what nvcc
// wrote. Each does what the PTX ISA says of it; registers are plain variables.
//
// An address of shared memory is a byte's number within the block's allocation; one of global
// memory, and a generic one, is the host's.
#pragma once

#include <limits>
#include <type_traits>

#include "emulator/emulator.h"

#define PTX_INLINE inline __attribute__((always_inline))

namespace emulator {
namespace ptx {

// A kernel's argument, one struct by value: passed as the kernel's own type would be.
template <size_t kBytes>
struct Parameters {
  alignas(8) unsigned char bytes[kBytes];
};

[[noreturn]] inline void NotTranslated(const char* kernel) {
  Fail("ptx", 0, "%s runs, which was not among the kernels to translate", kernel);
}

template <class To, class From>
PTX_INLINE To Bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// ---- arithmetic ----

template <class T, class = void>
struct Wrapping {  // the type to add in, where overflow is no error
  using Type = T;
};
template <class T>
struct Wrapping<T, std::enable_if_t<std::is_integral<T>::value>> {
  using Type = std::make_unsigned_t<T>;
};
template <class T>
using Wrap = typename Wrapping<T>::Type;

template <size_t kBytes, bool kSigned>
struct Integer;
template <>
struct Integer<4, true> {
  using Type = int32_t;
};
template <>
struct Integer<4, false> {
  using Type = uint32_t;
};
template <>
struct Integer<8, true> {
  using Type = int64_t;
};
template <>
struct Integer<8, false> {
  using Type = uint64_t;
};
template <>
struct Integer<16, true> {
  using Type = __int128;
};
template <>
struct Integer<16, false> {
  using Type = unsigned __int128;
};
template <class T>
using Wide = typename Integer<2 * sizeof(T), std::is_signed<T>::value>::Type;

template <class T>
PTX_INLINE T Add(T a, T b) {
  return static_cast<T>(static_cast<Wrap<T>>(a) + static_cast<Wrap<T>>(b));
}
template <class T>
PTX_INLINE T Subtract(T a, T b) {
  return static_cast<T>(static_cast<Wrap<T>>(a) - static_cast<Wrap<T>>(b));
}
template <class T>
PTX_INLINE T Multiply(T a, T b) {
  using Large = std::conditional_t<std::is_integral<T>::value, uint64_t, T>;
  return static_cast<T>(static_cast<Large>(a) * static_cast<Large>(b));
}
template <class T>
PTX_INLINE Wide<T> MultiplyWide(T a, T b) {
  return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b);
}
template <class T>
PTX_INLINE T MultiplyHigh(T a, T b) {
  return static_cast<T>(MultiplyWide(a, b) >> (8 * sizeof(T)));
}
template <class T>
PTX_INLINE T MultiplyAdd(T a, T b, T c) {
  return Add(Multiply(a, b), c);
}
template <class T>
PTX_INLINE Wide<T> MultiplyAddWide(T a, T b, Wide<T> c) {
  return Add(MultiplyWide(a, b), c);
}
template <class T>
PTX_INLINE T FusedMultiplyAdd(T a, T b, T c) {
  return std::fma(a, b, c);
}
// An integer divided by zero is "unspecified and machine-specific".
template <class T>
PTX_INLINE T Divide(T a, T b) {
  if constexpr (std::is_integral<T>::value) {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed<T>::value && b == static_cast<T>(-1)) return Subtract(T{0}, a);
  }
  return a / b;
}
template <class T>
PTX_INLINE T Remainder(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if (std::is_signed<T>::value && b == static_cast<T>(-1)) return 0;
  return a % b;
}
template <class T>
PTX_INLINE T Minimum(T a, T b) {
  if constexpr (std::is_floating_point<T>::value) return std::fmin(a, b);
  return b < a ? b : a;
}
template <class T>
PTX_INLINE T Maximum(T a, T b) {
  if constexpr (std::is_floating_point<T>::value) return std::fmax(a, b);
  return a < b ? b : a;
}
template <class T>
PTX_INLINE T Negate(T a) {
  if constexpr (std::is_floating_point<T>::value) return -a;
  return Subtract(T{0}, a);
}
template <class T>
PTX_INLINE T Absolute(T a) {
  return a < 0 ? Negate(a) : a;
}
PTX_INLINE float Absolute(float a) { return std::fabs(a); }
PTX_INLINE double Absolute(double a) { return std::fabs(a); }
template <class T>
PTX_INLINE T And(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
PTX_INLINE T Or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
PTX_INLINE T Xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
PTX_INLINE T Not(T a) {
  return static_cast<T>(~a);
}
PTX_INLINE bool Not(bool a) { return !a; }
template <class T>
PTX_INLINE T Select(T a, T b, bool first) {
  return first ? a : b;
}
// More than all bits may be asked for.
template <class T>
PTX_INLINE T ShiftLeft(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Wrap<T>>(a) << by);
}
template <class T>
PTX_INLINE T ShiftRight(T a, uint32_t by) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (by > most) return static_cast<T>(a < 0 ? -1 : 0);
  return static_cast<T>(a >> by);
}
PTX_INLINE uint32_t CountOnes(uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); }
PTX_INLINE uint32_t CountOnes(uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
PTX_INLINE uint32_t InsertBits(uint32_t a, uint32_t into, uint32_t at, uint32_t count) {
  at &= 255;
  count &= 255;
  const uint32_t bits = count >= 32 ? ~0u : (1u << count) - 1;
  const uint32_t mask = ShiftLeft(bits, at);
  return (into & ~mask) | (ShiftLeft(a, at) & mask);
}
// prmt without a mode: four bytes picked from b:a, each perhaps as eight copies of its sign.
PTX_INLINE uint32_t PickBytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t from = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = which >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(from >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

PTX_INLINE float FlushToZero(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
// Beyond the integers' range: the nearest of them; NaN: the lowest, as the PTX ISA has it.
PTX_INLINE int64_t TowardZero(double x) {
  if (!(x >= -0x1p63)) return INT64_MIN;
  return x >= 0x1p63 ? INT64_MAX : static_cast<int64_t>(x);
}
PTX_INLINE float Reciprocal(float x) { return 1.0f / x; }
PTX_INLINE float Exp2(float x) {
  CountExponential();
  return FlushToZero(exp2f(x));
}
PTX_INLINE float Log2(float x) { return log2f(FlushToZero(x)); }

PTX_INLINE float WidenHalf(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, digits = half & 1023;
  if (exponent == 31) return Bits<float>(sign | 0x7f800000u | digits << 13);
  if (exponent > 0) return Bits<float>(sign | (exponent + 112) << 23 | digits << 13);
  return std::copysign(static_cast<float>(digits) * 0x1p-24f, Bits<float>(sign));
}
// Rounded to nearest even, as any conversion is that rounds.
inline uint16_t NarrowToBf16(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = Bits<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t NarrowToHalf(float x) {
  if (x != x) return 0x7fff;
  const uint32_t sign = Bits<uint32_t>(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent;
  std::frexp(size, &exponent);
  // Of the smallest normal number; zero has none of its own.
  exponent = size == 0 || exponent < -13 ? -13 : exponent;
  // In units of the last digit; what rounds up to the next power of two carries into the exponent.
  const auto digits = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent + 13) * 1024 + digits));
}
PTX_INLINE uint32_t PackBf16(float high, float low) {
  return static_cast<uint32_t>(NarrowToBf16(high)) << 16 | NarrowToBf16(low);
}
PTX_INLINE uint32_t PackHalf(float high, float low) {
  return static_cast<uint32_t>(NarrowToHalf(high)) << 16 | NarrowToHalf(low);
}

// ---- memory ----

PTX_INLINE unsigned char* SharedAddress(uint32_t at, size_t bytes, const char* file, int line) {
  unsigned char* address = SharedMemory() + at;
  if (!IsShared(address, bytes)) Fail(file, line, "byte %u is not in shared memory", at);
  return address;
}
PTX_INLINE unsigned char* GlobalAddress(uint64_t at, size_t bytes, const char* file, int line) {
  unsigned char* address = reinterpret_cast<unsigned char*>(at);
  if (IsShared(address, bytes))
    Fail(file, line, "an address of shared memory, %p, is used as one of global memory",
         static_cast<void*>(address));
  return address;
}
PTX_INLINE unsigned char* GenericAddress(uint64_t at, size_t, const char*, int) {
  return reinterpret_cast<unsigned char*>(at);
}
PTX_INLINE uint64_t SharedToGeneric(uint64_t at) {
  return reinterpret_cast<uint64_t>(SharedMemory()) + at;
}
PTX_INLINE uint64_t GenericToShared(uint64_t at) {
  return at - reinterpret_cast<uint64_t>(SharedMemory());
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T x[kCount];
};
template <class V>
PTX_INLINE void CheckAligned(const void* address, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(V) != 0)
    Fail(file, line, "misaligned access of %d bytes at %p", static_cast<int>(sizeof(V)), address);
}
template <class V>
PTX_INLINE V Load(const unsigned char* address, const char* file, int line) {
  CheckAligned<V>(address, file, line);
  return *reinterpret_cast<const V*>(address);
}
template <class V>
PTX_INLINE void Store(unsigned char* address, const V& value, const char* file, int line) {
  CheckAligned<V>(address, file, line);
  *reinterpret_cast<V*>(address) = value;
}

// Relaxed; returns what was there.
template <class T, class Combine>
PTX_INLINE T Atomic(unsigned char* address, T value, Combine combine, const char* file, int line) {
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  CheckAligned<T>(address, file, line);
  CountAtomic();
  Word* word = reinterpret_cast<Word*>(address);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, Bits<Word>(combine(Bits<T>(old), value)), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  MaybeYield();
  return Bits<T>(old);
}

PTX_INLINE void CopyAsync(uint32_t target, uint64_t source, int size, int bytes, const char* file,
                          int line) {
  if (size != 16) Fail(file, line, "cp.async of %d bytes", size);
  CopyAsync16(SharedAddress(target, 16, file, line), reinterpret_cast<const void*>(source), bytes,
              file, line);
}

// ---- warps ----

enum class Direction { kUp, kDown, kAcross, kIndex };

struct Shuffled {
  uint32_t value;
  bool inside;
};
inline Shuffled ShuffleLanes(Direction how, uint32_t value, uint32_t by, uint32_t clamp,
                             uint32_t mask, const char* file, int line) {
  const int lane = static_cast<int>(Lane()), segment = static_cast<int>(clamp >> 8 & 31);
  const int other = static_cast<int>(by & 31), bound = static_cast<int>(clamp & 31);
  const int lowest = lane & segment, last = lowest | (bound & ~segment);
  int from = lane;
  bool inside = true;
  if (how == Direction::kUp) {
    from = lane - other;
    inside = from >= last;
  } else {
    if (how == Direction::kDown) from = lane + other;
    if (how == Direction::kAcross) from = lane ^ other;
    if (how == Direction::kIndex) from = lowest | (other & ~segment);
    inside = from <= last;
  }
  Shuffle shuffle{value, inside ? from : lane, 0};
  Collective(Op::kShuffle, mask, &shuffle, file, line);
  return {static_cast<uint32_t>(shuffle.result), inside};
}
inline uint32_t Vote(bool predicate, uint32_t mask, const char* file, int line) {
  Reduce reduce{predicate, 0};
  Collective(Op::kBallot, mask, &reduce, file, line);
  return reduce.result;
}
inline uint32_t Sum(uint32_t value, uint32_t mask, const char* file, int line) {
  Reduce reduce{value, 0};
  Collective(Op::kSum, mask, &reduce, file, line);
  return reduce.result;
}
PTX_INLINE void LoadMatrices(uint32_t (&result)[4], uint32_t at, bool transposed, const char* file,
                             int line) {
  const unsigned char* row = SharedAddress(at, 16, file, line);
  if (at % 16 != 0) Fail(file, line, "ldmatrix: misaligned address %u", at);
  LoadMatrix load{*reinterpret_cast<const uint4*>(row), row, result, transposed};
  Collective(Op::kLoadMatrix, ~0u, &load, file, line);
}
PTX_INLINE void MultiplyMatrices(Op op, float (&sum)[4], const uint32_t (&a)[4],
                                 const uint32_t (&b)[2], const char* file, int line) {
  Mma mma{a, b, sum};
  Collective(op, ~0u, &mma, file, line);
}

}  // namespace ptx
}  // namespace emulator
