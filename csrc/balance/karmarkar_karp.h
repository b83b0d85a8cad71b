// The differencing method.
#pragma once

#include "balance/problem.h"

namespace sb::balance {

// Merges the two partial partitions of largest spread, largest bin with smallest, until one is left
// (Karmarkar and Karp, 1982, for more than two bins). With `group` = `bins` it starts from tuples
// of that many neighbours, and all bins get the same number of items, or one more; else `group` is
// 1. Costs descend.
Parts Differencing(const Numbers& costs, int bins, int group);

// Gives every bin its least number of items: the smallest of the fullest bin that can spare one.
void MeetLeast(const Numbers& costs, Parts& parts, int least);

}  // namespace sb::balance
