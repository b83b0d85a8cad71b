// Items into cells by their tokens.
#pragma once

#include <optional>

#include "balance/problem.h"

namespace sb::balance {

struct Packing {
  std::optional<Parts> cells;
  bool certain;  // Where there are no cells: whether there is no packing.
};

// Spreads items (ascending numbers, enough for all cells) over cells by tokens; where that breaks
// the cap, by best fit, then by search.
Packing Pack(const Numbers& tokens, const Items& items, int cells, int least, int most,
             int64_t cap);

}  // namespace sb::balance
