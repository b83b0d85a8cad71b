#include "attention/cuda/backward.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/query_gradient.cuh"

namespace sb {
namespace cuda {
namespace {

constexpr int kMaxParts = 8;

// Long lists are cut into parts where there are too few lists to keep the GPU busy.
int ChooseParts(const Problem& p, int64_t tiles, const Machine& machine) {
  const int64_t rows = p.tokens * (p.query_heads / p.kv_heads);
  const int64_t wanted = DivideUp(int64_t{machine.multiprocessors} * 8, tiles);
  return static_cast<int>(
      std::clamp<int64_t>(std::min(wanted, rows / (4 * kBackwardRows)), 1, kMaxParts));
}

template <class E>
void RunSum(const Machine& machine, const float* parts, void* out, int64_t count, int num_parts,
            float scale) {
  const int64_t grid =
      std::min<int64_t>(DivideUp(count, 512), int64_t{machine.multiprocessors} * 8);
  Run("SumKernel", SumKernel<E>, dim3(static_cast<unsigned>(grid)), 256, 0, machine,
      SumArguments{parts, static_cast<uint16_t*>(out), count, num_parts, scale});
}

}  // namespace

int64_t Backward(const Problem& p, int64_t max_seqlen, const Machine& machine, View dout, View q,
                 View k, View v, View out, const float* lse, const float* dlse,
                 const int64_t* lists, const int32_t* rows, Gradients gradients, bool deterministic,
                 void* workspace) {
  if (p.tokens == 0) return 0;
  Carver carver(workspace);
  const int64_t tile_rows = ChooseTileRows(p, max_seqlen, machine);
  const Layout layout = TakeLayout(p, tile_rows, &carver);
  const int64_t per_block =
      DivideUp(std::min(p.block_size, MaxLength(p, max_seqlen)), kBackwardKeys);
  const int64_t tiles = MaxBlocks(p) * per_block;
  const int parts = ChooseParts(p, tiles * p.kv_heads, machine);
  const int64_t queries = p.tokens * p.query_heads, keys = p.tokens * p.kv_heads * p.head_dim;
  const int64_t grid = WalkingGrid(p, tile_rows, 2, machine);
  float* delta = carver.Take<float>(queries);
  float* dk = parts > 1 ? carver.Take<float>(parts * keys) : nullptr;
  float* dv = parts > 1 ? carver.Take<float>(parts * keys) : nullptr;
  // All rows' gradients, or those of the tiles under way.
  float* dq =
      carver.Take<float>(deterministic ? grid * tile_rows * p.head_dim : queries * p.head_dim);
  if (workspace == nullptr) return carver.bytes();
  RunLayout(p, layout, machine);
  if (!deterministic) Clear(dq, queries * p.head_dim * 4, machine);
  WithVariant(p, [&](auto variant) {
    using E = typename decltype(variant)::E;
    constexpr int D = decltype(variant)::D;
    Run("DeltaKernel", DeltaKernel<E, D>,
        dim3(static_cast<unsigned>(DivideUp(queries, kDeltaThreads / 32))), kDeltaThreads, 0,
        machine, DeltaArguments{p, dout, out, dlse, delta});
    const KeyGradientArguments a{p,
                                 layout,
                                 lists,
                                 rows,
                                 dout,
                                 q,
                                 k,
                                 v,
                                 lse,
                                 delta,
                                 dq,
                                 static_cast<uint16_t*>(gradients.dk),
                                 static_cast<uint16_t*>(gradients.dv),
                                 dk,
                                 dv,
                                 parts,
                                 static_cast<int>(per_block)};
    const auto kernel =
        deterministic ? KeyGradientKernel<E, D, false> : KeyGradientKernel<E, D, true>;
    Run("KeyGradientKernel", kernel,
        dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(p.kv_heads),
             static_cast<unsigned>(parts)),
        kBackwardThreads, BackwardShape<D>::kShared, machine, a);
    if (parts > 1) {
      RunSum<E>(machine, dk, gradients.dk, keys, parts, 1.0f);
      RunSum<E>(machine, dv, gradients.dv, keys, parts, 1.0f);
    }
    if (deterministic)
      Run("QueryGradientKernel", QueryGradientKernel<E, D>, dim3(static_cast<unsigned>(grid)),
          kSweepThreads, QueryGradientShape<D>::kShared, machine,
          QueryGradientArguments{{p, layout, lists, rows},
                                 dout,
                                 q,
                                 k,
                                 v,
                                 lse,
                                 delta,
                                 static_cast<uint16_t*>(gradients.dq),
                                 dq});
    else
      RunSum<E>(machine, dq, gradients.dq, queries * p.head_dim, 1, p.scale);
  });
  return carver.bytes();
}

}  // namespace cuda
}  // namespace sb
