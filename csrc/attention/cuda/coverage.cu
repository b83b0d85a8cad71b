#include "attention/cuda/coverage.cuh"
#include "attention/cuda/launch.h"

namespace sb {
namespace cuda {

int64_t Coverage(const Problem& p, int64_t max_seqlen, const Machine& machine, View q, View k,
                 int64_t row_stride, int64_t max_rank, float* mass, void* workspace) {
  const int64_t heads = p.sequences * p.query_heads, group = p.query_heads / p.kv_heads;
  if (p.tokens == 0 || heads == 0 || max_rank == 0) {
    if (workspace != nullptr && heads * max_rank > 0) Clear(mass, heads * max_rank * 4, machine);
    return 0;
  }
  int64_t bytes = 0;
  WithVariant(p, [&](auto variant) {
    using E = typename decltype(variant)::E;
    constexpr int D = decltype(variant)::D;
    using Shape = SelectShape<E, D>;
    row_stride = std::min(row_stride, p.tokens);
    const int64_t block_rows = group * (DivideUp(std::min(p.block_size, p.tokens), row_stride) + 1);
    const int64_t max_parts =
        std::min(p.tokens / p.block_size * block_rows / kSelectRows + p.sequences,
                 p.sequences * kCoverageParts);
    Carver carver(workspace);
    const Layout layout = TakeLayout(p, kSelectRows, &carver, block_rows, kCoverageParts);
    const int64_t num_blocks = DivideUp(MaxLength(p, max_seqlen), p.block_size);
    // As in the selection: no two of a warp's stores hit the same bank.
    const int64_t stride = DivideUp(num_blocks, kSelectBlocks) * kSelectBlocks + 8;
    const bool in_shared = Shape::Shared(stride, true) <= machine.shared_bytes;
    const int64_t grid = std::min(max_parts * p.kv_heads, int64_t{machine.multiprocessors} * 3);
    uint16_t* means = carver.Take<uint16_t>(p.kv_heads * MaxBlocks(p) * E::kTerms * D);
    float* sums = carver.Take<float>(max_parts * p.query_heads * max_rank);
    uint32_t* keys = in_shared ? nullptr : carver.Take<uint32_t>(grid * kSelectRows * stride);
    bytes = carver.bytes();
    if (workspace == nullptr) return;
    const CoverageArguments a{{p, layout, q, means, keys, static_cast<int>(stride)},
                              static_cast<int>(row_stride),
                              static_cast<int>(max_rank),
                              sums,
                              mass};
    RunLayout(p, layout, machine);
    RunPool(p, layout, k, means, machine);
    Run("CoverageKernel", CoverageKernel<E, D>, dim3(static_cast<unsigned>(grid)), kSelectThreads,
        Shape::Shared(stride, in_shared), machine, a);
    Run("CoverageSumKernel", CoverageSumKernel, dim3(static_cast<unsigned>(heads)), kScanThreads,
        kCoverageShared, machine, a);
  });
  return bytes;
}

}  // namespace cuda
}  // namespace sb
