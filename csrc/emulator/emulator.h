// CUDA C++ for the host compiler: kernels include this instead of the CUDA headers.
//
// Everything here is compiled into the kernel's translation unit, so that a sanitizer sees the
// kernel's own loads and stores.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
// Shared memory is dynamic only: a C++ static would be one for all blocks and all launches.
#define __shared__ static_assert(false, "take shared memory from the launch's dynamic allocation");

#define threadIdx (::emulator::ThreadIndex())
#define blockIdx (::emulator::BlockIndex())
#define blockDim (::emulator::BlockSize())
#define gridDim (::emulator::GridSize())

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

#define __syncthreads() ::emulator::Barrier(__FILE__, __LINE__)
#define __syncwarp() \
  ::emulator::Collective(::emulator::Op::kSyncWarp, 0xffffffffu, nullptr, __FILE__, __LINE__)

namespace emulator {

template <class T>
T ShuffleFrom(uint32_t mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 8);
  Shuffle s{0, source, 0};
  std::memcpy(&s.value, &value, sizeof(T));
  Collective(Op::kShuffle, mask, &s, file, line);
  T result;
  std::memcpy(&result, &s.result, sizeof(T));
  return result;
}

}  // namespace emulator

// Where a collective was called, for messages and to tell divergent calls apart.
#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, EMULATOR_HERE) {
  return emulator::ShuffleFrom(mask, value, source & 31, file, line);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes, EMULATOR_HERE) {
  return emulator::ShuffleFrom(mask, value, static_cast<int>(emulator::Lane()) ^ lanes, file, line);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int by, EMULATOR_HERE) {
  const int lane = static_cast<int>(emulator::Lane());
  return emulator::ShuffleFrom(mask, value, lane >= by ? lane - by : lane, file, line);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMULATOR_HERE) {
  emulator::Reduce r{predicate != 0, 0};
  emulator::Collective(emulator::Op::kBallot, mask, &r, file, line);
  return r.result;
}
inline int __any_sync(uint32_t mask, int predicate, EMULATOR_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value, EMULATOR_HERE) {
  emulator::Reduce r{value, 0};
  emulator::Collective(emulator::Op::kSum, mask, &r, file, line);
  return r.result;
}

// Relaxed, as on the GPU: atomic, but they order nothing else.
inline uint32_t atomicOr(uint32_t* p, uint32_t bits) {
  emulator::CountAtomic();
  const uint32_t old = __atomic_fetch_or(p, bits, __ATOMIC_RELAXED);
  emulator::MaybeYield();
  return old;
}
inline int atomicAdd(int* p, int value) {
  emulator::CountAtomic();
  const int old = __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  emulator::MaybeYield();
  return old;
}
inline float atomicAdd(float* p, float value) {
  emulator::CountAtomic();
  uint32_t* word = reinterpret_cast<uint32_t*>(p);
  uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED), sum_bits;
  float before;
  do {
    std::memcpy(&before, &old, 4);
    const float sum = before + value;
    std::memcpy(&sum_bits, &sum, 4);
  } while (
      !__atomic_compare_exchange_n(word, &old, sum_bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  emulator::MaybeYield();
  return before;
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

namespace emulator {

// cp.async. From its issue until the issuing thread's wait the target holds nothing that may be
// read. Both events are real stores of that thread.
inline void Perform(const Copy& copy) {
  alignas(16) unsigned char bytes[16] = {};
  if (copy.bytes == 16)
    *reinterpret_cast<uint4*>(bytes) = *static_cast<const uint4*>(copy.source);
  else
    for (int i = 0; i < copy.bytes; ++i)
      bytes[i] = static_cast<const unsigned char*>(copy.source)[i];
  *static_cast<uint4*>(copy.target) = *reinterpret_cast<const uint4*>(bytes);
}

inline void CopyAsync16(void* target, const void* source, int bytes, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(target) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(source) % 16 != 0)
    Fail(file, line, "cp.async: misaligned address, target %p, source %p", target, source);
  if (bytes < 0 || bytes > 16) Fail(file, line, "cp.async: source size %d", bytes);
  if (!IsShared(target, 16)) Fail(file, line, "cp.async: target %p is no shared memory", target);
  CountCopy(bytes);
  const Copy copy{target, source, bytes, 0};
  if (CurrentSettings().late_copies) {
    // A sanitizer looks at the source now.
    if (bytes > 0) (void)*static_cast<const volatile unsigned char*>(source);
    if (CurrentSettings().poison) *static_cast<uint4*>(target) = uint4{~0u, ~0u, ~0u, ~0u};
    QueueCopy(copy, file, line);
  } else {
    Perform(copy);
  }
  MaybeYield();
}

inline void WaitForCopies(int keep) {
  Copy copy;
  while (TakeCopy(keep, &copy)) Perform(copy);
  MaybeYield();
}

}  // namespace emulator
