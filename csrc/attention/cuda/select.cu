#include "attention/cuda/launch.h"
#include "attention/cuda/pool.cuh"
#include "attention/cuda/select.cuh"

namespace sb {
namespace cuda {

void RunPool(const Problem& p, const Layout& layout, View k, uint16_t* means,
             const Machine& machine) {
  WithVariant(p, [&](auto variant) {
    using Variant = decltype(variant);
    Run("PoolKernel", PoolKernel<typename Variant::E, Variant::D>,
        dim3(static_cast<unsigned>(MaxBlocks(p)), static_cast<unsigned>(p.kv_heads)), kPoolThreads,
        kPoolShared, machine, PoolArguments{p, layout, k, means});
  });
}

int64_t Select(const Problem& p, int64_t max_seqlen, const Machine& machine, View q, View k,
               int16_t* selection, void* workspace) {
  if (p.tokens == 0 || p.max_budget == 1) return 0;  // no earlier block is selected
  int64_t bytes = 0;
  WithVariant(p, [&](auto variant) {
    using E = typename decltype(variant)::E;
    constexpr int D = decltype(variant)::D;
    using Shape = SelectShape<E, D>;
    Carver carver(workspace);
    const Layout layout = TakeLayout(p, kSelectRows, &carver);
    const int64_t num_blocks = DivideUp(MaxLength(p, max_seqlen), p.block_size);
    // Rows of logits start 8 places apart, modulo 32: no two of a warp's stores hit the same bank.
    const int64_t stride = DivideUp(num_blocks, kSelectBlocks) * kSelectBlocks + 8;
    const bool in_shared = Shape::Shared(stride, true) <= machine.shared_bytes;
    const int64_t grid = WalkingGrid(p, kSelectRows, 3, machine);
    uint16_t* means = carver.Take<uint16_t>(p.kv_heads * MaxBlocks(p) * E::kTerms * D);
    uint32_t* keys = in_shared ? nullptr : carver.Take<uint32_t>(grid * kSelectRows * stride);
    bytes = carver.bytes();
    if (workspace == nullptr) return;
    RunLayout(p, layout, machine);
    RunPool(p, layout, k, means, machine);
    Run("SelectKernel", SelectKernel<E, D>, dim3(static_cast<unsigned>(grid)), kSelectThreads,
        Shape::Shared(stride, in_shared), machine,
        SelectArguments{{p, layout, q, means, keys, static_cast<int>(stride)}, selection});
  });
  return bytes;
}

}  // namespace cuda
}  // namespace sb
