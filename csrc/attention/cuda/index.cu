#include "attention/cuda/index.cuh"
#include "attention/cuda/launch.h"

namespace sb {
namespace cuda {

int64_t Index(const Problem& p, const Machine& machine, const int16_t* selection, int64_t* lists,
              int32_t* rows, void* workspace) {
  const int64_t num_lists = p.kv_heads * MaxBlocks(p);
  const int64_t group = p.query_heads / p.kv_heads;
  // So many tiles that all multiprocessors are busy and no more: the cells are tiles times blocks.
  const int64_t tile_rows = std::max<int64_t>(1024, DivideUp(p.tokens * group, 256 * 256) * 256);
  Carver carver(workspace);
  const Layout layout = TakeLayout(p, tile_rows, &carver);
  const int64_t tiles = DivideUp(p.tokens * group, tile_rows),
                blocks = DivideUp(p.tokens, p.block_size);
  // The sum of (x + 1) (y + 1) over the sequences is at most this.
  const int64_t num_cells = p.kv_heads * (tiles * blocks + tiles + blocks + p.sequences);
  int32_t* cells = carver.Take<int32_t>(num_cells);
  if (workspace == nullptr) return carver.bytes();
  Clear(lists, (num_lists + 1) * 8, machine);
  if (p.tokens == 0 || p.max_budget == 1) return carver.bytes();
  const int64_t num_rows = p.tokens * p.query_heads * (p.max_budget - 1);
  const IndexArguments a{p, layout, selection, cells, lists, rows, num_lists, num_rows};
  const auto grid = [&](int64_t n) {
    return dim3(static_cast<unsigned>(n), static_cast<unsigned>(p.kv_heads));
  };
  RunLayout(p, layout, machine);
  Run("CountKernel", CountKernel, grid(MaxTiles(p, tile_rows)), kIndexThreads, kCountShared,
      machine, a);
  Run("CellKernel", CellKernel, grid(DivideUp(MaxBlocks(p), kIndexThreads)), kIndexThreads, 0,
      machine, a);
  RunScan(lists, num_lists + 1, machine);
  Run("PlaceKernel", PlaceKernel, grid(MaxTiles(p, tile_rows)), kIndexThreads, kPlaceShared,
      machine, a);
  const int64_t fill =
      std::min<int64_t>(DivideUp(num_rows, kIndexThreads), int64_t{machine.multiprocessors} * 8);
  Run("FillKernel", FillKernel, dim3(static_cast<unsigned>(fill)), kIndexThreads, 0, machine, a);
  return carver.bytes();
}

}  // namespace cuda
}  // namespace sb
