// What no plan can beat.
#pragma once

#include "balance/problem.h"

namespace sb::balance {

// Bound of the largest sum of a rank.
int64_t DdpBound(const Problem& problem);

// Bound of the sum over slots of the slot's largest cell; with one item per cell it is the optimum.
int64_t FsdpBound(const Problem& problem);

// What the fullest bin holds at least: j + 1 of the j * bins + 1 largest items, and the least
// others. `sums` are the size + 1 prefix sums of the costs in descending order.
int64_t PigeonholeBound(const int64_t* sums, int size, int bins, int least);

}  // namespace sb::balance
