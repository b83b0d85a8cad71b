// Item after item, largest first.
#pragma once

#include <optional>

#include "balance/problem.h"

namespace sb::balance {

// Deals items (costs descending) always to the emptiest bin; each bin gets `least` to `most` items.
Parts LargestFirst(const Numbers& costs, int bins, int least, int most);

// Fills slots by descending cost, then puts each item where the sum of the slot maxima grows least;
// of cells that do not grow it the fullest is taken. Nothing if an item fits nowhere under the cap.
// Costs descend.
std::optional<Parts> LeastIncrease(const Problem& problem);

// Deals items (costs descending) to ranks in alternating direction; cuts each rank's items evenly
// into cells, larger first.
Parts DealtInTurns(const Problem& problem);

}  // namespace sb::balance
