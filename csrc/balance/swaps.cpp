#include "balance/swaps.h"

#include <algorithm>

#include "balance/exchanges.h"

namespace sb::balance {

namespace {

struct Exchange {
  int32_t given = -1, taken = -1;
};

// The exchange that leaves the two bins most alike; nothing given: none helps.
Exchange Best(const Numbers& costs, const Items& full, const Items& other, int64_t difference,
              bool may_move) {
  int64_t best = difference;
  Exchange exchange;
  const auto consider = [&](int64_t delta, int32_t given, int32_t taken) {
    if (delta <= 0 || delta >= difference || Apart(delta, difference) >= best) return;
    best = Apart(delta, difference);
    exchange = {given, taken};
  };
  for (const int32_t item : full) {
    const int64_t cost = costs[item];
    if (may_move) consider(cost, item, -1);
    // Items are in descending order of cost: the first partner whose swap moves at least half.
    const auto partner = std::partition_point(other.begin(), other.end(), [&](int32_t taken) {
      const int64_t delta = cost - costs[taken];
      return delta < difference - delta;
    });
    if (partner != other.end()) consider(cost - costs[*partner], item, *partner);
    if (partner != other.begin()) consider(cost - costs[partner[-1]], item, partner[-1]);
  }
  return exchange;
}

void Erase(Items& items, int32_t item) {
  items.erase(std::lower_bound(items.begin(), items.end(), item));
}

void Insert(Items& items, int32_t item) {
  items.insert(std::lower_bound(items.begin(), items.end(), item), item);
}

}  // namespace

int64_t Improve(const Numbers& costs, Parts& parts, int least, int most, int64_t bound) {
  Numbers sums;
  // A limit in work, not in time: all ranks must stop at the same point.
  int64_t work = 1024;
  for (const Items& part : parts) {
    sums.push_back(0);
    for (const int32_t item : part) sums.back() += costs[item];
    work += 32 * static_cast<int64_t>(part.size());
  }
  while (work > 0) {
    const int full = Fullest(sums);
    if (sums[full] <= bound) break;
    Exchange exchange;
    Emptiest others(sums);
    const int first = others.Next();
    int other = first;
    for (; other >= 0; other = others.Next()) {
      const int64_t difference = sums[full] - sums[other];
      if (difference <= 1 || work <= 0) return sums[full];
      work -= static_cast<int64_t>(parts[full].size());
      const bool may_move = static_cast<int>(parts[full].size()) > least &&
                            static_cast<int>(parts[other].size()) < most;
      exchange = Best(costs, parts[full], parts[other], difference, may_move);
      if (exchange.given >= 0) break;
      // The others have to be sorted.
      if (other == first) work -= static_cast<int64_t>(sums.size());
    }
    if (other < 0) return sums[full];
    int64_t delta = costs[exchange.given];
    Erase(parts[full], exchange.given);
    if (exchange.taken >= 0) {
      Erase(parts[other], exchange.taken);
      Insert(parts[full], exchange.taken);
      delta -= costs[exchange.taken];
    }
    Insert(parts[other], exchange.given);
    sums[full] -= delta;
    sums[other] += delta;
  }
  return sums[Fullest(sums)];
}

}  // namespace sb::balance
