// What is planned, in whole numbers; the twin of sb_lightning/balance/reference/problem.py.
#pragma once

#include <cstdint>
#include <vector>

namespace sb::balance {

constexpr int64_t kNoCap = -1;
// Node limit of a search that runs to its end.
constexpr int64_t kUnlimited = -1;
// The longest window that a search can be run on.
constexpr int kMostSearched = 24;

using Numbers = std::vector<int64_t>;
using Items = std::vector<int32_t>;
// Items of each rank, or of each cell.
using Parts = std::vector<Items>;

// Items to deal over ranks x accumulate cells; there are at least as many items as cells.
struct Problem {
  Numbers costs;   // What is balanced, by item; their sum is at most 2^62.
  Numbers tokens;  // Tokens of each item.
  int ranks;
  int accumulate;
  int64_t max_tokens;  // Tokens that a cell may hold, or kNoCap.
  bool equal_counts;   // Whether all cells hold the same number of items (or one more).

  int size() const { return static_cast<int>(costs.size()); }
  int num_cells() const { return ranks * accumulate; }
  bool one_per_cell() const { return size() == num_cells(); }
  int cell_least() const { return equal_counts ? size() / num_cells() : 1; }
  int cell_most() const { return even() ? (size() + num_cells() - 1) / num_cells() : size(); }
  int rank_least() const { return accumulate * cell_least(); }
  int rank_most() const { return even() ? accumulate * cell_most() : size(); }
  bool even() const { return equal_counts || one_per_cell(); }
};

}  // namespace sb::balance
