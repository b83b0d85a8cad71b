// Vectors of 16 floats on whatever registers the instruction set has; everything above this file is
// the same for all.
//
// A build defines SB_ISA as baseline, avx2 or avx512; the name is also the namespace, so that
// nothing the linker sees is shared between instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#define SB_ISA_INDEX_baseline 0
#define SB_ISA_INDEX_avx2 1
#define SB_ISA_INDEX_avx512 2
#define SB_PASTE_(a, b) a##b
#define SB_PASTE(a, b) SB_PASTE_(a, b)
#define SB_ISA_INDEX SB_PASTE(SB_ISA_INDEX_, SB_ISA)

namespace sb {
namespace SB_ISA {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

}  // namespace
}  // namespace SB_ISA
}  // namespace sb

#if SB_ISA_INDEX == 2
#include "attention/cpu/simd_avx512.h"
#elif SB_ISA_INDEX == 1
#include "attention/cpu/simd_avx2.h"
#else
#include "attention/cpu/simd_baseline.h"
#endif

namespace sb {
namespace SB_ISA {
namespace {

constexpr int kParts = 16 / reg::kLanes;

struct Vec {
  reg::Float part[kParts];
};
struct Mask {
  reg::Mask part[kParts];
};

template <class F>
inline Vec Each(F f) {
  Vec r;
  for (int i = 0; i < kParts; ++i) r.part[i] = f(i);
  return r;
}

template <class E>
inline Vec Load(const E* p) {
  return Each([=](int i) { return reg::Load(p + i * reg::kLanes); });
}
template <class E>
inline void Store(E* p, Vec x) {
  for (int i = 0; i < kParts; ++i) reg::Store(p + i * reg::kLanes, x.part[i]);
}
inline Vec Set1(float x) {
  return Each([=](int) { return reg::Set1(x); });
}
inline Vec Zero() { return Set1(0.0f); }
inline Vec Add(Vec a, Vec b) {
  return Each([&](int i) { return reg::Add(a.part[i], b.part[i]); });
}
inline Vec Sub(Vec a, Vec b) {
  return Each([&](int i) { return reg::Sub(a.part[i], b.part[i]); });
}
inline Vec Mul(Vec a, Vec b) {
  return Each([&](int i) { return reg::Mul(a.part[i], b.part[i]); });
}
inline Vec Fma(Vec a, Vec b, Vec c) {  // a * b + c
  return Each([&](int i) { return reg::Fma(a.part[i], b.part[i], c.part[i]); });
}
inline Vec Max(Vec a, Vec b) {  // b where either is NaN
  return Each([&](int i) { return reg::Max(a.part[i], b.part[i]); });
}
inline Vec Min(Vec a, Vec b) {  // b where either is NaN
  return Each([&](int i) { return reg::Min(a.part[i], b.part[i]); });
}
inline Mask FirstLanes(int n) {  // lanes [0, n); any n
  Mask m;
  for (int i = 0; i < kParts; ++i) m.part[i] = reg::FirstLanes(n - i * reg::kLanes);
  return m;
}
inline Vec Select(Mask m, Vec yes, Vec no) {
  return Each([&](int i) { return reg::Select(m.part[i], yes.part[i], no.part[i]); });
}
inline Mask Greater(Vec a, Vec b) {  // false where either is NaN
  Mask m;
  for (int i = 0; i < kParts; ++i) m.part[i] = reg::Greater(a.part[i], b.part[i]);
  return m;
}
inline Vec AddWhere(Mask m, Vec a, Vec b) {  // a + b in the lanes of m, else a
  return Each([&](int i) { return reg::AddWhere(m.part[i], a.part[i], b.part[i]); });
}
inline uint32_t GreaterBits(Vec a, Vec b) {
  uint32_t bits = 0;
  for (int i = 0; i < kParts; ++i)
    bits |= reg::GreaterBits(a.part[i], b.part[i]) << (i * reg::kLanes);
  return bits;
}

// 2^x for x <= 127, relative error 1e-7. Below -126 exactly 0: denormal probabilities would make
// every later multiply take a microcode assist. NaN stays NaN.
inline reg::Float Exp2(reg::Float x) {
  const reg::Float magic =
      reg::Set1(12582912.0f);  // 1.5 * 2^23: rounds to an integer, held in the low bits
  const reg::Float shifted = reg::Add(x, magic);
  const reg::Float whole = reg::Sub(shifted, magic);
  const reg::Float f = reg::Sub(x, whole);
  reg::Float p = reg::Set1(0x1.5c08e4p-10f);
  p = reg::Fma(p, f, reg::Set1(0x1.3d0c52p-7f));
  p = reg::Fma(p, f, reg::Set1(0x1.c6b6e4p-5f));
  p = reg::Fma(p, f, reg::Set1(0x1.ebf918p-3f));
  p = reg::Fma(p, f, reg::Set1(0x1.62e428p-1f));
  p = reg::Fma(p, f, reg::Set1(1.0f));
  return reg::TimesPowerOf2(p, whole, shifted, x);
}
inline Vec Exp2(Vec x) {
  return Each([&](int i) { return Exp2(x.part[i]); });
}

// Combines the lanes pairwise, in an order that is the same for all instruction sets.
template <class Op>
inline float Reduce(Vec x, Op op) {
  alignas(64) float v[16];
  Store(v, x);
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) v[i] = op(v[i], v[i + step]);
  return v[0];
}
inline float ReduceAdd(Vec x) {
  return Reduce(x, [](float a, float b) { return a + b; });
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
