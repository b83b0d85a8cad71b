#include "balance/greedy.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

namespace sb::balance {

Parts LargestFirst(const Numbers& costs, int bins, int least, int most) {
  using Entry = std::tuple<int64_t, int, int>;  // sum, count, bin
  Parts parts(bins);
  std::vector<Entry> heap;
  for (int b = 0; b < bins; ++b) heap.emplace_back(0, 0, b);
  int missing = bins * least, limit = most;
  const int size = static_cast<int>(costs.size());
  for (int item = 0; item < size; ++item) {
    if (size - item == missing && limit > least) {
      // The rest is just enough for the bins that lack items.
      limit = least;
      heap.erase(std::remove_if(heap.begin(), heap.end(),
                                [&](const Entry& e) { return std::get<1>(e) >= least; }),
                 heap.end());
      std::make_heap(heap.begin(), heap.end(), std::greater<>());
    }
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto [sum, count, b] = heap.back();
    heap.pop_back();
    parts[b].push_back(item);
    missing -= count < least;
    if (count + 1 < limit) {
      heap.emplace_back(sum + costs[item], count + 1, b);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }
  return parts;
}

std::optional<Parts> LeastIncrease(const Problem& problem) {
  const int num_cells = problem.num_cells(), size = problem.size(), ranks = problem.ranks;
  const int least = problem.cell_least(), most = problem.cell_most();
  Parts cells(num_cells);
  Numbers loads(num_cells), tokens(num_cells), maxima(problem.accumulate),
      lowest(problem.accumulate);
  Items counts(num_cells);
  int missing = num_cells * least;
  for (int32_t item = 0; item < size; ++item) {
    const int64_t cost = problem.costs[item], length = problem.tokens[item];
    const bool only_poor = size - item == missing;
    int best = -1;
    std::pair<int64_t, int64_t> best_key;
    const auto consider = [&](int cell) {
      if (counts[cell] >= most || (only_poor && counts[cell] >= least)) return;
      if (problem.max_tokens != kNoCap && length > problem.max_tokens - tokens[cell]) return;
      const int64_t increase = std::max<int64_t>(0, loads[cell] + cost - maxima[cell / ranks]);
      const std::pair<int64_t, int64_t> key(increase, -loads[cell]);
      if (best >= 0 && key >= best_key) return;
      best = cell;
      best_key = key;
    };
    if (item < num_cells) {
      // One item each, largest first: that is the best start.
      consider(item);
    } else {
      for (int slot = 0; slot < problem.accumulate; ++slot) {
        // No cell of the slot grows it by less than the emptiest.
        if (best >= 0 && lowest[slot] + cost - maxima[slot] > best_key.first) continue;
        for (int cell = slot * ranks; cell < (slot + 1) * ranks; ++cell) consider(cell);
      }
    }
    if (best < 0) return std::nullopt;
    missing -= counts[best] < least;
    cells[best].push_back(item);
    ++counts[best];
    loads[best] += cost;
    tokens[best] += length;
    const int slot = best / ranks;
    maxima[slot] = std::max(maxima[slot], loads[best]);
    const auto first = loads.begin() + static_cast<ptrdiff_t>(slot) * ranks;
    lowest[slot] = *std::min_element(first, first + ranks);
  }
  return cells;
}

Parts DealtInTurns(const Problem& problem) {
  const int ranks = problem.ranks, accumulate = problem.accumulate, size = problem.size();
  Parts cells;
  for (int rank = 0; rank < ranks; ++rank) {
    Items mine;
    for (int turn = 0; turn < (size + ranks - 1) / ranks; ++turn) {
      const int item = turn * ranks + (turn % 2 == 1 ? ranks - 1 - rank : rank);
      if (item < size) mine.push_back(item);
    }
    const int share = static_cast<int>(mine.size()) / accumulate;
    const int extra = static_cast<int>(mine.size()) % accumulate;
    auto start = mine.begin();
    for (int cell = 0; cell < accumulate; ++cell) {
      const auto stop = start + share + (cell < extra);
      cells.emplace_back(start, stop);
      start = stop;
    }
  }
  return cells;
}

}  // namespace sb::balance
