// Branch and bound for few items (kMostSearched at most).
#pragma once

#include <functional>
#include <optional>

#include "balance/problem.h"

namespace sb::balance {

struct Found {
  std::optional<Parts> parts;  // What beats the value known so far, if anything does.
  bool finished;               // Whether nothing better exists.
};

enum class Answer { kNo, kYes, kUnknown };
// Whether a bin's items are allowed together.
using Allowed = std::function<Answer(const Items&)>;

// Looks for bins whose largest sum is below `value`, one bin after another. Costs descend; no
// largest sum is below `bound`; it gives up after `node_limit` steps (negative: never). No
// `allowed`: everything is.
Found SearchRanks(const Numbers& costs, int bins, int least, int most, int64_t value, int64_t bound,
                  int64_t node_limit, const Allowed& allowed);

// Looks for cells whose sum of slot maxima is below `value`, one item after another. Costs descend.
Found SearchSlots(const Problem& problem, int64_t value, int64_t bound, int64_t node_limit);

}  // namespace sb::balance
