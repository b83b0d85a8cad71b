#include "balance/search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "balance/bounds.h"

namespace sb::balance {

namespace {

// Products of a sum and a number of bins.
using Wide = __int128;

// A few items in ascending order.
struct Few {
  std::array<int32_t, kMostSearched> items;
  int size = 0;

  void Add(int32_t item) { items[size++] = item; }
  Items ToItems() const { return Items(items.begin(), items.begin() + size); }
};

class Ranks {
 public:
  Ranks(const Numbers& costs, int least, int most, int64_t value, int64_t bound, int64_t node_limit,
        const Allowed& allowed)
      : costs_(costs),
        least_(least),
        most_(most),
        best_(value),
        bound_(bound),
        node_limit_(node_limit),
        allowed_(allowed) {}

  // Fills the next of `bins` bins from the items `rest` of sum `total`.
  void NextBin(const Few& rest, int bins, int64_t total, int64_t largest) {
    if (bins == 1) {
      if (least_ <= rest.size && rest.size <= most_ && total < best_ && IsAllowed(rest)) {
        best_ = std::max(total, largest);
        done_.push_back(rest.ToItems());
        found_ = done_;
        done_.pop_back();
      }
      return;
    }
    // Which bin is first does not matter: it is that of the largest item.
    Level level{rest, {}, bins};
    for (int place = 0; place < rest.size; ++place)
      level.sums[place + 1] = level.sums[place] + costs_[rest.items[place]];
    if (PigeonholeBound(level.sums.data(), rest.size, bins, least_) >= best_) return;
    Extend(level, 1u, 1, 1, costs_[rest.items[0]], largest);
  }

  Found result() { return {std::move(found_), !stopped_ && !in_doubt_}; }

 private:
  struct Level {
    Few rest;
    std::array<int64_t, kMostSearched + 1> sums;
    int bins;

    int64_t whole() const { return sums[rest.size]; }
  };

  bool IsAllowed(const Few& part) {
    const Answer answer = allowed_ ? allowed_(part.ToItems()) : Answer::kYes;
    in_doubt_ = in_doubt_ || answer == Answer::kUnknown;
    return answer == Answer::kYes;
  }

  // What this bin must hold at least so that the others stay below the best.
  int64_t Low(const Level& level) const {
    const Wide low = level.whole() - static_cast<Wide>(level.bins - 1) * (best_ - 1);
    return low > 0 ? static_cast<int64_t>(low) : 0;
  }

  // Tries the bin with the chosen places of the rest, and with every extension from `start` on.
  void Extend(const Level& level, uint32_t chosen, int count, int start, int64_t total,
              int64_t largest) {
    if (total >= best_) return;
    const int size = level.rest.size, others = size - count, other_bins = level.bins - 1;
    if (least_ <= count && other_bins * least_ <= others && others <= other_bins * most_ &&
        total >= Low(level))
      Close(level, chosen, total, largest);
    if (count == most_) return;
    for (int place = start; place < size; ++place) {
      if (stopped_ || best_ <= bound_ || std::max(largest, total) >= best_) return;
      ++nodes_;
      if (node_limit_ >= 0 && nodes_ > node_limit_) {
        stopped_ = true;
        return;
      }
      const int available = size - place;
      if (count + available < least_) return;
      const int take = std::min(most_ - count, available);
      if (total + level.sums[place + take] - level.sums[place] < Low(level)) return;
      const int64_t cost = costs_[level.rest.items[place]];
      if (place > start && !allowed_ && cost == costs_[level.rest.items[place - 1]]) continue;
      const int need = std::max(least_ - count - 1, 0);
      if (total + cost + level.whole() - level.sums[size - need] >= best_) continue;
      Extend(level, chosen | 1u << place, count + 1, place + 1, total + cost, largest);
    }
  }

  void Close(const Level& level, uint32_t chosen, int64_t total, int64_t largest) {
    Few part, left;
    for (int place = 0; place < level.rest.size; ++place)
      (chosen >> place & 1u ? part : left).Add(level.rest.items[place]);
    if (!IsAllowed(part)) return;
    done_.push_back(part.ToItems());
    NextBin(left, level.bins - 1, level.whole() - total, std::max(largest, total));
    done_.pop_back();
  }

  const Numbers& costs_;
  const int least_, most_;
  int64_t best_;
  const int64_t bound_, node_limit_;
  const Allowed& allowed_;
  int64_t nodes_ = 0;
  bool stopped_ = false, in_doubt_ = false;
  Parts done_;
  std::optional<Parts> found_;
};

class Slots {
 public:
  Slots(const Problem& problem, int64_t value, int64_t bound, int64_t node_limit)
      : problem_(problem),
        best_(value),
        bound_(bound),
        node_limit_(node_limit),
        cell_of_(problem.size()),
        counts_(problem.num_cells()),
        loads_(problem.num_cells()),
        tokens_(problem.num_cells()),
        maxima_(problem.accumulate),
        missing_(problem.num_cells() * problem.cell_least()) {
    for (const int64_t cost : problem.costs) left_ += cost;
  }

  // Places this item and all after it.
  void Place(int32_t item) {
    const int size = problem_.size();
    if (item == size) {
      best_ = value_;
      found_.emplace(problem_.num_cells());
      for (int32_t i = 0; i < size; ++i) (*found_)[cell_of_[i]].push_back(i);
      return;
    }
    const int64_t cost = problem_.costs[item], length = problem_.tokens[item];
    const bool only_poor = size - item == missing_;
    for (int cell = 0; cell < problem_.num_cells(); ++cell) {
      const int slot = cell / problem_.ranks, count = counts_[cell];
      const bool poor = count < problem_.cell_least();
      if (count >= problem_.cell_most() || (only_poor && !poor)) continue;
      if (problem_.max_tokens != kNoCap && length > problem_.max_tokens - tokens_[cell]) continue;
      if (Seen(cell, slot)) continue;
      ++nodes_;
      if (node_limit_ >= 0 && nodes_ > node_limit_) {
        stopped_ = true;
        return;
      }
      const int64_t before = maxima_[slot];
      cell_of_[item] = cell;
      ++counts_[cell];
      loads_[cell] += cost;
      tokens_[cell] += length;
      maxima_[slot] = std::max(before, loads_[cell]);
      value_ += maxima_[slot] - before;
      missing_ -= poor;
      left_ -= cost;
      placed_ += cost;
      if (!Hopeless()) Place(item + 1);
      placed_ -= cost;
      left_ += cost;
      missing_ += poor;
      value_ -= maxima_[slot] - before;
      maxima_[slot] = before;
      tokens_[cell] -= length;
      loads_[cell] -= cost;
      --counts_[cell];
      if (stopped_ || best_ <= bound_) return;
    }
  }

  Found result() { return {std::move(found_), !stopped_}; }

 private:
  // Whether what is placed, and what finds no room below the maxima, reaches the best.
  bool Hopeless() const {
    const Wide excess = left_ - (static_cast<Wide>(problem_.ranks) * value_ - placed_);
    const Wide more = excess > 0 ? (excess + problem_.ranks - 1) / problem_.ranks : 0;
    return value_ + more >= best_;
  }

  // Whether a cell before this one in the slot, or an empty slot before, is just like it.
  bool Seen(int cell, int slot) const {
    const int start = slot * problem_.ranks;
    for (int other = start; other < cell; ++other)
      if (loads_[other] == loads_[cell] && tokens_[other] == tokens_[cell] &&
          counts_[other] == counts_[cell])
        return true;
    return slot > 0 &&
           std::all_of(counts_.begin() + start - problem_.ranks,
                       counts_.begin() + start + problem_.ranks, [](int32_t n) { return n == 0; });
  }

  const Problem& problem_;
  int64_t best_;
  const int64_t bound_, node_limit_;
  Items cell_of_, counts_;
  Numbers loads_, tokens_, maxima_;
  int missing_;
  int64_t value_ = 0, left_ = 0, placed_ = 0, nodes_ = 0;
  bool stopped_ = false;
  std::optional<Parts> found_;
};

}  // namespace

Found SearchRanks(const Numbers& costs, int bins, int least, int most, int64_t value, int64_t bound,
                  int64_t node_limit, const Allowed& allowed) {
  Ranks search(costs, least, most, value, bound, node_limit, allowed);
  Few all;
  int64_t total = 0;
  for (int32_t item = 0; item < static_cast<int32_t>(costs.size()); ++item) {
    all.Add(item);
    total += costs[item];
  }
  search.NextBin(all, bins, total, 0);
  return search.result();
}

Found SearchSlots(const Problem& problem, int64_t value, int64_t bound, int64_t node_limit) {
  Slots search(problem, value, bound, node_limit);
  search.Place(0);
  return search.result();
}

}  // namespace sb::balance
