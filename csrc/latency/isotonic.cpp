#include "latency/isotonic.h"

#include <algorithm>
#include <limits>
#include <map>

namespace sb {

namespace {

constexpr int kRounds = 64;
using Grid = std::vector<std::vector<double>>;

// The largest value at or before each point (sign 1), or minus the smallest at or after it (sign
// -1).
Grid Envelope(const std::vector<std::vector<int64_t>>& columns, const Grid& rows, int sign) {
  std::map<int64_t, double> best;  // by column
  for (const auto& row : columns)
    for (const int64_t column : row) best[column] = -std::numeric_limits<double>::infinity();
  Grid result = rows;
  const size_t count = rows.size();
  for (size_t n = 0; n < count; ++n) {
    const size_t i = sign > 0 ? n : count - 1 - n;
    for (size_t j = 0; j < rows[i].size(); ++j) {
      double& value = best[columns[i][j]];
      value = std::max(value, sign * rows[i][j]);
    }
    double run = -std::numeric_limits<double>::infinity();
    const auto pass = [&run](double& value) { value = run = std::max(run, value); };
    if (sign > 0)
      for (auto it = best.begin(); it != best.end(); ++it) pass(it->second);
    else
      for (auto it = best.rbegin(); it != best.rend(); ++it) pass(it->second);
    for (size_t j = 0; j < rows[i].size(); ++j) result[i][j] = best[columns[i][j]];
  }
  return result;
}

}  // namespace

void Isotonic(std::vector<double>& values) {
  struct Pool {
    double sum;
    double count;
    double mean() const { return sum / count; }
  };
  std::vector<Pool> pools;
  for (const double value : values) {
    pools.push_back({value, 1.0});
    while (pools.size() > 1 && pools[pools.size() - 2].mean() > pools.back().mean()) {
      const Pool last = pools.back();
      pools.pop_back();
      pools.back().sum += last.sum;
      pools.back().count += last.count;
    }
  }
  size_t next = 0;
  for (const Pool& pool : pools)
    for (double n = 0; n < pool.count; ++n) values[next++] = pool.mean();
}

void IsotonicGrid(const std::vector<std::vector<int64_t>>& columns, Grid& rows) {
  std::map<int64_t, std::vector<std::pair<size_t, size_t>>> places;  // column -> its points
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t j = 0; j < rows[i].size(); ++j) places[columns[i][j]].emplace_back(i, j);
  for (int round = 0; round < kRounds; ++round) {
    for (auto& row : rows) Isotonic(row);
    bool changed = false;
    for (const auto& [column, points] : places) {
      std::vector<double> values;
      for (const auto& [i, j] : points) values.push_back(rows[i][j]);
      const std::vector<double> before = values;
      Isotonic(values);
      changed = changed || values != before;
      for (size_t n = 0; n < points.size(); ++n)
        rows[points[n].first][points[n].second] = values[n];
    }
    if (!changed) break;
  }
  const Grid lower = Envelope(columns, rows, 1), upper = Envelope(columns, rows, -1);
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t j = 0; j < rows[i].size(); ++j) rows[i][j] = (lower[i][j] + -upper[i][j]) / 2.0;
}

}  // namespace sb
