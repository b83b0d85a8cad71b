// How many (query, key) pairs block-sparse attention visits, in closed form.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sb {

// A query at position t attends its own block up to itself and min(budget - 1, t / block) earlier
// blocks.
inline int64_t AttendedPairs(int64_t length, int64_t budget, int64_t block) {
  const int64_t blocks = length / block, rest = length % block;
  const int64_t past = std::min(budget - 1, blocks);
  const int64_t own = blocks * (block * (block + 1) / 2) + rest * (rest + 1) / 2;
  const int64_t earlier = past * (past - 1) / 2 + past * (blocks - past);
  return own + block * (block * earlier + rest * past);
}

}  // namespace sb
