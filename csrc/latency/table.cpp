#include "latency/table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace sb {

namespace {

[[noreturn]] void RefuseLength(int64_t length) {
  throw std::invalid_argument(
      "length is " + std::to_string(length) +
      ": a sequence has 0 to 2147483647 tokens. To fix it, pass the number of "
      "tokens of one sequence.");
}

[[noreturn]] void RefuseBudget(int64_t budget) {
  throw std::invalid_argument(
      "budget is " + std::to_string(budget) +
      ": a query always attends its own block. To fix it, pass budget >= 1.");
}

inline void CheckLength(int64_t length) {
  if (length < 0 || length > kMaxLength) RefuseLength(length);
}

inline void CheckBudget(int64_t budget) {
  if (budget < 1) RefuseBudget(budget);
}

}  // namespace

int64_t WholeMicroseconds(double ms) {
  return static_cast<int64_t>(std::floor(std::min(ms * 1000.0, 9e18) + 0.5));
}

LatencyTable::LatencyTable(const Measurements& m)
    : block_size_(m.block_size),
      layers_(m.layers),
      dense_layers_(m.dense_layers),
      layer_count_(static_cast<double>(m.layers)),
      fixed_ms_(m.micro_batch_ms),
      shortest_(m.lengths.empty() ? 0 : m.lengths.front()),
      longest_(m.lengths.empty() ? 0 : m.lengths.back()),
      lattice_(BuildLattice(m)) {}

LatencyTable::LatencyTable(const LatencyTable& other) : LatencyTable(other, other.lattice_) {}

LatencyTable::LatencyTable(const LatencyTable& other, Lattice lattice)
    : block_size_(other.block_size_),
      layers_(other.layers_),
      dense_layers_(other.dense_layers_),
      layer_count_(other.layer_count_),
      fixed_ms_(other.fixed_ms_),
      shortest_(other.shortest_),
      longest_(other.longest_),
      lattice_(std::move(lattice)) {}

inline int64_t LatencyTable::Attention(Lattice::Place row, int64_t length, int64_t budget) const {
  const Row& a = lattice_.rows[row.index];
  const Row& b = lattice_.rows[row.index + 1];
  const int64_t reach = Reach(budget);
  const bool dense = reach >= length;
  const Lattice::Place knot = lattice_.KnotAt(budget);
  const int64_t* low = lattice_.values.data() + a.offset;
  const int64_t* high = lattice_.values.data() + b.offset;
  // The last value of a row is its dense time. No branches here: budgets and lengths come in any
  // order.
  const int32_t j = dense ? std::numeric_limits<int32_t>::max() - 1 : knot.index;
  const int64_t from = Blend(low[std::min(j, a.last)], low[std::min(j + 1, a.last)], knot.weight);
  const int64_t to = Blend(high[std::min(j, b.last)], high[std::min(j + 1, b.last)], knot.weight);
  const int64_t time = Blend(from, to, row.weight);
  if (knot.index < a.border || dense) return time;
  // A sequence costs no less than its first budget * block_size tokens alone, which are dense.
  return std::max(time, lattice_.DenseAt(lattice_.RowAt(reach)));
}

double LatencyTable::AttentionShare(Lattice::Place row, int64_t length, int64_t budget) const {
  const Row& a = lattice_.rows[row.index];
  const Row& b = lattice_.rows[row.index + 1];
  const double weight = static_cast<double>(row.weight) * 0x1p-20;
  if (Reach(budget) >= length) return a.dense_share + (b.dense_share - a.dense_share) * weight;
  const Lattice::Place knot = lattice_.KnotAt(budget);
  const double along = static_cast<double>(knot.weight) * 0x1p-20;
  const auto at = [&](const Row& r) {
    const double* shares = lattice_.shares.data() + r.offset;
    const double from = shares[std::min(knot.index, r.last)];
    const double to = shares[std::min(knot.index + 1, r.last)];
    return from + (to - from) * along;
  };
  const double from = at(a), to = at(b);
  return from + (to - from) * weight;
}

inline bool LatencyTable::Extrapolates(Lattice::Place row, int64_t length, int64_t budget) const {
  if (length < shortest_ || length > longest_) return true;
  const Row& a = lattice_.rows[row.index];
  const int64_t least = row.weight == 0            ? a.least_here
                        : row.weight == kWeightOne ? lattice_.rows[row.index + 1].least_here
                                                   : a.least_above;
  return budget < least && Reach(budget) < length;
}

inline Lattice::Place LatencyTable::Find(int64_t length, int64_t budget) const {
  const Lattice::Place row = lattice_.RowAt(length);
  if (Extrapolates(row, length, budget)) extrapolated_.fetch_add(1, std::memory_order_relaxed);
  return row;
}

double LatencyTable::Predict(int64_t length, int64_t budget) const {
  CheckLength(length);
  CheckBudget(budget);
  if (length == 0) return 0.0;
  const Lattice::Place row = Find(length, budget);
  return layer_count_ * Exp2(Attention(row, length, budget)) + lattice_.FixedAt(row);
}

int64_t LatencyTable::PredictUs(int64_t length, int64_t budget) const {
  return WholeMicroseconds(Predict(length, budget));
}

void LatencyTable::PredictMany(const int64_t* lengths, const int64_t* budgets, int64_t count,
                               double* out) const {
  int64_t extrapolated = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = lengths[i], budget = budgets[i];
    CheckLength(length);
    CheckBudget(budget);
    if (length == 0) {
      out[i] = 0.0;
      continue;
    }
    const Lattice::Place row = lattice_.RowAt(length);
    extrapolated += Extrapolates(row, length, budget) ? 1 : 0;
    out[i] = layer_count_ * Exp2(Attention(row, length, budget)) + lattice_.FixedAt(row);
  }
  if (extrapolated > 0) extrapolated_.fetch_add(extrapolated, std::memory_order_relaxed);
}

std::pair<double, double> LatencyTable::PredictPasses(int64_t length, int64_t budget) const {
  CheckLength(length);
  CheckBudget(budget);
  if (length == 0) return {0.0, 0.0};
  const Lattice::Place row = Find(length, budget);
  const double attention = layer_count_ * Exp2(Attention(row, length, budget));
  const double fixed = lattice_.FixedAt(row);
  const double from = lattice_.rows[row.index].fixed_share;
  const double to = lattice_.rows[row.index + 1].fixed_share;
  const double share = from + (to - from) * (static_cast<double>(row.weight) * 0x1p-20);
  const double forward = attention * AttentionShare(row, length, budget) + fixed * share;
  return {forward, attention + fixed - forward};
}

double LatencyTable::AttentionMs(int64_t length, int64_t budget) const {
  CheckLength(length);
  CheckBudget(budget);
  if (length == 0) return 0.0;
  return Exp2(Attention(Find(length, budget), length, budget));
}

std::pair<double, double> LatencyTable::AttentionPasses(int64_t length, int64_t budget) const {
  CheckLength(length);
  CheckBudget(budget);
  if (length == 0) return {0.0, 0.0};
  const Lattice::Place row = Find(length, budget);
  const double whole = Exp2(Attention(row, length, budget));
  const double forward = whole * AttentionShare(row, length, budget);
  return {forward, whole - forward};
}

int64_t LatencyTable::BudgetWithin(int64_t length, double ms) const {
  CheckLength(length);
  if (std::isnan(ms))
    throw std::invalid_argument(
        "ms is nan: no budget can be compared with it. To fix it, pass a time in milliseconds.");
  if (length == 0) return ms >= 0 ? 1 : 0;
  const int64_t blocks = (length - 1) / block_size_ + 1;
  const Lattice::Place row = Find(length, blocks);
  const double fixed = lattice_.FixedAt(row);
  const auto fits = [&](int64_t budget) {
    return layer_count_ * Exp2(Attention(row, length, budget)) + fixed <= ms;
  };
  if (fits(blocks)) return blocks;
  int64_t fitting = 0, exceeding = blocks;
  while (exceeding - fitting > 1) {
    const int64_t middle = fitting + (exceeding - fitting) / 2;
    (fits(middle) ? fitting : exceeding) = middle;
  }
  return fitting;
}

double LatencyTable::MicroBatchMs(const int64_t* lengths, const int64_t* budgets,
                                  int64_t count) const {
  double sum = fixed_ms_;
  for (int64_t i = 0; i < count; ++i) sum += Predict(lengths[i], budgets[i]);
  return sum;
}

void LatencyTable::CostUs(int64_t length, int64_t max_budget, int32_t* out) const {
  CheckLength(length);
  CheckBudget(max_budget);
  const int64_t blocks = length == 0 ? 0 : (length - 1) / block_size_ + 1;
  const Lattice::Place row =
      length == 0 ? Lattice::Place{0, 0} : Find(length, std::max<int64_t>(blocks, 1));
  const double fixed = length == 0 ? 0.0 : lattice_.FixedAt(row);
  int32_t cost = 0;
  for (int64_t budget = 1; budget <= max_budget; ++budget) {
    // Beyond the number of blocks nothing changes.
    if (budget <= blocks) {
      const double ms = layer_count_ * Exp2(Attention(row, length, budget)) + fixed;
      cost = static_cast<int32_t>(
          std::min<int64_t>(WholeMicroseconds(ms), std::numeric_limits<int32_t>::max()));
    }
    out[budget - 1] = cost;
  }
}

LatencyTable LatencyTable::Scaled(const std::vector<double>& log2_lengths,
                                  const std::vector<double>& log2_factors) const {
  bool good = !log2_lengths.empty() && log2_lengths.size() == log2_factors.size();
  for (size_t i = 0; good && i < log2_lengths.size(); ++i)
    good = std::fabs(log2_lengths[i]) <= 64 && std::fabs(log2_factors[i]) <= 8 &&
           (i == 0 || log2_lengths[i] > log2_lengths[i - 1]);
  if (!good)
    throw std::invalid_argument(
        "the factors cannot be applied: each needs its own log2 length, ascending, and lies within "
        "2^-8 and 2^8. To fix it, pass two lists of the same length.");
  return LatencyTable(*this, Scale(lattice_, log2_lengths, log2_factors));
}

}  // namespace sb
