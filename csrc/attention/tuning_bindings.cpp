// The ops that tune budgets, beside those of bindings.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/tuning_arguments.h"
#include "tuning/budget.h"
#include "tuning/sampling.h"

namespace {

Tensor Coverage(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, int64_t block_size,
                int64_t max_seqlen, int64_t max_rank, int64_t row_stride) {
  CheckRowStride(row_stride);
  CheckMaxRank(max_rank);
  if (q.dim() != 3)
    Refuse("q has shape " + Shape(q), "sequences are packed", "pass [tokens, heads, head_dim]");
  const int64_t sequences = cu_seqlens.numel() - 1;
  const Tensor budget =
      Empty(q, {std::max<int64_t>(sequences, 0), q.size(1)}, ScalarType::Int);  // checked, not used
  std::fill_n(Mutable<int32_t>(budget), budget.numel(), 1);
  const Packed packed = Pack(q, k, cu_seqlens, budget, block_size, 1, max_seqlen);
  const Tensor mass = Empty(q, {sequences, q.size(1), max_rank}, ScalarType::Float);
  const Tensor qr = Readable(q), kr = Readable(k);
  sb::Coverage(packed.problem, ViewOf(qr), ViewOf(kr), row_stride, max_rank, Mutable<float>(mass));
  return mass;
}

// Lengths of the sequences, or nothing where they are not given.
std::vector<int64_t> LengthsOf(const std::optional<Tensor>& cu_seqlens, int64_t sequences) {
  std::vector<int64_t> lengths;
  if (!cu_seqlens.has_value()) return lengths;
  const Tensor bounds = Contiguous(*cu_seqlens, ScalarType::Int, "cu_seqlens");
  CheckShape(bounds, "cu_seqlens", {sequences + 1});
  const int32_t* at = Data<int32_t>(bounds);
  for (int64_t n = 0; n < sequences; ++n) {
    lengths.push_back(static_cast<int64_t>(at[n + 1]) - at[n]);
    if (lengths.back() < 0)
      RefuseValue("cu_seqlens decreases at position " + Text(n + 1), "a length cannot be negative",
                  "pass cu_seqlens = cumulative sum of the sequence lengths, with 0 in front");
  }
  return lengths;
}

void CheckCosts(const int32_t* cost_us, int64_t n, int64_t max_budget) {
  for (int64_t k = 0; k < max_budget; ++k)
    if (cost_us[k] < (k > 0 ? cost_us[k - 1] : 0))
      RefuseValue("cost_us of sequence " + Text(n) + " is " + Text(cost_us[k]) + " at budget " +
                      Text(k + 1),
                  "times are not negative and never fall when the budget grows",
                  "take them from LatencyTable.cost_us");
}

Tensor Budget(const Tensor& mass, const Tensor& cost_us, const Tensor& tau_us,
              const Tensor& tolerance, const Tensor& k0, int64_t min_budget,
              const std::optional<Tensor>& cu_seqlens, int64_t block_size, int64_t row_stride,
              bool tune_short) {
  CheckRowStride(row_stride);
  CheckBudgetSizes(mass, cost_us, tau_us, tolerance, k0, min_budget, cu_seqlens, block_size);
  const int64_t sequences = mass.size(0), heads = mass.size(1), ranks = mass.size(2);
  const int64_t max_budget = cost_us.size(1);
  const Tensor masses = Contiguous(mass, ScalarType::Float, "mass");
  const Tensor costs = Contiguous(cost_us, ScalarType::Int, "cost_us");
  const Tensor tau = Contiguous(tau_us, ScalarType::Long, "tau_us");
  const Tensor share = Contiguous(tolerance, ScalarType::Float, "tolerance");
  const Tensor usual = Contiguous(k0, ScalarType::Int, "k0");
  const float allowed = *Data<float>(share);
  if (!(allowed >= 0))
    RefuseValue("tolerance is " + std::to_string(allowed), "it bounds how much coverage may change",
                "pass a tolerance between 0 and 1");
  const std::vector<int64_t> lengths = LengthsOf(cu_seqlens, sequences);
  const sb::BudgetRule rule{*Data<int64_t>(tau), sb::FixedPoint(allowed) * heads, min_budget,
                            max_budget, tune_short};
  std::vector<int64_t> coverage(static_cast<size_t>(sequences * max_budget));
  std::vector<sb::BudgetSequence> all;
  for (int64_t n = 0; n < sequences; ++n) {
    int64_t* curve = coverage.data() + n * max_budget;
    sb::CoverageOfMass(Data<float>(masses) + n * heads * ranks, heads, ranks, max_budget, curve);
    sb::BudgetSequence s{curve, Data<int32_t>(costs) + n * max_budget,
                         Data<int32_t>(usual)[usual.numel() == 1 ? 0 : n], 1, sb::kManyBlocks};
    if (s.k0 < 1)
      RefuseValue("k0 is " + Text(s.k0), "a query always attends its own block", "pass k0 >= 1");
    CheckCosts(s.cost_us, n, max_budget);
    if (!lengths.empty()) {
      const int64_t length = lengths[static_cast<size_t>(n)];
      s.rows = sb::SampledRows(length, block_size, row_stride);
      s.blocks = (length + block_size - 1) / block_size;
    }
    all.push_back(s);
  }
  const Tensor budgets = Empty(mass, {sequences}, ScalarType::Int);
  std::vector<int64_t> scratch(static_cast<size_t>(sequences));
  sb::ChooseBudgets(rule, all.data(), sequences, Mutable<int32_t>(budgets), scratch.data());
  return budgets;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sb, m) {
  m.def(
      "moba_coverage(Tensor q, Tensor k, Tensor cu_seqlens, int block_size, SymInt max_seqlen, "
      "SymInt max_rank, int row_stride=64) -> Tensor");
  m.def(
      "moba_budget(Tensor mass, Tensor cost_us, Tensor tau_us, Tensor tolerance, Tensor k0, SymInt "
      "min_budget, Tensor? cu_seqlens=None, int block_size=0, int row_stride=64, bool "
      "tune_short=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sb, CPU, m) {
  m.impl("moba_coverage", TORCH_BOX(&Coverage));
  m.impl("moba_budget", TORCH_BOX(&Budget));
}
