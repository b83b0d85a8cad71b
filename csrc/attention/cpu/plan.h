// How the work is cut into chunks for the threads. Results do not depend on that: sums over keys
// are cut at blocks, sums over rows at segments, and both follow from the shapes alone.
#pragma once

#include <vector>

#include "attention/problem.h"

namespace sb {

struct Plan {
  std::vector<Task> tasks;
  std::vector<MeanTask> mean_tasks;
  TaskList task_list{};
  MeanList mean_list{};
};

// True if all rows of this (sequence, KV head) attend every earlier block.
bool IsDense(const Problem& problem, int64_t sequence, int64_t kv_head);

int64_t NumBlocks(const Problem& problem, int64_t sequence);

enum class Order { kAscending, kLongestFirst };

// Tasks of all (sequence, KV head), `chunk` tokens each; 0 chooses. kAscending: chunk by chunk, as
// turns need it.
Plan MakePlan(const Problem& problem, Order order, int64_t chunk, bool with_means);

}  // namespace sb
