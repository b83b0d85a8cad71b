// What the ops that tune budgets ask of sizes, on every device. Only the bindings include this.
#pragma once

#include <optional>
#include <string>

#include "attention/arguments.h"

namespace {

inline std::string Text(int64_t x) { return std::to_string(x); }

// A value, as opposed to a shape, that cannot work: a ValueError in Python.
[[noreturn]] inline void RefuseValue(const std::string& found, const std::string& why,
                                     const std::string& change) {
  throw std::invalid_argument(found + ": " + why + ". To fix it, " + change + ".");
}

inline void CheckRowStride(int64_t row_stride) {
  if (row_stride < 1)
    RefuseValue("row_stride is " + Text(row_stride), "every row_stride-th row is sampled",
                "pass row_stride >= 1, such as 64");
}

inline void CheckMaxRank(int64_t max_rank) {
  if (max_rank < 0 || max_rank >= kMaxBudget)
    RefuseValue("max_rank is " + Text(max_rank),
                "it counts the ranks of earlier blocks, below 32767",
                "pass the largest budget less 1");
}

inline void CheckBudgetSizes(const Tensor& mass, const Tensor& cost_us, const Tensor& tau_us,
                             const Tensor& tolerance, const Tensor& k0, int64_t min_budget,
                             const std::optional<Tensor>& cu_seqlens, int64_t block_size) {
  if (mass.dim() != 3 || cost_us.dim() != 2 || mass.size(0) != cost_us.size(0) ||
      cost_us.size(1) < 1 || mass.size(2) < cost_us.size(1) - 1)
    Refuse("mass has shape " + Shape(mass) + " and cost_us " + Shape(cost_us),
           "a cost for each budget needs the mass of one rank less",
           "pass mass [sequences, heads, >= max_budget - 1] and cost_us [sequences, max_budget]");
  if (tau_us.numel() != 1 || tolerance.numel() != 1 ||
      (k0.numel() != 1 && k0.numel() != mass.size(0)))
    Refuse("tau_us, tolerance and k0 have " + Text(tau_us.numel()) + ", " +
               Text(tolerance.numel()) + " and " + Text(k0.numel()) + " elements",
           "the first two are one number each, and k0 is one or one per sequence",
           "pass tensors of those sizes");
  if (min_budget < 1)
    RefuseValue("min_budget is " + Text(min_budget), "a query always attends its own block",
                "pass min_budget >= 1");
  if (cu_seqlens.has_value() && block_size < 1)
    RefuseValue("block_size is " + Text(block_size),
                "cu_seqlens is given, and lengths count in blocks",
                "pass the attention's block_size");
}

}  // namespace
