#include "balance/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balance/bounds.h"
#include "balance/cells.h"
#include "balance/greedy.h"
#include "balance/karmarkar_karp.h"
#include "balance/packing.h"
#include "balance/search.h"
#include "balance/slot_fill.h"
#include "balance/slots.h"
#include "balance/swaps.h"

namespace sb::balance {

namespace {

constexpr int kSearchedItems = 16;
// Items times cells; beyond, fewer starts have to do.
constexpr int64_t kAllStartsWork = 1 << 18;
// Shares of the bound. A large window is planned well enough with less than the first left to gain.
// With less than the second, most of the window in one micro-batch is not worth the memory.
constexpr int64_t kWellEnough = 1024, kNotWorthOneSlot = 128;

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

// Exchanges items within each slot, where the cells then stay under the cap. Costs descend.
void LevelSlots(const Problem& problem, Parts& cells) {
  const Items order = ByLoad(LoadsOf(problem, cells));
  for (int slot = 0; slot < problem.accumulate; ++slot) {
    const int32_t* chosen = order.data() + static_cast<ptrdiff_t>(slot) * problem.ranks;
    Parts parts;
    int64_t sum = 0;
    for (int r = 0; r < problem.ranks; ++r) {
      parts.push_back(cells[chosen[r]]);
      for (const int32_t item : parts.back()) sum += problem.costs[item];
    }
    Improve(problem.costs, parts, problem.cell_least(), problem.cell_most(),
            sum / problem.ranks + (sum % problem.ranks != 0));
    if (!UnderCap(problem, parts)) continue;
    for (int r = 0; r < problem.ranks; ++r) cells[chosen[r]] = std::move(parts[r]);
  }
}

// How the cells can be found at first, in the order of trying.
enum class Start { kFillSlots, kInTurns, kLeastIncrease, kOneFullSlot, kPack };

// The cells of one start, items ascending; none if they break the cap.
std::optional<Parts> CellsFrom(const Problem& problem, Start start, bool& certain) {
  if (start == Start::kPack) {
    Packing all = PackAll(problem);
    certain = all.certain;
    return std::move(all.cells);
  }
  if (start == Start::kLeastIncrease) return LeastIncrease(problem);
  if (start == Start::kOneFullSlot && problem.equal_counts) return std::nullopt;
  std::optional<Parts> cells = start == Start::kFillSlots ? FillSlots(problem)
                               : start == Start::kInTurns ? DealtInTurns(problem)
                                                          : OneFullSlot(problem);
  if (!cells || !UnderCap(problem, *cells)) return std::nullopt;
  return cells;
}

struct Cells {
  std::optional<Parts> parts;
  bool finished;  // As in a plan.
};

// The cells of a problem whose costs descend.
Cells FsdpCells(const Problem& problem, int64_t node_limit) {
  const int size = problem.size();
  if (problem.one_per_cell()) {
    Parts cells;
    for (int32_t item = 0; item < size; ++item) cells.push_back({item});
    return {std::move(cells), true};
  }
  const int64_t bound = FsdpBound(problem);
  const bool is_large = static_cast<int64_t>(size) * problem.num_cells() > kAllStartsWork;
  std::optional<Parts> best;
  int64_t best_value = -1;
  bool certain = false;
  for (const Start start : {Start::kFillSlots, Start::kInTurns, Start::kLeastIncrease,
                            Start::kOneFullSlot, Start::kPack}) {
    const int64_t left = best_value - bound;
    if (best && (left <= (is_large ? bound / kWellEnough : 0) || start == Start::kPack ||
                 (start == Start::kLeastIncrease && is_large) ||
                 (start == Start::kOneFullSlot && left <= bound / kNotWorthOneSlot)))
      continue;
    std::optional<Parts> cells = CellsFrom(problem, start, certain);
    if (!cells) continue;
    LevelSlots(problem, *cells);
    const int64_t value = ImproveSlots(problem, *cells, bound);
    if (best && value >= best_value) continue;
    best = std::move(cells);
    best_value = value;
  }
  if (!best) return {std::nullopt, certain};
  bool finished = best_value <= bound;
  if (!finished && IsSearched(problem, node_limit)) {
    // Its steps are dearer than those of the other search, and win less.
    const int64_t limit = node_limit == kUnlimited ? node_limit : node_limit / 4;
    Found found = SearchSlots(problem, best_value, bound, limit);
    finished = found.finished;
    if (found.parts) best = std::move(found.parts);
  }
  return {std::move(best), finished};
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
  // The largest first, so that the order of the items decides nothing but which of equal ones goes
  // where.
  Items order(problem.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    if (problem.costs[a] != problem.costs[b]) return problem.costs[a] > problem.costs[b];
    return problem.tokens[a] != problem.tokens[b] ? problem.tokens[a] > problem.tokens[b] : a < b;
  });
  const Problem ordered{At(problem.costs, order), At(problem.tokens, order), problem.ranks,
                        problem.accumulate,       problem.max_tokens,        problem.equal_counts};
  Cells cells = FsdpCells(ordered, node_limit);
  if (!cells.parts) return {{}, cells.finished};
  for (Items& cell : *cells.parts) {
    cell = At(order, cell);
    std::sort(cell.begin(), cell.end());
  }
  return {SlotsToRows(problem, *cells.parts), cells.finished};
}

}  // namespace sb::balance
