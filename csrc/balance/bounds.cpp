#include "balance/bounds.h"

#include <algorithm>
#include <functional>

namespace sb::balance {

namespace {

Numbers Descending(Numbers values) {
  std::sort(values.begin(), values.end(), std::greater<>());
  return values;
}

Numbers PrefixSums(const Numbers& values) {
  Numbers sums = {0};
  for (const int64_t value : values) sums.push_back(sums.back() + value);
  return sums;
}

int64_t Mean(int64_t sum, int64_t ranks) { return sum / ranks + (sum % ranks != 0); }

// The largest, over j, of what one cell of each slot holds at least. The greatest counts of the
// j * ranks + 1 largest items in a cell of each slot add up to more than j: the fullest cells of
// some j + 1 slots hold j + 1. From each other slot take the cell of its largest item. The a slots
// where that is smallest hold a * ranks * cell_least items: it is no smaller than the item of that
// rank from the end. No item is counted twice; what is missing to accumulate * cell_least is no
// smaller than the smallest items.
int64_t SlotBound(const Problem& problem, const Numbers& sums) {
  const int ranks = problem.ranks, accumulate = problem.accumulate, least = problem.cell_least();
  const int size = problem.size();
  // Sums of the largest items of the 0, 1, ... other slots.
  Numbers lowest = {0};
  for (int a = 1; a < accumulate; ++a) {
    const int last = size - a * ranks * least;
    lowest.push_back(lowest.back() + sums[last + 1] - sums[last]);
  }
  int64_t bound = 0;
  for (int j = 0; j <= (size - 1) / ranks; ++j) {
    const int last = j * ranks + 1, rest = std::max(accumulate - j - 1, 0);
    const int others = std::max(accumulate * least - (j + 1) - rest, 0);
    bound = std::max(
        bound, sums[last] - sums[last - j - 1] + lowest[rest] + sums[size] - sums[size - others]);
  }
  return bound;
}

}  // namespace

int64_t PigeonholeBound(const int64_t* sums, int size, int bins, int least) {
  int64_t bound = 0;
  for (int j = 0; j <= (size - 1) / bins; ++j) {
    const int last = j * bins + 1, others = std::max(least - j - 1, 0);
    bound = std::max(bound, sums[last] - sums[last - j - 1] + sums[size] - sums[size - others]);
  }
  return bound;
}

int64_t DdpBound(const Problem& problem) {
  const Numbers sums = PrefixSums(Descending(problem.costs));
  return std::max(
      Mean(sums.back(), problem.ranks),
      PigeonholeBound(sums.data(), problem.size(), problem.ranks, problem.rank_least()));
}

int64_t FsdpBound(const Problem& problem) {
  const Numbers sums = PrefixSums(Descending(problem.costs));
  if (!problem.one_per_cell())
    return std::max(Mean(sums.back(), problem.ranks), SlotBound(problem, sums));
  int64_t bound = 0;
  for (int i = 0; i < problem.size(); i += problem.ranks) bound += sums[i + 1] - sums[i];
  return bound;
}

}  // namespace sb::balance
