// The ops that tune budgets for CUDA tensors, beside those of bindings.cpp.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "attention/cuda/arguments.h"
#include "attention/tuning_arguments.h"

namespace {

Tensor Coverage(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, int64_t block_size,
                int64_t max_seqlen, int64_t max_rank, int64_t row_stride) {
  CheckRowStride(row_stride);
  CheckMaxRank(max_rank);
  const CudaProblem p = ProblemOf(q, k, cu_seqlens, std::nullopt, block_size, 1, 1.0);
  const Launcher on(q);
  const Tensor mass = Empty(q, {p.problem.sequences, q.size(1), max_rank}, ScalarType::Float);
  const Tensor qr = Aligned(q), kr = Aligned(k);
  RunWithWorkspace(q, [&](void* workspace) {
    return sb::cuda::Coverage(p.problem, max_seqlen, on.machine, ViewOf(qr), ViewOf(kr), row_stride,
                              max_rank, Mutable<float>(mass), workspace);
  });
  return mass;
}

// Values that the CPU's op refuses are not seen here; they choose some budget.
Tensor Budget(const Tensor& mass, const Tensor& cost_us, const Tensor& tau_us,
              const Tensor& tolerance, const Tensor& k0, int64_t min_budget,
              const std::optional<Tensor>& cu_seqlens, int64_t block_size, int64_t row_stride,
              bool tune_short) {
  CheckRowStride(row_stride);
  CheckBudgetSizes(mass, cost_us, tau_us, tolerance, k0, min_budget, cu_seqlens, block_size);
  const Launcher on(mass);
  const Tensor masses = Integers(mass, mass, ScalarType::Float, "mass", "mass");
  const Tensor costs = Integers(cost_us, mass, ScalarType::Int, "cost_us", "mass");
  const Tensor tau = Integers(tau_us, mass, ScalarType::Long, "tau_us", "mass");
  const Tensor share = Integers(tolerance, mass, ScalarType::Float, "tolerance", "mass");
  const Tensor usual = Integers(k0, mass, ScalarType::Int, "k0", "mass");
  std::optional<Tensor> bounds;
  if (cu_seqlens.has_value()) {
    bounds = Integers(*cu_seqlens, mass, ScalarType::Int, "cu_seqlens", "mass");
    CheckShape(*bounds, "cu_seqlens", {mass.size(0) + 1});
  }
  sb::cuda::BudgetProblem p{};
  p.sequences = mass.size(0);
  p.heads = mass.size(1);
  p.ranks = mass.size(2);
  p.max_budget = cost_us.size(1);
  p.min_budget = min_budget;
  p.mass = Data<float>(masses);
  p.cost_us = Data<int32_t>(costs);
  p.tau_us = Data<int64_t>(tau);
  p.tolerance = Data<float>(share);
  p.k0 = Data<int32_t>(usual);
  p.one_k0 = usual.numel() == 1;
  p.cu_seqlens = bounds.has_value() ? Data<int32_t>(*bounds) : nullptr;
  p.block_size = block_size;
  p.row_stride = row_stride;
  p.tune_short = tune_short;
  const Tensor budgets = Empty(mass, {p.sequences}, ScalarType::Int);
  RunWithWorkspace(mass, [&](void* workspace) {
    return sb::cuda::Budget(p, on.machine, Mutable<int32_t>(budgets), workspace);
  });
  return budgets;
}

}  // namespace

#if defined(SB_EMULATED)

STABLE_TORCH_LIBRARY_FRAGMENT(sb_emulated, m) {
  m.def(
      "moba_coverage(Tensor q, Tensor k, Tensor cu_seqlens, int block_size, SymInt max_seqlen, "
      "SymInt max_rank, int row_stride=64) -> Tensor");
  m.def(
      "moba_budget(Tensor mass, Tensor cost_us, Tensor tau_us, Tensor tolerance, Tensor k0, SymInt "
      "min_budget, Tensor? cu_seqlens=None, int block_size=0, int row_stride=64, bool "
      "tune_short=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sb_emulated, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(sb, CUDA, m) {
#endif
  m.impl("moba_coverage", TORCH_BOX(&Coverage));
  m.impl("moba_budget", TORCH_BOX(&Budget));
}
