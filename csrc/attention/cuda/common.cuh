// What the kernels share: which sequence, head and rows a block of threads has, and tiles in shared
// memory.
//
// Rows: the G query heads of a KV head are merged, row t * G + g is token t of query head g. A list
// of rows of one (sequence, KV head) is thus one for all its heads.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/problem.h"

namespace sb {
namespace cuda {

// Prefix sums over the sequences, by LayoutKernel.
struct Layout {
  int32_t* blocks;  // [sequences + 1] blocks of keys
  int32_t* tiles;   // [sequences + 1] tiles of `tile_rows` rows of a KV head
  int64_t* cells;   // [sequences + 1] pairs (tile, block)
  int32_t tile_rows;
  int64_t block_rows;  // rows of each block but the first; 0: rows are all tokens'
  int64_t most_tiles;  // of a sequence
};

// Finds i with before[i] <= at < before[i + 1].
SB_DEVICE int FindSequence(const int32_t* before, int64_t sequences, int at) {
  int low = 0, high = static_cast<int>(sequences);  // before[low] <= at < before[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (before[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// One KV head of one sequence.
struct Head {
  int sequence, kv;
  int64_t start;  // its first token among all
  int length, blocks, group;
  int64_t list;  // number of its first block's list

  SB_DEVICE int Rows() const { return length * group; }
};

SB_DEVICE Head HeadOf(const Problem& p, const Layout& layout, int sequence, int kv) {
  Head head;
  head.sequence = sequence;
  head.kv = kv;
  head.start = p.cu_seqlens[sequence];
  head.length = p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence];
  head.blocks = layout.blocks[sequence + 1] - layout.blocks[sequence];
  head.group = static_cast<int>(p.query_heads / p.kv_heads);
  head.list = p.kv_heads * layout.blocks[sequence] + static_cast<int64_t>(kv) * head.blocks;
  return head;
}

SB_DEVICE int BudgetOf(const Problem& p, const Head& head, int g) {
  return p.budget[head.sequence * p.query_heads + head.kv * head.group + g];
}

// Whether every row attends every earlier block; such a head has empty lists.
SB_DEVICE bool IsDense(const Problem& p, const Head& head) {
  bool dense = true;
  for (int g = 0; g < head.group; ++g) dense = dense && BudgetOf(p, head, g) >= head.blocks;
  return dense;
}

// Address of 16-bit element 0 of a token and head.
SB_DEVICE const uint16_t* RowOf(const View& x, int64_t token, int64_t head) {
  return static_cast<const uint16_t*>(x.data) + token * x.token_stride + head * x.head_stride;
}

// Byte of a chunk of 8 numbers in a tile of rows of kChunks chunks: eight rows that ldmatrix reads
// together lie in different banks, and so do the chunks of a row.
template <int kChunks>
SB_DEVICE int Swizzled(int row, int chunk) {
  return (row * kChunks + (kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3))) * 16;
}

// The keys or values of one KV head of a sequence.
struct KeySource {
  const uint16_t* base;
  int64_t stride;

  SB_DEVICE KeySource(const View& x, const Head& head)
      : base(RowOf(x, head.start, head.kv)), stride(x.token_stride) {}
};

// Copies keys [first, first + kKeys) of a sequence into a tile in the background; those from `end`
// on become zero. The trip count is constant and a thread's swizzle the same in every trip.
template <int D, int kKeys, int kThreads>
SB_DEVICE void LoadKeys(unsigned char* tile, const KeySource& x, int first, int end) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0 && kKeys % kStep == 0);
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  unsigned char* target = tile + Swizzled<kChunks>(row, chunk);
  const uint16_t* source = x.base + static_cast<int64_t>(first + row) * x.stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kKeys / kStep; ++i) {
    const bool inside = first + row + i * kStep < end;
    CopyAsync(target + i * kStep * D * 2, inside ? source + i * kStep * x.stride : x.base,
              inside ? 16 : 0);
  }
}

// Copies kRows gathered rows into a tile; `rows` holds {token, query head}, token < 0: none, zero.
template <int D, int kRows, int kThreads>
SB_DEVICE void LoadRows(unsigned char* tile, const View& x, const int2* rows) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0);
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  unsigned char* target = tile + Swizzled<kChunks>(row, chunk);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int2 at = rows[row + i * kStep];
    const bool some = at.x >= 0;
    const uint16_t* source = some ? RowOf(x, at.x, at.y) : static_cast<const uint16_t*>(x.data);
    CopyAsync(target + i * kStep * D * 2, source + chunk * 8, some ? 16 : 0);
  }
}

// The lane, for the addresses of a phase of products: few are worth a register in the next phase.
SB_DEVICE int PhaseLane() { return Opaque(static_cast<int>(threadIdx.x) % 32); }

// The warp, which the compiler then knows to be one for all lanes: what depends on it does not
// diverge.
SB_DEVICE int UniformWarp() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
}

// In a tile with rows of D numbers, what Swizzled gives for `row` below 16 and chunk + `low`, where
// chunk is even and low 0 or 1: chunk is but one exclusive or.
template <int D>
SB_DEVICE int LaneOffset(int row, int low, int chunk) {
  return (row * D * 2 + ((D >= 64 ? row & 7 : row >> 1 & 3) ^ low) * 16) ^ (chunk * 16);
}

// Operand A of rows [row, row + 16) and columns [16 step, 16 step + 16); row divides by 16.
template <int D>
SB_DEVICE void LoadA(uint32_t (&a)[4], const unsigned char* tile, int lane, int row, int step) {
  LoadMatrices<false>(a, tile + LaneOffset<D>(lane & 15, lane >> 4, step * 2) + row * D * 2);
}

// Operand B of two products, from rows [row, row + 16) of a tile that is B transposed: b[0], b[1]
// for columns row to row + 7 of the product, b[2], b[3] for the next eight.
template <int D>
SB_DEVICE void LoadB(uint32_t (&b)[4], const unsigned char* tile, int lane, int row, int step) {
  LoadMatrices<false>(
      b, tile + LaneOffset<D>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1, step * 2) + row * D * 2);
}

// Operand B of two products, from a tile that is B itself: rows [row, row + 16), columns
// [8 chunk, 8 chunk + 16).
template <int D>
SB_DEVICE void LoadBRows(uint32_t (&b)[4], const unsigned char* tile, int lane, int row,
                         int chunk) {
  LoadMatrices<true>(b, tile + LaneOffset<D>(lane & 15, lane >> 4, chunk) + row * D * 2);
}

// Two neighbouring 8-column results become operand A.
template <class E>
SB_DEVICE void PackA(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = E::Pack(left[0], left[1]);
  a[1] = E::Pack(left[2], left[3]);
  a[2] = E::Pack(right[0], right[1]);
  a[3] = E::Pack(right[2], right[3]);
}

// First place in the ascending rows[low, high) whose row is not below `row`.
SB_DEVICE int64_t LowerBound(const int32_t* rows, int64_t low, int64_t high, int row) {
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (rows[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

SB_DEVICE int RoundedUp(int n, int unit) { return (n + unit - 1) / unit * unit; }

}  // namespace cuda
}  // namespace sb
