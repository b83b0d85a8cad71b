#include "attention/cuda/launch.h"
#include "attention/cuda/layout.cuh"

namespace sb {
namespace cuda {

Machine CurrentMachine(void* stream) {
  Machine machine{};
  machine.stream = stream;
#if defined(__CUDACC__)
  int device = 0, shared = 0;
  CheckCuda(cudaGetDevice(&device), "the current device");
  CheckCuda(
      cudaDeviceGetAttribute(&machine.multiprocessors, cudaDevAttrMultiProcessorCount, device),
      "a device attribute");
  CheckCuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "a device attribute");
  machine.shared_bytes = shared;
#else
  machine.multiprocessors = static_cast<int>(::emulator::CurrentSettings().multiprocessors);
  machine.shared_bytes = ::emulator::CurrentSettings().shared_limit;
#endif
  return machine;
}

Layout TakeLayout(const Problem& p, int64_t tile_rows, Carver* carver, int64_t block_rows,
                  int64_t most_tiles) {
  Layout layout{};
  layout.blocks = carver->Take<int32_t>(p.sequences + 1);
  layout.tiles = carver->Take<int32_t>(p.sequences + 1);
  layout.cells = carver->Take<int64_t>(p.sequences + 1);
  layout.tile_rows = static_cast<int32_t>(tile_rows);
  layout.block_rows = block_rows;
  layout.most_tiles = most_tiles;
  return layout;
}

void RunLayout(const Problem& p, const Layout& layout, const Machine& machine) {
  Run("LayoutKernel", LayoutKernel, dim3(1), kScanThreads, kScanWarps * 8, machine,
      LayoutArguments{p, layout});
}

void RunScan(int64_t* values, int64_t count, const Machine& machine) {
  Run("ScanKernel", ScanKernel, dim3(1), kScanThreads, kScanWarps * 8, machine,
      ScanArguments{values, count});
}

int64_t ChooseTileRows(const Problem& p, int64_t max_seqlen, const Machine& machine) {
  const int64_t blocks = DivideUp(MaxLength(p, max_seqlen), p.block_size);
  // On average a row has half of the blocks before it and attends max_budget - 1 of them.
  const int64_t chosen = std::max<int64_t>(p.max_budget - 1, 1);
  int64_t rows = std::clamp<int64_t>(DivideUp(blocks * 64, chosen * 128) * 128, 256, 1024);
  while (rows > 128 && p.tokens * p.query_heads / rows < 2 * machine.multiprocessors)
    rows = rows / 256 * 128;
  return rows;
}

int64_t WalkingGrid(const Problem& p, int64_t tile_rows, int per_multiprocessor,
                    const Machine& machine) {
  const int64_t most = int64_t{machine.multiprocessors} * per_multiprocessor;
  return std::max<int64_t>(1, std::min(most, MaxTiles(p, tile_rows) * p.kv_heads));
}

}  // namespace cuda
}  // namespace sb
