// The index: from "which blocks does a row attend" to "which rows attend a block", by a counting
// sort whose result does not depend on the order in which anything runs.
//
// Rows of a KV head are cut into tiles; a cell is a (tile, block). CountKernel counts each cell's
// rows, CellKernel turns a cell's count into where it starts within the block's list and sums up
// the lists, ScanKernel bounds them, PlaceKernel writes the rows.
#pragma once

#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

constexpr int kIndexThreads = 256;
constexpr int kIndexWarps = kIndexThreads / 32;
constexpr int kCountWindow = 8192;  // blocks counted at a time
constexpr int kCountShared = kCountWindow * 4;
constexpr int kPlaceWindow = 1024;  // blocks whose rows are placed at a time
constexpr int kMaskStride =
    kIndexWarps + 1;  // so that a warp's threads, a block each, meet 32 banks
constexpr int kPlaceShared = kPlaceWindow * kMaskStride * 4;

struct IndexArguments {
  Problem p;
  Layout layout;
  const int16_t* selection;
  int32_t* cells;  // [kv_heads, all cells]
  int64_t* lists;
  int32_t* rows;
  int64_t num_lists, num_rows;
};

// The selected blocks of one row. What is no ascending earlier block is passed over, everywhere in
// the same way, so that a selection from elsewhere cannot make a kernel write astray.
struct Choice {
  const int16_t* blocks;
  int used, own, next, last;

  SB_DEVICE Choice(const IndexArguments& a, const Head& head, int row) : next(0), last(-1) {
    const int token = row / head.group, g = row - token * head.group;
    const int width = static_cast<int>(a.p.max_budget) - 1;
    own = token / static_cast<int>(a.p.block_size);
    used = min(min(own, BudgetOf(a.p, head, g) - 1), width);
    blocks = a.selection + ((head.kv * head.group + g) * a.p.tokens + head.start + token) * width;
  }
  // The next block below `end`, or -1.
  SB_DEVICE int Next(int end) {
    while (next < used) {
      const int block = blocks[next];
      if (block <= last || block >= own) {
        ++next;
        continue;
      }
      if (block >= end) break;
      ++next;
      last = block;
      return block;
    }
    return -1;
  }
};

// The tile of a block of threads, grid: tiles, KV heads. False: there is none.
SB_DEVICE bool TileOf(const IndexArguments& a, Head* head, int* row0, int* row1, int32_t** cells) {
  const int tile = static_cast<int>(blockIdx.x), kv = static_cast<int>(blockIdx.y);
  if (tile >= a.layout.tiles[a.p.sequences]) return false;
  const int n = FindSequence(a.layout.tiles, a.p.sequences, tile);
  *head = HeadOf(a.p, a.layout, n, kv);
  if (IsDense(a.p, *head)) return false;
  const int within = tile - a.layout.tiles[n];
  *row0 = within * a.layout.tile_rows;
  *row1 = min(*row0 + a.layout.tile_rows, head->Rows());
  *cells = a.cells + kv * a.layout.cells[a.p.sequences] + a.layout.cells[n] +
           static_cast<int64_t>(within) * head->blocks;
  return true;
}

__global__ void __launch_bounds__(kIndexThreads) CountKernel(IndexArguments a) {
  SB_SHARED(shared);
  int* count = reinterpret_cast<int*>(shared);
  const int tid = static_cast<int>(threadIdx.x);
  Head head;
  int row0, row1;
  int32_t* cells;
  if (!TileOf(a, &head, &row0, &row1, &cells)) return;
  for (int first = 0; first < head.blocks; first += kCountWindow) {
    const int size = min(kCountWindow, head.blocks - first);
    for (int i = tid; i < size; i += kIndexThreads) count[i] = 0;
    __syncthreads();
    for (int row = row0 + tid; row < row1; row += kIndexThreads) {
      Choice choice(a, head, row);
      for (int b = choice.Next(first + size); b >= 0; b = choice.Next(first + size))
        if (b >= first) atomicAdd(count + (b - first), 1);
    }
    __syncthreads();
    for (int i = tid; i < size; i += kIndexThreads) cells[first + i] = count[i];
    __syncthreads();
  }
}

// Grid: all blocks by kIndexThreads, KV heads. lists must be zero.
__global__ void __launch_bounds__(kIndexThreads) CellKernel(IndexArguments a) {
  const int at = static_cast<int>(blockIdx.x * kIndexThreads + threadIdx.x);
  if (at >= a.layout.blocks[a.p.sequences]) return;
  const int kv = static_cast<int>(blockIdx.y);
  const int n = FindSequence(a.layout.blocks, a.p.sequences, at);
  const Head head = HeadOf(a.p, a.layout, n, kv);
  if (IsDense(a.p, head)) return;
  const int block = at - a.layout.blocks[n];
  const int tiles = a.layout.tiles[n + 1] - a.layout.tiles[n];
  int32_t* cell = a.cells + kv * a.layout.cells[a.p.sequences] + a.layout.cells[n] + block;
  int sum = 0;
  for (int tile = 0; tile < tiles; ++tile, cell += head.blocks) {
    const int count = *cell;
    *cell = sum;
    sum += count;
  }
  a.lists[1 + head.list + block] = sum;
}

__global__ void __launch_bounds__(kIndexThreads) PlaceKernel(IndexArguments a) {
  SB_SHARED(shared);
  uint32_t* masks = reinterpret_cast<uint32_t*>(shared);  // [kPlaceWindow, kMaskStride]: which rows
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  Head head;
  int row0, row1;
  int32_t* cells;
  if (!TileOf(a, &head, &row0, &row1, &cells)) return;
  for (int i = tid; i < kPlaceWindow * kMaskStride; i += kIndexThreads) masks[i] = 0;
  __syncthreads();
  for (; row0 < row1; row0 += kIndexThreads) {
    const int row = row0 + tid;
    Choice choice(a, head, min(row, row1 - 1));
    if (row >= row1) choice.used = 0;
    const int last = min(row0 + kIndexThreads, row1) - 1;
    const int past = last / head.group / static_cast<int>(a.p.block_size);
    for (int first = 0; first < past; first += kPlaceWindow) {
      const int end = first + kPlaceWindow;
      Choice again = choice;
      for (int b = choice.Next(end); b >= 0; b = choice.Next(end))
        atomicOr(masks + (b - first) * kMaskStride + warp, 1u << lane);
      __syncthreads();
      for (int b = again.Next(end); b >= 0; b = again.Next(end)) {
        const uint32_t* mask = masks + (b - first) * kMaskStride;
        int before = __popc(mask[warp] & ((1u << lane) - 1));
        for (int w = 0; w < warp; ++w) before += __popc(mask[w]);
        a.rows[a.lists[head.list + b] + cells[b] + before] = row;
      }
      __syncthreads();
      for (int b = first + tid; b < min(end, past); b += kIndexThreads) {
        uint32_t* mask = masks + (b - first) * kMaskStride;
        int count = 0;
        for (int w = 0; w < kIndexWarps; ++w) {
          count += __popc(mask[w]);
          mask[w] = 0;
        }
        cells[b] += count;
      }
      __syncthreads();
    }
  }
}

// What no list uses becomes -1, so that two calls give the same tensor.
__global__ void __launch_bounds__(kIndexThreads) FillKernel(IndexArguments a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kIndexThreads;
  for (int64_t i =
           a.lists[a.num_lists] + static_cast<int64_t>(blockIdx.x) * kIndexThreads + threadIdx.x;
       i < a.num_rows; i += step)
    a.rows[i] = -1;
}

}  // namespace cuda
}  // namespace sb
