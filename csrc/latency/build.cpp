// From measurements to the lattice.
#include <algorithm>
#include <cmath>
#include <limits>

#include "latency/isotonic.h"
#include "latency/lattice.h"
#include "latency/pairs.h"

namespace sb {

namespace {

constexpr int kRowsPerOctave = 8;
constexpr int64_t kEveryBudget = 64;

// Where a row of the lattice lies: at a measured length, between two, below the first or above the
// last.
struct Spot {
  enum Kind { kBelow, kMeasured, kBetween, kAbove } kind;
  size_t index;    // of the measured length (kBetween: of the lower one)
  double weight;   // kBetween: from the lower (0) to the upper (1)
  int64_t length;  // not for kBetween
  double log2_length;
};

double LogPairs(int64_t length, int64_t budget, int64_t block) {
  return Log2(static_cast<double>(AttendedPairs(length, budget, block)));
}

double LogCausal(int64_t length) {
  return Log2(static_cast<double>(AttendedPairs(length, 1, length)));
}

std::vector<Spot> Spots(const std::vector<int64_t>& lengths) {
  const auto log2 = [](int64_t length) { return Log2(static_cast<double>(length)); };
  std::vector<Spot> spots;
  for (int64_t x = 1; x < lengths.front(); x += std::max<int64_t>(1, x / 2))
    spots.push_back({Spot::kBelow, 0, 0, x, log2(x)});
  for (size_t i = 0; i < lengths.size(); ++i) {
    const double here = log2(lengths[i]);
    spots.push_back({Spot::kMeasured, i, 0, lengths[i], here});
    if (i + 1 == lengths.size()) break;
    const double distance = log2(lengths[i + 1]) - here;
    const double parts = std::ceil(distance * kRowsPerOctave);
    for (double n = 1; n < parts; ++n)
      spots.push_back({Spot::kBetween, i, n / parts, 0, here + distance * (n / parts)});
  }
  const size_t last = lengths.size() - 1;
  for (int64_t x = lengths.back(); x < kMaxLength;) {
    x = std::min(x + std::max<int64_t>(1, x / 2), kMaxLength);
    spots.push_back({Spot::kAbove, last, 0, x, log2(x)});
  }
  return spots;
}

std::vector<Knot> Knots(const Measurements& m) {
  const int64_t most = (kMaxLength + m.block_size - 1) / m.block_size;
  std::vector<int64_t> budgets;
  for (int64_t k = 1; k < most; k += k < kEveryBudget ? 1 : std::max<int64_t>(1, k / 23))
    budgets.push_back(k);
  for (int64_t k = 1; k <= kEveryBudget; ++k) budgets.push_back(k);
  budgets.push_back(most);
  for (const auto& row : m.budgets) budgets.insert(budgets.end(), row.begin(), row.end());
  std::sort(budgets.begin(), budgets.end());
  budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
  std::vector<Knot> knots;
  for (const int64_t k : budgets)
    knots.push_back({k, Log2(static_cast<double>(k)), 0, k * m.block_size,
                     Log2(static_cast<double>(k * m.block_size))});
  return knots;
}

// A curve over the measured lengths as log2 of the whole time and the forward pass's share of it.
struct LogCurve {
  std::vector<double> log2, share;
};

LogCurve Logs(const Curve& curve) {
  LogCurve logs;
  for (size_t i = 0; i < curve.forward.size(); ++i) {
    const double whole = curve.forward[i] + curve.backward[i];
    logs.log2.push_back(Log2(whole));
    logs.share.push_back(curve.forward[i] / whole);
  }
  return logs;
}

// How far the measurements were moved.
class Corrections {
 public:
  void Add(const std::vector<double>& before, const std::vector<int64_t>& after) {
    for (size_t i = 0; i < before.size(); ++i) {
      const int64_t was = ToFixed(before[i]);
      const double size = was == after[i] ? 0.0 : std::fabs(Exp2(after[i]) / Exp2(was) - 1.0);
      largest_ = std::max(largest_, size);
      sum_ += size;
      count_ += 1.0;
    }
  }
  double largest() const { return largest_; }
  double mean() const { return sum_ / count_; }

 private:
  double largest_ = 0, sum_ = 0, count_ = 0;
};

std::vector<int64_t> Fixed(const std::vector<double>& logs) {
  std::vector<int64_t> fixed;
  for (const double y : logs) fixed.push_back(ToFixed(y));
  return fixed;
}

double Mix(double a, double b, double weight) { return a + (b - a) * weight; }

// Values of a curve at all rows; `work` is the log2 that it follows outside the measured lengths.
template <typename Work>
std::vector<int64_t> AtSpots(const std::vector<Spot>& spots, const std::vector<int64_t>& measured,
                             Work&& work) {
  std::vector<int64_t> result;
  for (const Spot& spot : spots) {
    const int64_t here = measured[spot.index];
    int64_t value = here;
    if (spot.kind == Spot::kBetween)
      value =
          std::min(ToFixed(Mix(FromFixed(here), FromFixed(measured[spot.index + 1]), spot.weight)),
                   measured[spot.index + 1]);
    else if (spot.kind != Spot::kMeasured)
      value = ToFixed(FromFixed(here) + work(spot));
    if (!result.empty()) value = std::max(value, result.back());
    result.push_back(value);
  }
  return result;
}

double ShareAt(const Spot& spot, const std::vector<double>& shares) {
  return spot.kind == Spot::kBetween ? Mix(shares[spot.index], shares[spot.index + 1], spot.weight)
                                     : shares[spot.index];
}

// The times at one measured length as a piecewise linear function of log2(budget), up to the dense
// time.
class MeasuredRow {
 public:
  MeasuredRow(int64_t length, int64_t block, const std::vector<int64_t>& budgets,
              const std::vector<int64_t>& times, const std::vector<double>& shares, int64_t dense,
              double dense_share) {
    const double top = Log2(static_cast<double>(length)) - Log2(static_cast<double>(block));
    const bool measured = !budgets.empty();
    const int64_t first = measured ? budgets.front() : (length - 1) / block + 1;
    const double time = FromFixed(measured ? times.front() : dense);
    const double pairs = measured ? LogPairs(length, first, block) : LogCausal(length);
    // Below the smallest measured budget: by pairs.
    for (int64_t k = 1; k < first; k *= 2)
      Add(Log2(static_cast<double>(k)), time + (LogPairs(length, k, block) - pairs),
          measured ? shares.front() : dense_share);
    for (size_t j = 0; j < budgets.size(); ++j)
      Add(Log2(static_cast<double>(budgets[j])), FromFixed(times[j]), shares[j]);
    Add(top, FromFixed(dense), dense_share);
  }

  struct Value {
    double log2, share;
  };
  Value At(double log2_budget) const {
    if (log2_budget >= x_.back()) return {y_.back(), share_.back()};
    size_t j =
        static_cast<size_t>(std::upper_bound(x_.begin(), x_.end(), log2_budget) - x_.begin());
    if (j == 0) return {y_.front(), share_.front()};
    const double weight = (log2_budget - x_[j - 1]) / (x_[j] - x_[j - 1]);
    return {Mix(y_[j - 1], y_[j], weight), Mix(share_[j - 1], share_[j], weight)};
  }

 private:
  void Add(double x, double y, double share) {
    x_.push_back(x);
    y_.push_back(y);
    share_.push_back(share);
  }
  std::vector<double> x_, y_, share_;
};

// Upper bounds by measured length and knot: the least time measured at no smaller length and
// budget.
std::vector<std::vector<int64_t>> UpperBounds(const Measurements& m, const std::vector<Knot>& knots,
                                              const std::vector<std::vector<int64_t>>& times) {
  std::vector<std::vector<int64_t>> bounds(m.lengths.size());
  std::vector<int64_t> bound(knots.size(), std::numeric_limits<int64_t>::max());
  for (size_t i = m.lengths.size(); i-- > 0;) {
    for (size_t j = knots.size(), n = m.budgets[i].size(); j-- > 0;) {
      if (n > 0 && m.budgets[i][n - 1] == knots[j].budget)
        bound[j] = std::min(bound[j], times[i][--n]);
      if (j + 1 < knots.size()) bound[j] = std::min(bound[j], bound[j + 1]);
    }
    bounds[i] = bound;
  }
  return bounds;
}

// The steps in their order; each fills what the next one needs.
class Builder {
 public:
  explicit Builder(const Measurements& m) : m_(m), spots_(Spots(m.lengths)) {
    lattice_.knots = Knots(m);
    lattice_.rows.resize(spots_.size());
    for (size_t s = 0; s < spots_.size(); ++s) lattice_.rows[s].log2_length = spots_[s].log2_length;
    lattice_.IndexAxes();
  }

  Lattice Build() {
    FitCurves();
    FitPoints();
    FillRows();
    lattice_.correction = corrections_.largest();
    lattice_.mean_correction = corrections_.mean();
    lattice_.Finish();
    return std::move(lattice_);
  }

 private:
  double Log2Length(size_t i) const { return Log2(static_cast<double>(m_.lengths[i])); }

  std::vector<int64_t> Monotone(const LogCurve& logs) {
    std::vector<double> values = logs.log2;
    Isotonic(values);
    const std::vector<int64_t> fixed = Fixed(values);
    corrections_.Add(logs.log2, fixed);
    return fixed;
  }

  // What depends on the length alone.
  void FitCurves() {
    const LogCurve rest_logs = Logs(m_.rest), outside_logs = Logs(m_.outside);
    dense_logs_ = Logs(m_.dense);
    dense_ = Monotone(dense_logs_);
    const auto pairs = [this](const Spot& spot) {
      return LogCausal(spot.length) - LogCausal(m_.lengths[spot.index]);
    };
    const auto tokens = [this](const Spot& spot) {
      return spot.log2_length - Log2Length(spot.index);
    };
    const std::vector<int64_t> dense_rows = AtSpots(spots_, dense_, pairs);
    const std::vector<int64_t> rest_rows = AtSpots(spots_, Monotone(rest_logs), tokens);
    const std::vector<int64_t> outside_rows = AtSpots(spots_, Monotone(outside_logs), tokens);
    const auto all_layers = static_cast<double>(m_.layers + m_.dense_layers);
    const auto dense_layers = static_cast<double>(m_.dense_layers);
    for (size_t s = 0; s < spots_.size(); ++s) {
      const Spot& spot = spots_[s];
      Row& row = lattice_.rows[s];
      row.dense = dense_rows[s];
      row.dense_share = ShareAt(spot, dense_logs_.share);
      const double rest = all_layers * Exp2(rest_rows[s]), outside = Exp2(outside_rows[s]);
      const double attention = dense_layers * Exp2(row.dense);
      const double whole = rest + outside + attention;
      row.fixed = ToFixed(Log2(whole));
      if (s > 0) row.fixed = std::max(row.fixed, lattice_.rows[s - 1].fixed);
      row.fixed_share =
          (rest * ShareAt(spot, rest_logs.share) + outside * ShareAt(spot, outside_logs.share) +
           attention * row.dense_share) /
          whole;
    }
  }

  // Measured points below the dense curve: monotone among themselves, and between the dense times
  // of what they attend at least and at most.
  void FitPoints() {
    std::vector<std::vector<double>> logs, shares;
    for (const Curve& row : m_.sparse) {
      LogCurve row_logs = Logs(row);
      logs.push_back(std::move(row_logs.log2));
      shares.push_back(std::move(row_logs.share));
    }
    std::vector<std::vector<double>> monotone = logs;
    IsotonicGrid(m_.budgets, monotone);
    for (size_t i = 0; i < m_.lengths.size(); ++i) {
      times_.emplace_back();
      for (size_t j = 0; j < monotone[i].size(); ++j) {
        const int64_t reach = m_.budgets[i][j] * m_.block_size;
        const int64_t least = lattice_.DenseAt(lattice_.RowAt(reach));
        times_[i].push_back(std::min(std::max(ToFixed(monotone[i][j]), least), dense_[i]));
      }
      corrections_.Add(logs[i], times_[i]);
      measured_.emplace_back(m_.lengths[i], m_.block_size, m_.budgets[i], times_[i], shares[i],
                             dense_[i], dense_logs_.share[i]);
      const int32_t none = m_.lengths[i] > m_.block_size ? kNeverMeasured : 0;
      least_budget_.push_back(m_.budgets[i].empty() ? none
                                                    : static_cast<int32_t>(m_.budgets[i].front()));
    }
  }

  // Row after row, so that each can be held above the one before.
  void FillRows() {
    const size_t count = m_.lengths.size(), num_knots = lattice_.knots.size();
    const std::vector<std::vector<int64_t>> upper = UpperBounds(m_, lattice_.knots, times_);
    for (size_t s = 0; s < spots_.size(); ++s) {
      const Spot& spot = spots_[s];
      Row& row = lattice_.rows[s];
      const size_t above = std::min(spot.index + 1, count - 1);
      const int32_t both = std::max(least_budget_[spot.index], least_budget_[above]);
      row.least_here = spot.kind == Spot::kBetween ? both : least_budget_[spot.index];
      row.least_above = spot.kind == Spot::kBelow ? least_budget_[0] : both;
      if (spot.kind == Spot::kMeasured) top_ = s;
      const std::vector<int64_t>& bounds = upper[spot.kind == Spot::kBetween ? above : spot.index];
      row.offset = static_cast<int64_t>(lattice_.values.size());
      int64_t run = std::numeric_limits<int64_t>::min();
      size_t j = 0;
      for (; j + 1 < num_knots && lattice_.knots[j].log2_reach < spot.log2_length; ++j) {
        const MeasuredRow::Value value = ValueAt(spot, above, j);
        run = std::max(run, ToFixed(value.log2));
        if (s > 0) {
          const Row& before = lattice_.rows[s - 1];
          run = std::max(run, lattice_.values[before.offset + std::min<int64_t>(j, before.last)]);
        }
        const int64_t most = spot.kind == Spot::kAbove ? row.dense : std::min(bounds[j], row.dense);
        lattice_.values.push_back(std::min(run, most));
        lattice_.shares.push_back(value.share);
      }
      lattice_.values.push_back(row.dense);
      lattice_.shares.push_back(row.dense_share);
      row.last = static_cast<int32_t>(j);
    }
  }

  // The surface before it is made monotone.
  MeasuredRow::Value ValueAt(const Spot& spot, size_t above, size_t j) const {
    const Knot& knot = lattice_.knots[j];
    const double x = knot.log2_budget;
    const auto more_pairs = [&] {
      return LogPairs(spot.length, knot.budget, m_.block_size) -
             LogPairs(m_.lengths[spot.index], knot.budget, m_.block_size);
    };
    if (spot.kind == Spot::kBetween) {
      // At the same u in both rows; where that asks for less than one block, at the nearest to it.
      const double down = std::min(spot.log2_length - Log2Length(spot.index), x);
      const double up = down * ((1.0 - spot.weight) / spot.weight);
      const MeasuredRow::Value a = measured_[spot.index].At(x - down);
      const MeasuredRow::Value b = measured_[above].At(x + up);
      return {Mix(a.log2, b.log2, spot.weight), Mix(a.share, b.share, spot.weight)};
    }
    if (spot.kind == Spot::kAbove) {
      const Row& top = lattice_.rows[top_];
      const int64_t place = top.offset + std::min<int64_t>(j, top.last);
      return {FromFixed(lattice_.values[place]) + more_pairs(), lattice_.shares[place]};
    }
    MeasuredRow::Value value = measured_[spot.index].At(x);
    if (spot.kind == Spot::kBelow) value.log2 += more_pairs();
    return value;
  }

  const Measurements& m_;
  const std::vector<Spot> spots_;
  Lattice lattice_;
  Corrections corrections_;
  LogCurve dense_logs_;
  std::vector<int64_t> dense_;               // by measured length
  std::vector<std::vector<int64_t>> times_;  // by measured length and budget
  std::vector<MeasuredRow> measured_;
  std::vector<int32_t> least_budget_;  // the smallest that was measured
  size_t top_ = 0;                     // the last measured row
};

}  // namespace

Lattice BuildLattice(const Measurements& m) {
  Check(m);
  return Builder(m).Build();
}

}  // namespace sb
