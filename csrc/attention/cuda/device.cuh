// The only kernel header that knows which compiler is at work: nvcc for a GPU, or the host compiler
// with csrc/emulator. Every PTX instruction that the kernels use is one small function here, with
// two bodies; there is no inline assembly anywhere else.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#define SB_DEVICE __device__ __forceinline__
#define SB_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SB_HERE

#else

#include "emulator/emulator.h"

#define SB_DEVICE inline
#define SB_SHARED(name) unsigned char* name = ::emulator::SharedMemory()
#define SB_HERE , EMULATOR_HERE

#endif

namespace sb {
namespace cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Bytes between the buffers of one shared allocation. AddressSanitizer finds what runs into a gap.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kGap = 128;
#else
constexpr int kGap = 0;
#endif

SB_DEVICE void PoisonGap([[maybe_unused]] unsigned char* gap) {
#if !defined(__CUDACC__)
  if (kGap > 0) ::emulator::Poison(gap, kGap);
#endif
}

// x itself, which the compiler cannot see: what is computed from it in a loop is not kept in
// registers from before the loop.
SB_DEVICE int Opaque(int x) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

SB_DEVICE float NegativeInfinity() { return __uint_as_float(0xff800000u); }

SB_DEVICE float Exp2(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  ::emulator::CountExponential();
  const float y = exp2f(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
#endif
}

SB_DEVICE float Log2(float x) {
#if defined(__CUDACC__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

#if !defined(__CUDACC__)
// Round to nearest even, as cvt.rn does.
inline uint32_t NarrowBf16(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}
inline uint32_t NarrowFp16(float x) {
  const uint32_t u = __float_as_uint(x), sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fffu;
  if (size >= 0x477ff000u) return sign | 0x7c00u;
  if (size < 0x38800000u)  // subnormal: in units of 2^-24
    return sign | static_cast<uint32_t>(std::nearbyint(std::fabs(x) * 0x1p24f));
  const uint32_t shifted = size - 0x38000000u;
  return sign | (shifted + 0xfffu + (shifted >> 13 & 1)) >> 13;
}
#endif

// The two storage types. Arithmetic is on floats and on packed pairs, low half first.
struct Bf16 {
  static constexpr int kTerms = 3;  // that together hold a float's digits
  SB_DEVICE static float Widen(uint32_t half) { return __uint_as_float(half << 16); }
  SB_DEVICE static float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
  SB_DEVICE static float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  SB_DEVICE static uint32_t Pack(float low, float high) {
#if defined(__CUDACC__)
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return NarrowBf16(low) | NarrowBf16(high) << 16;
#endif
  }
};

struct Fp16 {
  static constexpr int kTerms = 2;
  SB_DEVICE static float Widen(uint32_t half) {
#if defined(__CUDACC__)
    float x;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(half));
    return x;
#else
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, digits = half & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | digits << 13);
    if (exponent > 0) return __uint_as_float(sign | (exponent + 112) << 23 | digits << 13);
    const float x = static_cast<float>(digits) * 0x1p-24f;
    return sign != 0 ? -x : x;
#endif
  }
  SB_DEVICE static float Low(uint32_t pair) { return Widen(pair & 0xffffu); }
  SB_DEVICE static float High(uint32_t pair) { return Widen(pair >> 16); }
  SB_DEVICE static uint32_t Pack(float low, float high) {
#if defined(__CUDACC__)
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return NarrowFp16(low) | NarrowFp16(high) << 16;
#endif
  }
};

// sum [16, 8] += a [16, 16] b [16, 8], fp32 sums. Which lane holds what: PTX ISA, mma.m16n8k16.
template <class E>
SB_DEVICE void MultiplyAdd(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                           uint32_t b1 SB_HERE);

#if defined(__CUDACC__)
#define SB_MMA(type, name)                                                               \
  template <>                                                                            \
  SB_DEVICE void MultiplyAdd<type>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, \
                                   uint32_t b1) {                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                  \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"            \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));        \
  }
SB_MMA(Bf16, "bf16")
SB_MMA(Fp16, "f16")
#else
#define SB_MMA(type, op)                                                                           \
  template <>                                                                                      \
  inline void MultiplyAdd<type>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, \
                                const char* file, int line) {                                      \
    const uint32_t b[2] = {b0, b1};                                                                \
    ::emulator::Mma m{a, b, sum};                                                                  \
    ::emulator::Collective(::emulator::Op::op, kAllLanes, &m, file, line);                         \
  }
SB_MMA(Bf16, kMmaBf16)
SB_MMA(Fp16, kMmaFp16)
#endif
#undef SB_MMA

// Four 8x8 matrices of 16-bit numbers from shared memory; lane l has the address of row l % 8 of
// matrix l / 8.
template <bool kTransposed>
SB_DEVICE void LoadMatrices(uint32_t (&r)[4], const void* row SB_HERE) {
#if defined(__CUDACC__)
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#else
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    ::emulator::Fail(file, line, "ldmatrix: misaligned address %p", row);
  if (!::emulator::IsShared(row, 16))
    ::emulator::Fail(file, line, "ldmatrix: %p is no shared memory", row);
  ::emulator::LoadMatrix load{*static_cast<const uint4*>(row), row, r, kTransposed};
  ::emulator::Collective(::emulator::Op::kLoadMatrix, kAllLanes, &load, file, line);
#endif
}

// Copies 16 bytes from global to shared memory in the background; `bytes` of them are read, the
// rest becomes zero.
SB_DEVICE void CopyAsync(void* target, const void* source, int bytes SB_HERE) {
#if defined(__CUDACC__)
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
               "r"(bytes)
               : "memory");
#else
  ::emulator::CopyAsync16(target, source, bytes, file, line);
#endif
}

SB_DEVICE void CommitCopies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  ::emulator::CommitCopies();
#endif
}

// Waits until all of this thread's copies but those of the newest kKeep groups are done. Other
// threads see them after a __syncthreads.
template <int kKeep>
SB_DEVICE void WaitForCopies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kKeep) : "memory");
#else
  ::emulator::WaitForCopies(kKeep);
#endif
}

// Adds two numbers to consecutive places of global memory, each atomically.
SB_DEVICE void AtomicAdd2(float* p, float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a), "f"(b) : "memory");
#else
  atomicAdd(p, a);
  atomicAdd(p + 1, b);
#endif
}

}  // namespace cuda
}  // namespace sb
