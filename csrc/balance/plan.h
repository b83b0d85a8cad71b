// The cells of a window.
#pragma once

#include <vector>

#include "balance/problem.h"

namespace sb::balance {

struct Plan {
  // rows[rank][micro_batch] = items; empty where no cells under the cap were found.
  std::vector<Parts> rows;
  // Whether no plan has a smaller value; where there are no rows, whether there is no plan.
  bool finished;
};

// Deals items over cells so that the largest sum of a rank is small.
Plan PlanDdp(const Problem& problem, int64_t node_limit);

// Deals items over cells so that the sum over slots of the slot's largest cell is small.
Plan PlanFsdp(const Problem& problem, int64_t node_limit);

}  // namespace sb::balance
