// Moves and swaps between the fullest bin and others.
#pragma once

#include "balance/problem.h"

namespace sb::balance {

// Lowers the largest sum until nothing helps (or `bound` is met), and returns it. Costs descend;
// the items of each bin ascend; not all items need be there.
int64_t Improve(const Numbers& costs, Parts& parts, int least, int most, int64_t bound);

}  // namespace sb::balance
