#include "balance/karmarkar_karp.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace sb::balance {

namespace {

// A bin: its sum, and its items as a chain.
struct Entry {
  int64_t sum;
  int32_t head, tail;
};
// Bins by descending sum, without the empty ones.
using Entries = std::vector<Entry>;

class Merger {
 public:
  Merger(int size, int bins) : next_(size, -1), bins_(bins) {}

  int64_t Spread(const Entries& entries) const {
    const bool full = static_cast<int>(entries.size()) == bins_;
    return entries.front().sum - (full ? entries.back().sum : 0);
  }

  Entries Merge(const Entries& first, const Entries& second) {
    const int n1 = static_cast<int>(first.size()), n2 = static_cast<int>(second.size());
    Entries merged;
    merged.reserve(std::min(n1 + n2, bins_));
    for (int i = 0; i < n1; ++i) {
      const int other = bins_ - 1 - i;
      merged.push_back(other < n2 ? Join(first[i], second[other]) : first[i]);
    }
    for (int i = std::max(n1, bins_ - n2); i < bins_; ++i) merged.push_back(second[bins_ - 1 - i]);
    std::stable_sort(merged.begin(), merged.end(),
                     [](const Entry& a, const Entry& b) { return a.sum > b.sum; });
    return merged;
  }

  Items Members(const Entry& entry) const {
    Items items;
    for (int32_t item = entry.head; item >= 0; item = next_[item]) items.push_back(item);
    std::sort(items.begin(), items.end());
    return items;
  }

 private:
  Entry Join(const Entry& a, const Entry& b) {
    next_[a.tail] = b.head;
    return {a.sum + b.sum, a.head, b.tail};
  }

  Items next_;
  int bins_;
};

}  // namespace

Parts Differencing(const Numbers& costs, int bins, int group) {
  const int size = static_cast<int>(costs.size());
  Merger merger(size, bins);
  std::vector<Entries> partitions;
  for (int start = 0; start < size; start += group) {
    Entries entries;
    for (int32_t i = start; i < std::min(start + group, size); ++i)
      entries.push_back({costs[i], i, i});
    partitions.push_back(std::move(entries));
  }
  // The largest spread first; ties by number.
  std::priority_queue<std::pair<int64_t, int>> heap;
  const auto push = [&](int number) { heap.emplace(merger.Spread(partitions[number]), -number); };
  for (size_t n = 0; n < partitions.size(); ++n) push(static_cast<int>(n));
  const auto pop = [&] {
    Entries entries = std::move(partitions[-heap.top().second]);
    heap.pop();
    return entries;
  };
  while (heap.size() > 1) {
    const Entries first = pop(), second = pop();
    partitions.push_back(merger.Merge(first, second));
    push(static_cast<int>(partitions.size()) - 1);
  }
  Parts parts;
  for (const Entry& entry : partitions.back()) parts.push_back(merger.Members(entry));
  parts.resize(bins);
  return parts;
}

void MeetLeast(const Numbers& costs, Parts& parts, int least) {
  const auto too_few = [&](const Items& part) { return static_cast<int>(part.size()) < least; };
  Numbers sums;
  for (const Items& part : parts) {
    sums.push_back(0);
    for (const int32_t item : part) sums.back() += costs[item];
  }
  for (size_t poor = 0; poor < parts.size(); ++poor)
    while (too_few(parts[poor])) {
      size_t rich = parts.size();
      for (size_t b = 0; b < parts.size(); ++b)
        if (static_cast<int>(parts[b].size()) > least &&
            (rich == parts.size() || sums[b] > sums[rich]))
          rich = b;
      const int32_t item = parts[rich].back();
      parts[rich].pop_back();
      parts[poor].insert(std::lower_bound(parts[poor].begin(), parts[poor].end(), item), item);
      sums[rich] -= costs[item];
      sums[poor] += costs[item];
    }
}

}  // namespace sb::balance
