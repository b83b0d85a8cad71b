// The latency table: predicted times of sequences, micro-batches and budgets, in milliseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "latency/lattice.h"
#include "latency/measurements.h"

namespace sb {

// Nothing changes after construction but the count of extrapolated predictions, which is atomic:
// any number of threads may read at once. All times are monotone in the length and in the budget.
// Lengths lie in [0, 2^31 - 1] and budgets are at least 1; anything else throws
// std::invalid_argument.
class LatencyTable {
 public:
  explicit LatencyTable(const Measurements& measurements);
  LatencyTable(const LatencyTable& other);

  // Forward and backward through all layers, without the fixed cost of a micro-batch.
  double Predict(int64_t length, int64_t budget) const;
  int64_t PredictUs(int64_t length, int64_t budget) const;
  void PredictMany(const int64_t* lengths, const int64_t* budgets, int64_t count,
                   double* out) const;
  // Forward and backward apart; they add up to Predict.
  std::pair<double, double> PredictPasses(int64_t length, int64_t budget) const;

  // Attention of one layer.
  double AttentionMs(int64_t length, int64_t budget) const;
  std::pair<double, double> AttentionPasses(int64_t length, int64_t budget) const;

  // The largest budget, at most the number of blocks, whose prediction is within `ms`; 0 if there
  // is none.
  int64_t BudgetWithin(int64_t length, double ms) const;
  // The sum of the predictions and the fixed cost.
  double MicroBatchMs(const int64_t* lengths, const int64_t* budgets, int64_t count) const;
  // Whole microseconds for the budgets 1 .. max_budget, at most 2^31 - 1.
  void CostUs(int64_t length, int64_t max_budget, int32_t* out) const;

  // The same table with every time multiplied by 2^factor, which is linear between the given log2
  // lengths.
  LatencyTable Scaled(const std::vector<double>& log2_lengths,
                      const std::vector<double>& log2_factors) const;

  int64_t block_size() const { return block_size_; }
  int64_t layers() const { return layers_; }
  int64_t dense_layers() const { return dense_layers_; }
  double fixed_ms() const { return fixed_ms_; }
  double correction() const { return lattice_.correction; }
  double mean_correction() const { return lattice_.mean_correction; }
  int64_t extrapolated() const { return extrapolated_.load(std::memory_order_relaxed); }

 private:
  LatencyTable(const LatencyTable& other, Lattice lattice);
  // The longest sequence that is dense at a budget, without overflow.
  int64_t Reach(int64_t budget) const { return std::min(budget, kMaxLength) * block_size_; }
  int64_t Attention(Lattice::Place row, int64_t length, int64_t budget) const;
  double AttentionShare(Lattice::Place row, int64_t length, int64_t budget) const;
  // Where a length lies; counts it when (length, budget) was not measured around.
  Lattice::Place Find(int64_t length, int64_t budget) const;
  bool Extrapolates(Lattice::Place row, int64_t length, int64_t budget) const;

  int64_t block_size_, layers_, dense_layers_;
  double layer_count_, fixed_ms_;
  int64_t shortest_, longest_;  // measured
  Lattice lattice_;
  mutable std::atomic<int64_t> extrapolated_{0};
};

// Whole microseconds, halves upward; at most 9e18.
int64_t WholeMicroseconds(double ms);

}  // namespace sb
