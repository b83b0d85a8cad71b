#include "attention/cpu/plan.h"

#include <algorithm>

namespace sb {
namespace {

int64_t Length(const Problem& p, int64_t n) { return p.cu_seqlens[n + 1] - p.cu_seqlens[n]; }
int64_t RoundUp(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

// Long enough that packing a block pays (thousands of gathered rows), short enough that the chunk's
// sums stay in L2 and that every thread finds several tasks. A backward task does more per packed
// block and waits for its turn, so its chunk is longer.
int64_t ChooseChunk(const Problem& p, Order order) {
  if (p.chunk > 0) return p.chunk;
  const bool turns = order == Order::kAscending;
  const int64_t group = p.query_heads / p.kv_heads, rows = turns ? 16384 : 8192;
  const int64_t most = std::clamp<int64_t>(rows / group, 256, rows / 4);
  const int64_t tasks = (turns ? 4 : 8) * std::max(p.threads, 1);
  return std::clamp<int64_t>(p.tokens * p.kv_heads / tasks, 256, most);
}

}  // namespace

bool IsDense(const Problem& p, int64_t sequence, int64_t kv_head) {
  const int64_t group = p.query_heads / p.kv_heads, blocks = NumBlocks(p, sequence);
  const int32_t* budget = p.budget + sequence * p.query_heads + kv_head * group;
  return std::all_of(budget, budget + group, [=](int32_t k) { return k >= blocks; });
}

int64_t NumBlocks(const Problem& p, int64_t sequence) {
  return (Length(p, sequence) + p.block_size - 1) / p.block_size;
}

Plan MakePlan(const Problem& p, Order order, int64_t chunk, bool with_means) {
  Plan plan;
  TaskList& list = plan.task_list;
  MeanList& means = plan.mean_list;
  const int64_t segment = std::clamp<int64_t>(2048 * p.kv_heads / p.query_heads, 256, 2048);
  list.segment = RoundUp(segment, p.block_size);
  list.chunk = RoundUp(chunk > 0 ? chunk : ChooseChunk(p, order),
                       order == Order::kAscending ? list.segment : p.block_size);
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = Length(p, n), blocks = NumBlocks(p, n);
    list.longest = std::max(list.longest, std::min(list.chunk, length));
    list.width = std::max(list.width, std::min(p.block_size, RoundUp(length, 16)));
    for (int64_t h = 0; h < p.kv_heads; ++h, list.lists += blocks) {
      Task task{n, h, 0, list.lists, -1, IsDense(p, n, h)};
      if (with_means && !task.dense) {
        task.means = means.columns;
        // Only complete blocks that a later token can see.
        for (int64_t b = 0; b + 1 < blocks; b += 16)
          plan.mean_tasks.push_back(
              {n, h, b, std::min<int64_t>(16, blocks - 1 - b), means.columns + b});
        means.columns += blocks - 1;
        means.longest = std::max(means.longest, blocks - 1);
      }
      for (; task.begin < length; task.begin += list.chunk) plan.tasks.push_back(task);
    }
  }
  if (order == Order::kAscending) {
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                     [](const Task& a, const Task& b) { return a.begin < b.begin; });
  } else {
    // Late rows attend more blocks.
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                     [](const Task& a, const Task& b) { return a.begin > b.begin; });
  }
  list.tasks = plan.tasks.data();
  list.count = static_cast<int64_t>(plan.tasks.size());
  means.tasks = plan.mean_tasks.data();
  means.count = static_cast<int64_t>(plan.mean_tasks.size());
  return plan;
}

}  // namespace sb
