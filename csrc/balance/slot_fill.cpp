#include "balance/slot_fill.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "balance/greedy.h"

namespace sb::balance {

namespace {

// The cells of one slot.
class Slot {
 public:
  // Each cell is of `budget` at most.
  Slot(const Problem& problem, int64_t budget)
      : problem_(problem),
        cells_(problem.ranks),
        tokens_(problem.ranks),
        rooms_(problem.ranks, budget),
        by_room_(problem.ranks),
        empty_(problem.ranks) {
    std::iota(by_room_.begin(), by_room_.end(), 0);
  }

  // Takes items out of `rest`; `missing` are the empty cells of all slots. Returns whether no cell
  // of this slot stays empty.
  bool Fill(Items& rest, int missing) {
    auto kept = rest.begin();
    auto next = rest.begin();
    auto unplaced = static_cast<int>(rest.size());
    while (empty_ > 0 || unplaced > missing) {
      // Items above the largest room fit nowhere.
      const auto fits = std::partition_point(
          next, rest.end(), [&](int32_t item) { return problem_.costs[item] > rooms_.back(); });
      kept = kept == next ? fits : std::copy(next, fits, kept);
      next = fits;
      if (next == rest.end()) break;
      const int32_t item = *next++;
      const int before = empty_;
      if (!Place(item, unplaced > missing)) {
        *kept++ = item;
        continue;
      }
      missing -= before - empty_;
      --unplaced;
    }
    rest.erase(kept == next ? rest.end() : std::copy(next, rest.end(), kept), rest.end());
    return empty_ == 0;
  }

  Parts& cells() { return cells_; }

 private:
  // Puts an item where the least room remains.
  bool Place(int32_t item, bool anywhere) {
    const int64_t cost = problem_.costs[item], length = problem_.tokens[item];
    auto spot = std::lower_bound(rooms_.begin(), rooms_.end(), cost) - rooms_.begin();
    for (; spot < problem_.ranks; ++spot) {
      const int32_t cell = by_room_[spot];
      const bool fits =
          problem_.max_tokens == kNoCap || length <= problem_.max_tokens - tokens_[cell];
      if (fits && (anywhere || cells_[cell].empty())) break;
    }
    if (spot == problem_.ranks) return false;
    const int32_t cell = by_room_[spot];
    empty_ -= cells_[cell].empty();
    cells_[cell].push_back(item);
    tokens_[cell] += length;
    const int64_t room = rooms_[spot] - cost;
    const auto to = std::lower_bound(rooms_.begin(), rooms_.begin() + spot, room) - rooms_.begin();
    std::rotate(rooms_.begin() + to, rooms_.begin() + spot, rooms_.begin() + spot + 1);
    std::rotate(by_room_.begin() + to, by_room_.begin() + spot, by_room_.begin() + spot + 1);
    rooms_[to] = room;
    return true;
  }

  const Problem& problem_;
  Parts cells_;
  Numbers tokens_;
  // The cells by ascending room.
  Numbers rooms_;
  Items by_room_;
  int empty_;
};

// Deals items, largest first.
Parts Spread(const Problem& problem, const Items& items, int bins, int least, int most) {
  Numbers costs;
  for (const int32_t item : items) costs.push_back(problem.costs[item]);
  Parts parts = LargestFirst(costs, bins, least, std::min(most, static_cast<int>(items.size())));
  for (Items& part : parts)
    for (int32_t& item : part) item = items[item];
  return parts;
}

Parts OneFull(const Problem& problem, const Items& items, int bins) {
  const auto rest = items.end() - (bins - problem.ranks);
  Parts cells = Spread(problem, Items(items.begin(), rest), problem.ranks, 1, problem.size());
  for (auto it = rest; it != items.end(); ++it) cells.push_back({*it});
  return cells;
}

bool AllWithin(const Problem& problem, const Parts& cells, int64_t budget) {
  return std::all_of(cells.begin(), cells.end(), [&](const Items& cell) {
    int64_t load = 0, tokens = 0;
    for (const int32_t item : cell) {
      load += problem.costs[item];
      tokens += problem.tokens[item];
    }
    return load <= budget && (problem.max_tokens == kNoCap || tokens <= problem.max_tokens);
  });
}

void Append(Parts& cells, Parts more) {
  std::move(more.begin(), more.end(), std::back_inserter(cells));
}

Items AllItems(const Problem& problem) {
  Items items(problem.size());
  std::iota(items.begin(), items.end(), 0);
  return items;
}

}  // namespace

std::optional<Parts> FillSlots(const Problem& problem) {
  Parts cells;
  Items rest = AllItems(problem);
  int64_t left = std::accumulate(problem.costs.begin(), problem.costs.end(), int64_t{0});
  int bins = problem.num_cells();
  for (; !problem.equal_counts && bins > problem.ranks; bins -= problem.ranks) {
    const int64_t giant = problem.costs[rest[0]];
    if (giant <= left / bins + (left % bins != 0)) break;
    Parts all = OneFull(problem, rest, bins);
    if (AllWithin(problem, all, giant)) {
      Append(cells, std::move(all));
      return cells;
    }
    Slot slot(problem, giant);
    if (!slot.Fill(rest, bins)) return std::nullopt;
    for (const Items& cell : slot.cells())
      for (const int32_t item : cell) left -= problem.costs[item];
    Append(cells, std::move(slot.cells()));
  }
  Append(cells, Spread(problem, rest, bins, problem.cell_least(), problem.cell_most()));
  return cells;
}

Parts OneFullSlot(const Problem& problem) {
  return OneFull(problem, AllItems(problem), problem.num_cells());
}

}  // namespace sb::balance
