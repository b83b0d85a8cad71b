// Prefix sums over sequences, and over lists.
#pragma once

#include "attention/cuda/common.cuh"
#include "attention/cuda/scan.cuh"

namespace sb {
namespace cuda {

struct LayoutArguments {
  Problem p;
  Layout layout;
};

// One block.
__global__ void __launch_bounds__(kScanThreads) LayoutKernel(LayoutArguments a) {
  SB_SHARED(shared);
  int64_t* sums = reinterpret_cast<int64_t*>(shared);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t group = a.p.query_heads / a.p.kv_heads;
  int64_t blocks = 0, tiles = 0, cells = 0;
  if (tid == 0) {
    a.layout.blocks[0] = 0;
    a.layout.tiles[0] = 0;
    a.layout.cells[0] = 0;
  }
  for (int64_t first = 0; first < a.p.sequences; first += kScanThreads) {
    const int64_t n = first + tid;
    const bool inside = n < a.p.sequences;
    const int64_t length = inside ? a.p.cu_seqlens[n + 1] - a.p.cu_seqlens[n] : 0;
    const int64_t own_blocks = (length + a.p.block_size - 1) / a.p.block_size;
    const int64_t own_rows = a.layout.block_rows == 0
                                 ? length * group
                                 : max(own_blocks - 1, int64_t{0}) * a.layout.block_rows;
    const int64_t own_tiles =
        min((own_rows + a.layout.tile_rows - 1) / a.layout.tile_rows, a.layout.most_tiles);
    const int64_t to_blocks = ScanBlock(own_blocks, sums, &blocks);
    const int64_t to_tiles = ScanBlock(own_tiles, sums, &tiles);
    const int64_t to_cells = ScanBlock(own_blocks * own_tiles, sums, &cells);
    if (inside) {
      a.layout.blocks[n + 1] = static_cast<int32_t>(to_blocks);
      a.layout.tiles[n + 1] = static_cast<int32_t>(to_tiles);
      a.layout.cells[n + 1] = to_cells;
    }
  }
}

struct ScanArguments {
  int64_t* values;
  int64_t count;
};

// Inclusive sums in place. One block.
__global__ void __launch_bounds__(kScanThreads) ScanKernel(ScanArguments a) {
  SB_SHARED(shared);
  int64_t carry = 0;
  for (int64_t first = 0; first < a.count; first += kScanThreads) {
    const int64_t i = first + threadIdx.x;
    const int64_t value = i < a.count ? a.values[i] : 0;
    const int64_t sum = ScanBlock(value, reinterpret_cast<int64_t*>(shared), &carry);
    if (i < a.count) a.values[i] = sum;
  }
}

}  // namespace cuda
}  // namespace sb
