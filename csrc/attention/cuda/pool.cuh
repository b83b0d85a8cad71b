// Block means: the mean of each block's keys in fp32, kept as a sum of 16-bit terms, so that tensor
// cores compute logits to nearly fp32.
#pragma once

#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

constexpr int kPoolThreads = 128;
constexpr int kPoolShared = kPoolThreads * 8 * 4;

struct PoolArguments {
  Problem p;
  Layout layout;
  View k;
  uint16_t* means;  // [lists, E::kTerms, D]
};

// Grid: all blocks, KV heads.
template <class E, int D>
__global__ void __launch_bounds__(kPoolThreads, 8) PoolKernel(PoolArguments a) {
  constexpr int kChunks = D / 8, kRows = kPoolThreads / kChunks;
  SB_SHARED(shared);
  float* partial = reinterpret_cast<float*>(shared);  // [kRows, D]
  const int tid = static_cast<int>(threadIdx.x), at = static_cast<int>(blockIdx.x);
  if (at >= a.layout.blocks[a.p.sequences]) return;
  const int n = FindSequence(a.layout.blocks, a.p.sequences, at);
  const Head head = HeadOf(a.p, a.layout, n, static_cast<int>(blockIdx.y));
  const int block = at - a.layout.blocks[n];
  // Only a block that a later token can see; where all rows see all blocks, only coverage asks.
  if (block + 1 >= head.blocks || (a.p.budget != nullptr && IsDense(a.p, head))) return;
  const int size = static_cast<int>(a.p.block_size), row = tid / kChunks, chunk = tid % kChunks;
  float sum[8] = {};
  for (int i = row; i < size; i += kRows) {
    const int64_t token = head.start + static_cast<int64_t>(block) * size + i;
    const uint4 x = *reinterpret_cast<const uint4*>(RowOf(a.k, token, head.kv) + chunk * 8);
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[2 * j] += E::Low(pairs[j]);
      sum[2 * j + 1] += E::High(pairs[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) partial[tid * 8 + j] = sum[j];
  __syncthreads();
  if (tid < D) {
    float mean = 0.0f;
    for (int i = 0; i < kRows; ++i) mean += partial[i * D + tid];
    mean /= static_cast<float>(size);
    uint16_t* out = a.means + (head.list + block) * E::kTerms * D + tid;
#pragma unroll
    for (int term = 0; term < E::kTerms; ++term) {
      const uint32_t half = E::Pack(mean, 0.0f) & 0xffffu;
      out[term * D] = static_cast<uint16_t>(half);
      mean -= E::Widen(half);
      if (!(mean == mean) || mean - mean != 0.0f)
        mean = 0.0f;  // of infinity and NaN nothing is left
    }
  }
}

}  // namespace cuda
}  // namespace sb
