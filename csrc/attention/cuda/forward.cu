#include "attention/cuda/forward.cuh"
#include "attention/cuda/launch.h"

namespace sb {
namespace cuda {

int64_t Forward(const Problem& p, int64_t max_seqlen, const Machine& machine, View q, View k,
                View v, const int64_t* lists, const int32_t* rows, void* out, float* lse,
                void* workspace) {
  if (p.tokens == 0) return 0;
  Carver carver(workspace);
  const int64_t tile_rows = ChooseTileRows(p, max_seqlen, machine);
  const int64_t grid = WalkingGrid(p, tile_rows, 2, machine);
  const Layout layout = TakeLayout(p, tile_rows, &carver);
  float* partial = carver.Take<float>(grid * tile_rows * p.head_dim);
  if (workspace == nullptr) return carver.bytes();
  RunLayout(p, layout, machine);
  WithVariant(p, [&](auto variant) {
    using E = typename decltype(variant)::E;
    constexpr int D = decltype(variant)::D;
    Run("ForwardKernel", ForwardKernel<E, D>, dim3(static_cast<unsigned>(grid)), kSweepThreads,
        ForwardShape<D>::Shared(tile_rows), machine,
        ForwardArguments{
            {p, layout, lists, rows}, q, k, v, static_cast<uint16_t*>(out), lse, partial});
  });
  return carver.bytes();
}

}  // namespace cuda
}  // namespace sb
