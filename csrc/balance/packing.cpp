#include "balance/packing.h"

#include <algorithm>
#include <utility>

#include "balance/greedy.h"

namespace sb::balance {

namespace {

constexpr int64_t kSearchedNodes = 100000;

bool Fits(const Numbers& sizes, const Parts& parts, int64_t cap) {
  return std::all_of(parts.begin(), parts.end(), [&](const Items& part) {
    int64_t sum = 0;
    for (const int32_t item : part) sum += sizes[item];
    return sum <= cap;
  });
}

int Count(const Items& items) { return static_cast<int>(items.size()); }

// Each item, largest first, where the least room remains.
std::optional<Parts> BestFit(const Numbers& sizes, int cells, int least, int most, int64_t cap) {
  Parts parts(cells);
  Numbers sums(cells);
  for (int32_t i = 0; i < static_cast<int32_t>(sizes.size()); ++i) {
    int best = -1;
    for (int c = 0; c < cells; ++c) {
      const bool fits = Count(parts[c]) < most && sizes[i] <= cap - sums[c];
      if (fits && (best < 0 || sums[c] > sums[best])) best = c;
    }
    if (best < 0) return std::nullopt;
    parts[best].push_back(i);
    sums[best] += sizes[i];
  }
  for (int poor = 0; poor < cells; ++poor)
    while (Count(parts[poor]) < least) {
      int rich = -1;
      for (int c = 0; c < cells; ++c) {
        const bool spare = Count(parts[c]) > least && sizes[parts[c].back()] <= cap - sums[poor];
        if (spare && (rich < 0 || parts[c].size() > parts[rich].size())) rich = c;
      }
      if (rich < 0) return std::nullopt;
      const int32_t item = parts[rich].back();
      parts[rich].pop_back();
      parts[poor].push_back(item);
      sums[rich] -= sizes[item];
      sums[poor] += sizes[item];
    }
  return parts;
}

// All packings, item after item, largest first; cells alike are tried once.
class Search {
 public:
  Search(const Numbers& sizes, int cells, int least, int most, int64_t cap)
      : sizes_(sizes),
        least_(least),
        most_(most),
        cap_(cap),
        parts_(cells),
        sums_(cells),
        missing_(cells * least) {}

  bool Run(int32_t item) {
    const int size = static_cast<int>(sizes_.size());
    if (item == size) return true;
    const bool only_poor = size - item == missing_;
    for (int c = 0; c < static_cast<int>(parts_.size()); ++c) {
      const bool poor = Count(parts_[c]) < least_;
      if (Count(parts_[c]) >= most_ || sizes_[item] > cap_ - sums_[c] || (only_poor && !poor) ||
          Seen(c))
        continue;
      if (++nodes_ > kSearchedNodes) return false;
      parts_[c].push_back(item);
      sums_[c] += sizes_[item];
      missing_ -= poor;
      if (Run(item + 1)) return true;
      missing_ += poor;
      sums_[c] -= sizes_[item];
      parts_[c].pop_back();
    }
    return false;
  }

  bool finished() const { return nodes_ <= kSearchedNodes; }
  const Parts& parts() const { return parts_; }

 private:
  bool Seen(int cell) const {
    for (int d = 0; d < cell; ++d)
      if (sums_[d] == sums_[cell] && parts_[d].size() == parts_[cell].size()) return true;
    return false;
  }

  const Numbers& sizes_;
  int least_, most_;
  int64_t cap_;
  Parts parts_;
  Numbers sums_;
  int missing_;
  int64_t nodes_ = 0;
};

}  // namespace

Packing Pack(const Numbers& tokens, const Items& items, int cells, int least, int most,
             int64_t cap) {
  Items order = items;
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return tokens[a] != tokens[b] ? tokens[a] > tokens[b] : a < b;
  });
  Numbers sizes;
  int64_t sum = 0;
  for (const int32_t item : order) {
    sizes.push_back(tokens[item]);
    sum += tokens[item];
  }
  Parts parts = LargestFirst(sizes, cells, least, most);
  if (cap != kNoCap && !Fits(sizes, parts, cap)) {
    if (sizes[0] > cap || sum / cap > cells || (sum / cap == cells && sum % cap != 0))
      return {std::nullopt, true};
    if (std::optional<Parts> fitted = BestFit(sizes, cells, least, most, cap)) {
      parts = std::move(*fitted);
    } else {
      if (static_cast<int>(items.size()) > kMostSearched) return {std::nullopt, false};
      Search search(sizes, cells, least, most, cap);
      if (!search.Run(0)) return {std::nullopt, search.finished()};
      parts = search.parts();
    }
  }
  for (Items& part : parts) {
    for (int32_t& item : part) item = order[item];
    std::sort(part.begin(), part.end());
  }
  return {std::move(parts), true};
}

}  // namespace sb::balance
