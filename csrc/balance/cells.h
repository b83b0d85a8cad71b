// Exchanges between cells, where cells have caps or slots have maxima.
#pragma once

#include "balance/problem.h"

namespace sb::balance {

// The cost of each cell.
Numbers LoadsOf(const Problem& problem, const Parts& cells);

// Lowers the largest sum of a rank by exchanges that keep every cell within its limits, and returns
// it. `rows` are the cells of each rank.
int64_t ImproveRanks(const Problem& problem, Parts& cells, const Parts& rows, int64_t bound);

// Lowers the sum of the slot maxima, cells being dealt to slots by descending cost, and returns it.
int64_t ImproveSlots(const Problem& problem, Parts& cells, int64_t bound);

}  // namespace sb::balance
