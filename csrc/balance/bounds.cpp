#include "balance/bounds.h"

#include <algorithm>
#include <functional>

namespace sb::balance {

namespace {

Numbers Descending(Numbers values) {
  std::sort(values.begin(), values.end(), std::greater<>());
  return values;
}

int64_t Mean(int64_t sum, int64_t ranks) { return sum / ranks + (sum % ranks != 0); }

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
  Numbers sums = {0};
  for (const int64_t cost : Descending(problem.costs)) sums.push_back(sums.back() + cost);
  return std::max(
      Mean(sums.back(), problem.ranks),
      PigeonholeBound(sums.data(), problem.size(), problem.ranks, problem.rank_least()));
}

int64_t FsdpBound(const Problem& problem) {
  const Numbers costs = Descending(problem.costs);
  const int size = problem.size(), ranks = problem.ranks;
  int64_t bound = 0;
  if (problem.one_per_cell()) {
    for (int i = 0; i < size; i += ranks) bound += costs[i];
    return bound;
  }
  int64_t sum = 0;
  for (const int64_t cost : costs) sum += cost;
  bound = costs[0];
  for (int slot = 1; slot < problem.accumulate; ++slot) bound += costs[size - slot * ranks];
  return std::max(bound, Mean(sum, ranks));
}

}  // namespace sb::balance
