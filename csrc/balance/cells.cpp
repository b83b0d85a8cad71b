#include "balance/cells.h"

#include <algorithm>

#include "balance/exchanges.h"
#include "balance/slots.h"

namespace sb::balance {

namespace {

// Exchanges that are tried, and cells sorted; not a time, so that all ranks stop alike.
constexpr int64_t kExchangeWork = 1 << 17;

struct Exchange {
  int source = -1, target = -1;
  int32_t given = -1, taken = -1;  // No item taken: a move.
};

// The cells and what they can give and take.
class Room {
 public:
  Room(const Problem& problem, Parts& cells) : problem_(problem), cells_(cells) {
    for (const Items& cell : cells) {
      tokens_.push_back(0);
      for (const int32_t item : cell) tokens_.back() += problem.tokens[item];
    }
  }

  bool Allows(const Exchange& e) const {
    if (e.taken < 0)
      return static_cast<int>(cells_[e.source].size()) > problem_.cell_least() &&
             static_cast<int>(cells_[e.target].size()) < problem_.cell_most() &&
             Fits(e.target, problem_.tokens[e.given]);
    const int64_t extra = problem_.tokens[e.given] - problem_.tokens[e.taken];
    return Fits(e.target, extra) && Fits(e.source, -extra);
  }

  int64_t Delta(const Exchange& e) const {
    return problem_.costs[e.given] - (e.taken < 0 ? 0 : problem_.costs[e.taken]);
  }

  void Make(const Exchange& e) {
    Shift(e.source, e.target, e.given);
    if (e.taken >= 0) Shift(e.target, e.source, e.taken);
  }

 private:
  bool Fits(int cell, int64_t extra) const {
    return problem_.max_tokens == kNoCap || extra <= problem_.max_tokens - tokens_[cell];
  }

  void Shift(int source, int target, int32_t item) {
    Items &from = cells_[source], &to = cells_[target];
    from.erase(std::lower_bound(from.begin(), from.end(), item));
    to.insert(std::lower_bound(to.begin(), to.end(), item), item);
    tokens_[source] -= problem_.tokens[item];
    tokens_[target] += problem_.tokens[item];
  }

  const Problem& problem_;
  Parts& cells_;
  Numbers tokens_;
};

// Calls `visit` with each exchange of an item of `source` for nothing, then for each of `target`,
// until it returns true (a hit) or the work is used up.
template <typename Visit>
bool EachExchange(const Parts& cells, int source, int target, int64_t& work, Visit&& visit) {
  for (const int32_t given : cells[source]) {
    work -= 1 + static_cast<int64_t>(cells[target].size());
    if (work < 0) return false;
    if (visit(Exchange{source, target, given, -1})) return true;
    for (const int32_t taken : cells[target])
      if (visit(Exchange{source, target, given, taken})) return true;
  }
  return false;
}

class Slots {
 public:
  Slots(const Problem& problem, Parts& cells)
      : problem_(problem),
        cells_(cells),
        room_(problem, cells),
        loads_(LoadsOf(problem, cells)),
        slot_of_(cells.size()) {
    Sort();
  }

  int64_t value() const { return value_; }
  bool has_work() const { return work_ >= 0; }

  // Makes one exchange that helps; returns whether there was one.
  bool Improve(int slot) {
    const int source = order_[slot * problem_.ranks];
    if (MostWithout(slot, source, source) == loads_[source]) return false;
    for (auto it = order_.rbegin(); it != order_.rend(); ++it) {
      if (*it == source) continue;
      Exchange found;
      const bool helps = EachExchange(cells_, source, *it, work_, [&](const Exchange& e) {
        const int64_t delta = room_.Delta(e);
        if (delta <= 0 || Change(e.source, e.target, delta) >= 0 || !room_.Allows(e)) return false;
        found = e;
        return true;
      });
      if (work_ < 0) return false;
      if (!helps) continue;
      const int64_t delta = room_.Delta(found);
      room_.Make(found);
      loads_[source] -= delta;
      loads_[found.target] += delta;
      SortAgain(source, found.target);
      work_ -= static_cast<int64_t>(order_.size());
      return true;
    }
    return false;
  }

 private:
  void Sort() {
    order_ = ByLoad(loads_);
    Number();
  }

  // The same where the loads of two cells changed.
  void SortAgain(int32_t first, int32_t second) {
    order_.erase(std::remove_if(order_.begin(), order_.end(),
                                [&](int32_t cell) { return cell == first || cell == second; }),
                 order_.end());
    for (const int32_t cell : {first, second}) {
      const auto place = std::partition_point(order_.begin(), order_.end(), [&](int32_t other) {
        return loads_[other] != loads_[cell] ? loads_[other] > loads_[cell] : other < cell;
      });
      order_.insert(place, cell);
    }
    Number();
  }

  void Number() {
    value_ = 0;
    for (int place = 0; place < static_cast<int>(order_.size()); ++place) {
      slot_of_[order_[place]] = place / problem_.ranks;
      if (place % problem_.ranks == 0) value_ += loads_[order_[place]];
    }
  }

  int64_t MostWithout(int slot, int first, int second) const {
    const int start = slot * problem_.ranks;
    for (int n = 0; n < std::min(problem_.ranks, 3); ++n) {
      const int cell = order_[start + n];
      if (cell != first && cell != second) return loads_[cell];
    }
    return 0;
  }

  // How the sum of the maxima changes if `source` gives `delta` to `target`.
  int64_t Change(int source, int target, int64_t delta) const {
    const int64_t lower = loads_[source] - delta, higher = loads_[target] + delta;
    const int here = slot_of_[source], there = slot_of_[target];
    const int64_t old_here = loads_[order_[here * problem_.ranks]];
    if (here == there)
      return std::max({MostWithout(here, source, target), lower, higher}) - old_here;
    return std::max(MostWithout(here, source, source), lower) - old_here +
           std::max(MostWithout(there, target, target), higher) -
           loads_[order_[there * problem_.ranks]];
  }

  const Problem& problem_;
  Parts& cells_;
  Room room_;
  Numbers loads_;
  Items order_, slot_of_;
  int64_t value_ = 0, work_ = kExchangeWork;
};

}  // namespace

Numbers LoadsOf(const Problem& problem, const Parts& cells) {
  Numbers loads;
  for (const Items& cell : cells) {
    loads.push_back(0);
    for (const int32_t item : cell) loads.back() += problem.costs[item];
  }
  return loads;
}

int64_t ImproveRanks(const Problem& problem, Parts& cells, const Parts& rows, int64_t bound) {
  Room room(problem, cells);
  const Numbers loads = LoadsOf(problem, cells);
  Numbers sums;
  for (const Items& row : rows) {
    sums.push_back(0);
    for (const int32_t cell : row) sums.back() += loads[cell];
  }
  int64_t work = kExchangeWork;
  while (true) {
    const int full = Fullest(sums);
    if (sums[full] <= bound) return sums[full];
    Exchange chosen;
    Emptiest others(sums);
    int other = others.Next();
    for (; other >= 0; other = others.Next()) {
      const int64_t difference = sums[full] - sums[other];
      if (difference <= 1) return sums[full];
      int64_t best = difference;
      for (const int32_t source : rows[full])
        for (const int32_t target : rows[other]) {
          EachExchange(cells, source, target, work, [&](const Exchange& e) {
            const int64_t apart = Apart(room.Delta(e), difference);
            if (apart < best && room.Allows(e)) {
              best = apart;
              chosen = e;
            }
            return false;
          });
          if (work < 0) return sums[full];
        }
      if (chosen.source >= 0) break;
    }
    if (other < 0) return sums[full];
    const int64_t delta = room.Delta(chosen);
    room.Make(chosen);
    sums[full] -= delta;
    sums[other] += delta;
  }
}

int64_t ImproveSlots(const Problem& problem, Parts& cells, int64_t bound) {
  Slots slots(problem, cells);
  int slot = 0, quiet = 0;
  while (quiet < problem.accumulate && slots.has_work() && slots.value() > bound) {
    quiet = slots.Improve(slot) ? 0 : quiet + 1;
    slot = (slot + 1) % problem.accumulate;
  }
  return slots.value();
}

}  // namespace sb::balance
