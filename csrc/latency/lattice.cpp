#include "latency/lattice.h"

#include <algorithm>
#include <cmath>

namespace sb {

namespace {

double ScaleBetween(double from, double to) {
  return static_cast<double>(kWeightOne) / (to - from);
}

}  // namespace

Lattice::Place Lattice::SearchKnot(int64_t budget) const {
  const auto above =
      std::upper_bound(knots.begin(), knots.end(), budget,
                       [](int64_t value, const Knot& knot) { return value < knot.budget; });
  const auto most = static_cast<int32_t>(knots.size()) - 2;
  const auto j = std::min(static_cast<int32_t>(above - knots.begin()) - 1, most);
  const double x = Log2(static_cast<double>(budget));
  return {j, static_cast<int32_t>(Weight(x, knots[j].log2_budget, knots[j].scale))};
}

void Lattice::IndexAxes() {
  for (size_t i = 0; i + 1 < rows.size(); ++i)
    rows[i].scale = ScaleBetween(rows[i].log2_length, rows[i + 1].log2_length);
  for (size_t j = 0; j + 1 < knots.size(); ++j)
    knots[j].scale = ScaleBetween(knots[j].log2_budget, knots[j + 1].log2_budget);
  for (Row& row : rows) {
    // The length by bisection, with the very logarithm that look-ups use.
    int64_t below = 0;
    row.length = kMaxLength;
    while (row.length - below > 1) {
      const int64_t middle = below + (row.length - below) / 2;
      (Log2(static_cast<double>(middle)) >= row.log2_length ? row.length : below) = middle;
    }
  }
  int32_t i = 0;
  for (int bucket = 0; bucket < 31 * 32; ++bucket) {
    const auto first = static_cast<int64_t>(std::ldexp(1.0 + bucket % 32 / 32.0, bucket / 32));
    while (i + 2 < static_cast<int32_t>(rows.size()) && rows[i + 1].length <= first) ++i;
    row_of.push_back(i);
  }
  knot_of.assign(1, {0, 0});
  for (int64_t budget = 1; budget <= kListedBudgets; ++budget)
    knot_of.push_back(SearchKnot(budget));
}

void Lattice::Finish() {
  std::vector<int64_t> bound;  // by knot: the dense time that a budget up to the next knot may need
  for (size_t j = 0; j < knots.size(); ++j) {
    const int64_t reach = knots[std::min(j + 1, knots.size() - 1)].reach;
    bound.push_back(DenseAt(RowAt(std::min(reach, kMaxLength))));
  }
  for (Row& row : rows) {
    row.fixed_ms = Exp2(row.fixed);
    row.border = 0;
    while (row.border < row.last && values[row.offset + row.border] >= bound[row.border])
      ++row.border;
  }
}

Lattice Scale(const Lattice& lattice, const std::vector<double>& log2_lengths,
              const std::vector<double>& log2_factors) {
  Lattice scaled = lattice;
  const size_t count = log2_lengths.size();
  size_t n = 0;
  const Row* before = nullptr;
  for (Row& row : scaled.rows) {
    const double x = row.log2_length;
    while (n < count && log2_lengths[n] <= x) ++n;
    double factor;
    if (n == 0) {
      factor = log2_factors.front();
    } else if (n == count) {
      factor = log2_factors.back();
    } else {
      const double share = (x - log2_lengths[n - 1]) / (log2_lengths[n] - log2_lengths[n - 1]);
      factor = log2_factors[n - 1] + (log2_factors[n] - log2_factors[n - 1]) * share;
    }
    const int64_t shift = ToFixed(factor);
    row.dense = Limit(row.dense + shift);
    row.fixed = Limit(row.fixed + shift);
    int64_t* values = scaled.values.data() + row.offset;
    for (int32_t j = 0; j <= row.last; ++j) values[j] = Limit(values[j] + shift);
    if (before != nullptr) {
      row.dense = std::max(row.dense, before->dense);
      row.fixed = std::max(row.fixed, before->fixed);
      const int64_t* previous = scaled.values.data() + before->offset;
      for (int32_t j = 0; j <= row.last; ++j)
        values[j] = std::max(values[j], previous[std::min(j, before->last)]);
    }
    before = &row;
  }
  scaled.Finish();
  return scaled;
}

}  // namespace sb
