// Any machine: four-lane vectors of the compiler, no intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

namespace sb {
namespace SB_ISA {
namespace {

// The register tile of the matrix products: rows, and columns in units of 16.
constexpr int kTileM = 3;
constexpr int kTileN = 1;

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float ToFloat(Bf16 x) { return FloatOf(static_cast<uint32_t>(x.bits) << 16); }
__attribute__((noinline)) Bf16 ToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// Not inlined: sixteen copies of these in every loop would take long to compile.
__attribute__((noinline)) float ToFloat(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | magnitude << 13);
  // As an integer of 10 fraction bits scaled by 2^112, which also normalises what was denormal.
  return FloatOf(sign | BitsOf(FloatOf(magnitude << 13) * 0x1p112f));
}
__attribute__((noinline)) Fp16 ToFp16(float x) {
  const uint32_t bits = BitsOf(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000)
    return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more: infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14: adding 0.5 leaves units of 2^-24 in the low bits, rounded to nearest even.
    const uint32_t units = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000;
    return {static_cast<uint16_t>(sign | units)};
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

namespace reg {

typedef float Float __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline Float Load(const float* p) {
  Float x;
  std::memcpy(&x, p, 16);
  return x;
}
inline Float Load(const Bf16* p) {
  return Float{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
inline Float Load(const Fp16* p) {
  return Float{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
inline void Store(float* p, Float x) { std::memcpy(p, &x, 16); }
inline void Store(Bf16* p, Float x) {
  for (int i = 0; i < 4; ++i) p[i] = ToBf16(x[i]);
}
inline void Store(Fp16* p, Float x) {
  for (int i = 0; i < 4; ++i) p[i] = ToFp16(x[i]);
}
inline Float Set1(float x) { return Float{x, x, x, x}; }
inline Float Add(Float a, Float b) { return a + b; }
inline Float Sub(Float a, Float b) { return a - b; }
inline Float Mul(Float a, Float b) { return a * b; }
inline Float Fma(Float a, Float b, Float c) { return a * b + c; }
inline Float Max(Float a, Float b) { return a > b ? a : b; }
inline Float Min(Float a, Float b) { return a < b ? a : b; }
inline Mask FirstLanes(int n) { return Mask{n, n, n, n} > Mask{0, 1, 2, 3}; }
inline Float Select(Mask m, Float yes, Float no) { return m ? yes : no; }
inline Mask Greater(Float a, Float b) { return a > b; }
inline Float AddWhere(Mask m, Float a, Float b) { return m ? a + b : a; }
inline uint32_t GreaterBits(Float a, Float b) {
  const Mask m = a > b;
  return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u);
}
// p * 2^whole, or 0 where x < -126; the low bits of `shifted` are the whole number.
inline Float TimesPowerOf2(Float p, Float /*whole*/, Float shifted, Float x) {
  typedef uint32_t Word __attribute__((vector_size(16)));  // wraps around, as it must
  Word bits, exponent;
  std::memcpy(&bits, &p, 16);
  std::memcpy(&exponent, &shifted, 16);
  bits += exponent << 23;
  Float r;
  std::memcpy(&r, &bits, 16);
  r = x < Set1(-126.0f) ? Set1(0.0f) : r;
  return x == x ? r : x;
}

}  // namespace reg
}  // namespace
}  // namespace SB_ISA
}  // namespace sb
