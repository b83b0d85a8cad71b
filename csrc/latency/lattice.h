// The surface that predictions are read from: log2 of the attention's time over (length, budget).
//
// Between two measured lengths the times are bilinear in log T over (log L, log u), u = budget *
// block / L, the share of the sequence that a query attends; u = 1 is the dense curve. Taken alone,
// that surface need not be monotone in L at a fixed budget, where u falls as L grows. So it is
// sampled once on a lattice, eight rows per octave of L, at every budget up to 64 and sixteen per
// octave above; the samples are made monotone; and between them the surface is bilinear in log T
// over (log L, log budget), which keeps the order of its corners. Rows beyond the measured lengths
// follow the closed-form pair count.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "latency/measurements.h"
#include "latency/numeric.h"

namespace sb {

constexpr auto kNeverMeasured = static_cast<int32_t>(kMaxLength);
constexpr int64_t kListedBudgets = 2048;

// One length. The times are fixed-point logarithms (numeric.h) and never below those of the row
// before. What a prediction reads fills one cache line; the rest comes after it.
struct alignas(64) Row {
  double log2_length = 0;
  double scale = 0;        // weights per unit of log2 up to the next row
  int64_t length = 0;      // the shortest sequence that belongs here
  int64_t dense = 0;       // attention of one layer over all blocks
  double fixed_ms = 0;     // 2^fixed
  int64_t offset = 0;      // of its values
  int32_t last = 0;        // values[offset + last] is `dense`: knots from here on attend everything
  int32_t border = 0;      // below this knot, a value is above any dense time that must bound it
  int32_t least_here = 0;  // smallest measured budget, at this very length
  int32_t least_above = 0;  // the same between this row and the next

  int64_t fixed = 0;       // all that no budget changes: dense layers, rest of the layers, outside
  double dense_share = 0;  // of the forward pass in `dense`
  double fixed_share = 0;  // of the forward pass in `fixed`
};
static_assert(offsetof(Row, fixed) == 64);

struct Knot {
  int64_t budget = 0;
  double log2_budget = 0;
  double scale = 0;   // weights per unit of log2 up to the next knot
  int64_t reach = 0;  // the longest sequence that is dense at this budget
  double log2_reach = 0;
};

struct Lattice {
  std::vector<Row> rows;
  std::vector<Knot> knots;
  std::vector<int64_t> values;  // by row, then knot
  std::vector<double> shares;   // of the forward pass, in the same places
  double correction = 0;        // largest relative change that made the measurements monotone
  double mean_correction = 0;

  struct Place {
    int32_t index;
    int32_t weight;
  };
  std::vector<int32_t> row_of;  // by the leading bits of the length: the first row to look at
  std::vector<Place> knot_of;   // by budget, up to kListedBudgets
  Place RowAt(int64_t length) const;
  Place KnotAt(int64_t budget) const {
    return budget <= kListedBudgets ? knot_of[budget] : SearchKnot(budget);
  }
  Place SearchKnot(int64_t budget) const;
  int64_t DenseAt(Place row) const {
    return Blend(rows[row.index].dense, rows[row.index + 1].dense, row.weight);
  }
  // In milliseconds and linear between rows, which are close: a power of two less to compute.
  double FixedAt(Place row) const {
    const double a = rows[row.index].fixed_ms, b = rows[row.index + 1].fixed_ms;
    return std::min(a + (b - a) * (static_cast<double>(row.weight) * 0x1p-20), b);
  }
  // Fills what the axes are looked up by.
  void IndexAxes();
  // Fills what follows from the rows' times: `border` and `fixed_ms`.
  void Finish();
};

// The first bits of a length: its power of two and the next five bits.
inline size_t LeadingBits(int64_t length) {
  const auto x = static_cast<double>(length);
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<size_t>((bits >> 47) - (uint64_t{1023} << 5));
}

inline Lattice::Place Lattice::RowAt(int64_t length) const {
  int32_t i = row_of[LeadingBits(length)];
  const auto most = static_cast<int32_t>(rows.size()) - 2;
  // The first step has no branch: it goes either way.
  i += static_cast<int32_t>(i < most) & static_cast<int32_t>(rows[i + 1].length <= length);
  while (i < most && rows[i + 1].length <= length) ++i;
  const double x = Log2(static_cast<double>(length));
  return {i, static_cast<int32_t>(Weight(x, rows[i].log2_length, rows[i].scale))};
}

Lattice BuildLattice(const Measurements& m);

// The same surface with every time multiplied by 2^factor, linear between the given log2 lengths
// (ascending) and constant beyond; made monotone in the length again.
Lattice Scale(const Lattice& lattice, const std::vector<double>& log2_lengths,
              const std::vector<double>& log2_factors);

}  // namespace sb
