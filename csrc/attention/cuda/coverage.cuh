// Coverage: gate logits of sampled rows, as the selection computes them; per row the softmax over
// earlier blocks, its highest shares sorted; and the mean of those over the rows of a query head.
//
// Sampled rows have places: as many for each block but a sequence's first, a place for each
// multiple of the stride that a block may hold and one for its last token, for all G query heads;
// some places stay empty. A sequence's tiles of places are dealt out to parts, whose sums are added
// up in order: the same bits for any machine and whatever else is in the pack.
#pragma once

#include "attention/cuda/scan.cuh"
#include "attention/cuda/select.cuh"
#include "tuning/sampling.h"

namespace sb {
namespace cuda {

constexpr int kCoverageParts = 64;  // most of a sequence and KV head

struct CoverageArguments : GateArguments {  // tiles of the layout are parts
  int row_stride;                           // at most the tokens
  int max_rank;
  float* sums;  // [parts, kv_heads, group, max_rank]
  float* mass;  // [sequences, query_heads, max_rank]
};

// The sampled token at a place among those of one query head of a sequence, or -1. Places are below
// 2^32, as tokens times the group are below 2^31 and a block has at least 16.
SB_DEVICE int SampledToken(const CoverageArguments& a, const Head& head, uint32_t place) {
  const uint32_t of_block = static_cast<uint32_t>(a.layout.block_rows) / head.group;
  const uint32_t stride = a.row_stride, size = static_cast<uint32_t>(a.p.block_size);
  const uint32_t before = place / of_block, i = place - before * of_block;
  const uint32_t begin = (before + 1) * size, end = begin + min(size, head.length - begin);
  if (i == of_block - 1) return (end - 1) % stride != 0 ? static_cast<int>(end - 1) : -1;
  const int64_t token = static_cast<int64_t>((begin + stride - 1) / stride + i) * stride;
  return token < end ? static_cast<int>(token) : -1;
}

// What KeyOf gave a key for; infinite ones become finite, so that sums do.
SB_DEVICE float LogitOf(uint32_t key) {
  const float logit = __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
  const float most = __uint_as_float(0x7f7fffffu);
  return min(max(logit, -most), most);
}

// Leaves the `want` highest of keys[0, have) in keys[0, want). 0 < want < have. A warp together.
SB_DEVICE void KeepHighest(uint32_t* keys, int have, int want) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Cut cut = FindCut(keys, have, want);
  const uint32_t before = (1u << lane) - 1;
  int written = 0;
  for (int first = 0; first < have; first += 32) {
    const int b = first + lane;
    const uint32_t key = b < have ? keys[b] : 0;
    const uint32_t all = __ballot_sync(kAllLanes, key > cut.high);
    __syncwarp();  // all have read what is written to
    if (key > cut.high) keys[written + __popc(all & before)] = key;
    written += __popc(all);
  }
  for (int j = written + lane; j < want; j += 32) keys[j] = cut.high;
  __syncwarp();
}

// Sorts x[0, n), descending. A warp together. Batcher's merge exchange (Knuth, The Art of Computer
// Programming 3, algorithm 5.2.2M), as on the CPU: it needs no power of two.
SB_DEVICE void SortDescending(uint32_t* x, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int top = 1;
  while (2 * top < n) top *= 2;
  for (int p = top; p > 0; p /= 2) {
    for (int q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
      // The numbers i with i & p == r, in order.
      for (int j = lane;; j += 32) {
        const int i = j + (j & -p) + r;
        if (i + d >= n) break;
        const uint32_t left = x[i], right = x[i + d];
        x[i] = max(left, right);
        x[i + d] = min(left, right);
      }
      __syncwarp();
      if (q == p) break;
    }
  }
}

// Turns keys[0, have) of a row into its `ranks` highest shares, descending, as bits of floats; have
// may be less, then zeros follow. A warp together.
SB_DEVICE void RankShares(uint32_t* keys, int have, int ranks, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t highest = 0;
  for (int b = lane; b < have; b += 32) highest = max(highest, keys[b]);
#pragma unroll
  for (int by = 16; by > 0; by /= 2)
    highest = max(highest, __shfl_xor_sync(kAllLanes, highest, by));
  // Differences are scaled, not logits: those would be fused with the subtraction, and large ones
  // leave a rest then.
  const float most = LogitOf(highest);
  float total = 0.0f;
  for (int b = lane; b < have; b += 32) total += Exp2((LogitOf(keys[b]) - most) * scale);
#pragma unroll
  for (int by = 16; by > 0; by /= 2) total += __shfl_xor_sync(kAllLanes, total, by);
  __syncwarp();  // all have read the keys
  const int want = min(have, ranks);
  if (want < have) KeepHighest(keys, have, want);
  SortDescending(keys, want);
  const float inverse = 1.0f / total;
  for (int j = lane; j < ranks; j += 32)
    keys[j] = j < want ? __float_as_uint(Exp2((LogitOf(keys[j]) - most) * scale) * inverse) : 0;
}

// Grid: as many blocks of threads as run at once.
template <class E, int D>
__global__ void __launch_bounds__(kSelectThreads, D == 128 ? 2 : 4)
    CoverageKernel(CoverageArguments a) {
  SB_SHARED(shared);
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32;
  const int kv_heads = static_cast<int>(a.p.kv_heads);
  const float scale = kLog2e / sqrtf(static_cast<float>(D));
  uint32_t* keys = PlaceOfKeys<E, D>(a, shared);
  const int64_t total = static_cast<int64_t>(a.layout.tiles[a.p.sequences]) * kv_heads;
  for (int64_t item = blockIdx.x; item < total; item += gridDim.x) {
    const int part = static_cast<int>(item / kv_heads);
    const int n = FindSequence(a.layout.tiles, a.p.sequences, part);
    const Head head = HeadOf(a.p, a.layout, n, static_cast<int>(item % kv_heads));
    const uint32_t block_rows = static_cast<uint32_t>(a.layout.block_rows), group = head.group;
    const uint32_t rows = (head.blocks - 1) * block_rows;
    const uint32_t step = (a.layout.tiles[n + 1] - a.layout.tiles[n]) * kSelectRows;
    const int ranks = min(a.max_rank, head.blocks - 1);
    float* sums = a.sums + item * group * a.max_rank;
    const uint32_t first = (part - a.layout.tiles[n]) * kSelectRows;
    for (uint32_t row0 = first; row0 < rows; row0 += step) {
      const auto token_of = [&](uint32_t row) {
        return row < rows ? SampledToken(a, head, row / group) : -1;
      };
      const uint32_t last_block = 1 + (min(row0 + kSelectRows, rows) - 1) / block_rows;
      // key_stride bounds it already where max_seqlen bounds the lengths.
      const int past = min(static_cast<int>(last_block), a.key_stride - 8);
      const int places = min(ranks, past);
      // Its barrier before the first product also keeps these keys from those still added up below.
      ComputeKeys<E, D>(a, head, past, shared, keys, [&](int r) -> const uint16_t* {
        const int token = token_of(row0 + r), g = static_cast<int>((row0 + r) % group);
        return token < 0 ? nullptr : RowOf(a.q, head.start + token, head.kv * head.group + g);
      });
      for (int r = warp * 16; r < warp * 16 + 16; ++r) {
        const int token = token_of(row0 + r);
        const int have = token < 0 ? 0 : min(token / static_cast<int>(a.p.block_size), past);
        RankShares(keys + static_cast<int64_t>(r) * a.key_stride, have, places, scale);
      }
      __syncthreads();  // threads add up ranks of all rows
      const int skew = static_cast<int>(row0 % group);
      for (int g = 0; g < head.group; ++g) {
        const int r0 = g < skew ? g - skew + head.group : g - skew;
        for (int rank = tid; rank < ranks; rank += kSelectThreads) {
          float* to = sums + static_cast<int64_t>(g) * a.max_rank + rank;
          float sum = row0 == first ? 0.0f : *to;
          if (rank < places)
            for (int r = r0; r < kSelectRows; r += head.group)
              sum += __uint_as_float(keys[static_cast<int64_t>(r) * a.key_stride + rank]);
          *to = sum;
        }
      }
    }
  }
}

constexpr int kCoverageShared = kScanWarps * 8;

// Grid: sequences times query heads. Parts' sums become the mean over rows.
__global__ void __launch_bounds__(kScanThreads) CoverageSumKernel(CoverageArguments a) {
  SB_SHARED(shared);
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  const int query_heads = static_cast<int>(a.p.query_heads);
  const int n = static_cast<int>(blockIdx.x) / query_heads;
  const int h = static_cast<int>(blockIdx.x) - n * query_heads;
  const int64_t length = a.p.cu_seqlens[n + 1] - a.p.cu_seqlens[n];
  const int blocks = a.layout.blocks[n + 1] - a.layout.blocks[n];
  int64_t rows = 0, own = 0;
  for (int b = 1 + tid; b < blocks; b += kScanThreads)
    own += SampledRowsOfBlock(b, length, a.p.block_size, a.row_stride);
  ScanBlock(own, reinterpret_cast<int64_t*>(shared), &rows);
  const double share = rows > 0 ? 1.0 / static_cast<double>(rows) : 0.0;
  const int ranks = min(a.max_rank, blocks - 1);
  float* mass = a.mass + static_cast<int64_t>(blockIdx.x) * a.max_rank;
  double total = 0.0;
  for (int rank = tid; rank < a.max_rank; rank += kScanThreads) {
    float sum = 0.0f;
    for (int part = a.layout.tiles[n]; part < a.layout.tiles[n + 1] && rank < ranks; ++part)
      sum += a.sums[(static_cast<int64_t>(part) * query_heads + h) * a.max_rank + rank];
    mass[rank] = static_cast<float>(sum * share);
    total += static_cast<double>(mass[rank]);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) total += __shfl_xor_sync(kAllLanes, total, by);
  double* totals = reinterpret_cast<double*>(shared);
  if (lane == 0) totals[tid / 32] = total;
  __syncthreads();
  total = 0.0;
  for (int w = 0; w < kScanWarps; ++w) total += totals[w];
  // Rounding must not leave more than there is: C(k) is a share.
  if (total <= 1.0) return;
  const double least = (1.0 - 0x1p-22) / total;
  for (int rank = tid; rank < a.max_rank; rank += kScanThreads)
    mass[rank] = static_cast<float>(mass[rank] * least);
}

}  // namespace cuda
}  // namespace sb
