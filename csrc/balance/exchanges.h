// What exchanges between the fullest bin and the others have in common.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "balance/problem.h"

namespace sb::balance {

// The bin of largest sum; ties by number.
inline int Fullest(const Numbers& sums) {
  int full = 0;
  for (int b = 1; b < static_cast<int>(sums.size()); ++b)
    if (sums[b] > sums[full]) full = b;
  return full;
}

// Gives the bins by ascending sum, ties by number; sorts them only where the first is not enough.
class Emptiest {
 public:
  explicit Emptiest(const Numbers& sums) : sums_(sums) {}

  // The next bin; -1 after the last.
  int Next() {
    const int size = static_cast<int>(sums_.size());
    if (taken_ == size) return -1;
    if (taken_++ == 0)
      return static_cast<int>(std::min_element(sums_.begin(), sums_.end()) - sums_.begin());
    if (order_.empty()) {
      order_.resize(size);
      std::iota(order_.begin(), order_.end(), 0);
      std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
        return sums_[a] != sums_[b] ? sums_[a] < sums_[b] : a < b;
      });
    }
    return order_[taken_ - 1];
  }

 private:
  const Numbers& sums_;
  Items order_;
  int taken_ = 0;
};

// How far two bins stay apart if `delta` of their difference moves; both are below 2^62.
inline int64_t Apart(int64_t delta, int64_t difference) {
  return std::abs(delta - (difference - delta));
}

}  // namespace sb::balance
