// Prefix sums over the threads of a block.
#pragma once

#include "attention/cuda/device.cuh"

namespace sb {
namespace cuda {

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / 32;

// Inclusive sum of `value` over the block's threads, plus `carry`; afterwards carry holds the
// total. sums: kScanWarps places in shared memory.
SB_DEVICE int64_t ScanBlock(int64_t value, int64_t* sums, int64_t* carry) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, value, by);
    if (lane >= by) value += before;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  int64_t total = *carry;
  value += total;
  for (int w = 0; w < kScanWarps; ++w) {
    if (w < warp) value += sums[w];
    total += sums[w];
  }
  *carry = total;
  __syncthreads();
  return value;
}

}  // namespace cuda
}  // namespace sb
