#include "balance/plan.h"

#include <algorithm>
#include <utility>

#include "balance/bounds.h"
#include "balance/cells.h"
#include "balance/greedy.h"
#include "balance/karmarkar_karp.h"
#include "balance/packing.h"
#include "balance/search.h"
#include "balance/slots.h"
#include "balance/swaps.h"

namespace sb::balance {

namespace {

constexpr int kSearchedItems = 16;
// Items times cells; beyond, two of three starts have to do.
constexpr int64_t kAllStartsWork = 1 << 18;

using Rows = std::vector<Parts>;

bool IsSearched(const Problem& problem, int64_t node_limit) {
  return problem.size() <= (node_limit == kUnlimited ? kMostSearched : kSearchedItems);
}

// The items that places in an order stand for.
Items At(const Items& order, const Items& places) {
  Items items;
  for (const int32_t place : places) items.push_back(order[place]);
  return items;
}

Numbers At(const Numbers& values, const Items& items) {
  Numbers chosen;
  for (const int32_t item : items) chosen.push_back(values[item]);
  return chosen;
}

struct Partition {
  Parts parts;
  int64_t value = -1;  // The largest sum.
};

// The best of three starts, each improved.
Partition BestPartition(const Numbers& costs, int bins, int least, int most, int64_t bound) {
  Partition best;
  const int starts = most == static_cast<int>(costs.size()) ? 3 : 2;
  for (int start = 0; start < starts; ++start) {
    Parts parts;
    if (start == 0) {
      parts = LargestFirst(costs, bins, least, most);
    } else if (start == 1) {
      parts = Differencing(costs, bins, bins);
    } else {
      parts = Differencing(costs, bins, 1);
      MeetLeast(costs, parts, least);
    }
    const int64_t value = Improve(costs, parts, least, most, bound);
    if (best.value < 0 || value < best.value) best = {std::move(parts), value};
    if (best.value <= bound) break;
  }
  return best;
}

Packing PackRank(const Problem& problem, Items items) {
  if (problem.one_per_cell()) {
    Parts cells;
    for (const int32_t item : items) cells.push_back({item});
    return {std::move(cells), true};
  }
  std::sort(items.begin(), items.end());
  return Pack(problem.tokens, items, problem.accumulate, problem.cell_least(), problem.cell_most(),
              problem.max_tokens);
}

// The cells of each rank; none if a rank's items do not fit under the cap.
std::optional<Rows> PackRanks(const Problem& problem, const Items& order, const Parts& parts) {
  Rows rows;
  for (const Items& part : parts) {
    Packing packing = PackRank(problem, At(order, part));
    if (!packing.cells) return std::nullopt;
    rows.push_back(std::move(*packing.cells));
  }
  return rows;
}

Packing PackAll(const Problem& problem) {
  Items all;
  for (int32_t item = 0; item < problem.size(); ++item) all.push_back(item);
  return Pack(problem.tokens, all, problem.num_cells(), problem.cell_least(), problem.cell_most(),
              problem.max_tokens);
}

// Deals whole cells to ranks, then exchanges items between them; returns the largest sum.
int64_t DealCells(const Problem& problem, Parts cells, int64_t bound, Rows& rows) {
  const Numbers loads = LoadsOf(problem, cells);
  const Items order = ByLoad(loads);
  const int accumulate = problem.accumulate;
  Parts members =
      BestPartition(At(loads, order), problem.ranks, accumulate, accumulate, bound).parts;
  for (Items& row : members) row = At(order, row);
  const int64_t value = ImproveRanks(problem, cells, members, bound);
  rows.clear();
  for (const Items& row : members) {
    rows.emplace_back();
    for (const int32_t cell : row) rows.back().push_back(cells[cell]);
  }
  return value;
}

// Orders the cells of each rank by descending cost; with one item per cell evens the slots too.
void OrderRows(const Problem& problem, Rows& rows) {
  if (!problem.one_per_cell()) {
    for (Parts& row : rows) {
      Parts sorted;
      for (const int32_t cell : ByLoad(LoadsOf(problem, row)))
        sorted.push_back(std::move(row[cell]));
      row = std::move(sorted);
    }
    return;
  }
  Parts numbers;
  for (const Parts& row : rows) {
    numbers.emplace_back();
    for (const Items& cell : row) numbers.back().push_back(cell[0]);
  }
  LineUp(problem.costs, numbers);
  Polish(problem.costs, numbers);
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t a = 0; a < rows[r].size(); ++a) rows[r][a] = {numbers[r][a]};
}

// Deals cells to slots by descending cost, and to ranks so that their sums come close.
Rows SlotsToRows(const Problem& problem, const Parts& cells) {
  const Numbers loads = LoadsOf(problem, cells);
  const Items order = ByLoad(loads);
  Parts slots;
  for (auto it = order.begin(); it != order.end(); it += problem.ranks)
    slots.emplace_back(it, it + problem.ranks);
  EvenRanks(loads, slots);
  Rows rows(problem.ranks);
  for (int rank = 0; rank < problem.ranks; ++rank)
    for (const Items& slot : slots) rows[rank].push_back(cells[slot[rank]]);
  return rows;
}

bool UnderCap(const Problem& problem, const Parts& cells) {
  if (problem.max_tokens == kNoCap) return true;
  return std::all_of(cells.begin(), cells.end(), [&](const Items& cell) {
    int64_t tokens = 0;
    for (const int32_t item : cell) tokens += problem.tokens[item];
    return tokens <= problem.max_tokens;
  });
}

// Exchanges items within each slot, where the cells then stay under the cap.
void LevelSlots(const Problem& problem, Parts& cells) {
  const Items order = ByLoad(LoadsOf(problem, cells));
  for (int slot = 0; slot < problem.accumulate; ++slot) {
    const int32_t* chosen = order.data() + static_cast<ptrdiff_t>(slot) * problem.ranks;
    Items members;
    for (int r = 0; r < problem.ranks; ++r)
      members.insert(members.end(), cells[chosen[r]].begin(), cells[chosen[r]].end());
    std::sort(members.begin(), members.end());
    const Items by_cost = ByLoad(At(problem.costs, members));
    const Items items = At(members, by_cost);
    const Numbers costs = At(problem.costs, items);
    // The place in `items` of each member.
    Items place(items.size());
    for (int32_t n = 0; n < static_cast<int32_t>(items.size()); ++n) place[by_cost[n]] = n;
    Parts parts;
    int64_t sum = 0;
    for (const int64_t cost : costs) sum += cost;
    for (int r = 0; r < problem.ranks; ++r) {
      parts.emplace_back();
      for (const int32_t item : cells[chosen[r]])
        parts.back().push_back(
            place[std::lower_bound(members.begin(), members.end(), item) - members.begin()]);
      std::sort(parts.back().begin(), parts.back().end());
    }
    Improve(costs, parts, problem.cell_least(), problem.cell_most(),
            sum / problem.ranks + (sum % problem.ranks != 0));
    for (Items& part : parts) {
      part = At(items, part);
      std::sort(part.begin(), part.end());
    }
    if (!UnderCap(problem, parts)) continue;
    for (int r = 0; r < problem.ranks; ++r) cells[chosen[r]] = std::move(parts[r]);
  }
}

// The cells of one of three starts; none if they break the cap.
std::optional<Parts> CellsFrom(const Problem& problem, int start, const Items& order) {
  if (start == 0) return LeastIncrease(problem, order);
  Parts cells;
  if (start == 1) {
    cells = DealtInTurns(problem, order);
  } else {
    cells = LargestFirst(At(problem.costs, order), problem.num_cells(), problem.cell_least(),
                         problem.cell_most());
    for (Items& cell : cells) {
      cell = At(order, cell);
      std::sort(cell.begin(), cell.end());
    }
  }
  if (!UnderCap(problem, cells)) return std::nullopt;
  return cells;
}

}  // namespace

Plan PlanDdp(const Problem& problem, int64_t node_limit) {
  const Items order = ByLoad(problem.costs);
  const Numbers costs = At(problem.costs, order);
  const int64_t bound = DdpBound(problem);
  const int least = problem.rank_least(), most = problem.rank_most();
  const Partition best = BestPartition(costs, problem.ranks, least, most, bound);
  int64_t value = best.value;
  std::optional<Rows> rows = PackRanks(problem, order, best.parts);
  if (!rows) {
    Packing all = PackAll(problem);
    if (!all.cells) return {{}, all.certain};
    value = DealCells(problem, std::move(*all.cells), bound, rows.emplace());
  }
  bool finished = value <= bound;
  if (!finished && IsSearched(problem, node_limit)) {
    Allowed fits;
    if (problem.max_tokens != kNoCap && !problem.one_per_cell())
      fits = [&](const Items& part) {
        const Packing packing = PackRank(problem, At(order, part));
        if (packing.cells) return Answer::kYes;
        return packing.certain ? Answer::kNo : Answer::kUnknown;
      };
    const Found found =
        SearchRanks(costs, problem.ranks, least, most, value, bound, node_limit, fits);
    finished = found.finished;
    if (found.parts) rows = PackRanks(problem, order, *found.parts);
  }
  OrderRows(problem, *rows);
  return {std::move(*rows), finished};
}

Plan PlanFsdp(const Problem& problem, int64_t node_limit) {
  const Items order = ByLoad(problem.costs);
  if (problem.one_per_cell()) {
    Parts cells;
    for (const int32_t item : order) cells.push_back({item});
    return {SlotsToRows(problem, cells), true};
  }
  const int64_t bound = FsdpBound(problem);
  std::optional<Parts> best;
  int64_t best_value = -1;
  const auto consider = [&](Parts cells) {
    LevelSlots(problem, cells);
    const int64_t value = ImproveSlots(problem, cells, bound);
    if (best && value >= best_value) return;
    best = std::move(cells);
    best_value = value;
  };
  // The start that looks at every cell for every item is for few of them, or where caps ask for it.
  const bool is_large = static_cast<int64_t>(problem.size()) * problem.num_cells() > kAllStartsWork;
  for (const int start : {1, 2, 0}) {
    if (best && (best_value <= bound || (start == 0 && is_large))) break;
    if (std::optional<Parts> cells = CellsFrom(problem, start, order)) consider(std::move(*cells));
  }
  if (!best) {
    Packing all = PackAll(problem);
    if (!all.cells) return {{}, all.certain};
    consider(std::move(*all.cells));
  }
  bool finished = best_value <= bound;
  if (!finished && IsSearched(problem, node_limit)) {
    Found found = SearchSlots(problem, order, best_value, bound, node_limit);
    finished = found.finished;
    if (found.parts) best = std::move(found.parts);
  }
  return {SlotsToRows(problem, *best), finished};
}

}  // namespace sb::balance
