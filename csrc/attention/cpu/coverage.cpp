// Coverage: the plan, and the sum of what the tasks found.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"
#include "attention/cpu/plan.h"
#include "tuning/sampling.h"

namespace sb {
namespace {

// Sums of one (sequence, KV head) are cut by its shape alone, so that no number of threads shows;
// into few, so that they take little more memory than the result.
constexpr int64_t kMostTasks = 8;
constexpr int64_t kLeastRows = 64;
constexpr int64_t kKeysPerThread = 2048;  // fewer are done before a second thread has woken

// In the order in which they are added up: by (sequence, KV head), then by block.
std::vector<CoverageTask> TasksOf(const Problem& p, const Plan& plan, int64_t row_stride,
                                  int64_t max_rank, int64_t* num_sums) {
  const int64_t group = p.query_heads / p.kv_heads, B = p.block_size;
  const int64_t least = std::max<int64_t>(1, kLeastRows / (1 + B / row_stride));
  std::vector<CoverageTask> tasks;
  for (const Task& pair : plan.tasks) {
    const int64_t blocks = NumBlocks(p, pair.sequence);
    const int64_t step = std::max((blocks - 1 + kMostTasks - 1) / kMostTasks, least);
    for (int64_t begin = 1; begin < blocks; begin += step) {
      const int64_t end = std::min(begin + step, blocks);
      const int64_t ranks = (std::min(max_rank, end - 1) + 15) / 16 * 16;
      tasks.push_back({pair.sequence, pair.head, begin, end, pair.means, *num_sums, ranks});
      *num_sums += ranks * group;
    }
  }
  return tasks;
}

// Rounding must not leave more than there is: C(k) is a share.
void KeepWithinOne(float* mass, int64_t ranks) {
  double total = 0;
  for (int64_t r = 0; r < ranks; ++r) total += mass[r];
  if (total <= 1) return;
  const double scale = (1 - 0x1p-22) / total;
  for (int64_t r = 0; r < ranks; ++r) mass[r] = static_cast<float>(mass[r] * scale);
}

}  // namespace

void Coverage(const Problem& problem, View q, View k, int64_t row_stride, int64_t max_rank,
              float* mass) {
  std::fill_n(mass, problem.sequences * problem.query_heads * max_rank, 0.0f);
  if (max_rank == 0) return;
  Problem p = problem;
  // No earlier block: every pair with two blocks has a gate, and so gets its means.
  const std::vector<int32_t> ones(static_cast<size_t>(p.sequences * p.query_heads), 1);
  p.budget = ones.data();
  p.max_budget = 1;
  p.threads = static_cast<int>(
      std::clamp<int64_t>(p.tokens * p.kv_heads / kKeysPerThread, 1, std::max(p.threads, 1)));
  const Plan plan = MakePlan(p, Order::kLongestFirst, std::max<int64_t>(p.tokens, 1), true);
  int64_t num_sums = 0;
  const std::vector<CoverageTask> tasks = TasksOf(p, plan, row_stride, max_rank, &num_sums);
  std::vector<float> sums(static_cast<size_t>(num_sums));
  std::vector<CoverageTask> by_size = tasks;
  std::stable_sort(by_size.begin(), by_size.end(),
                   [](const CoverageTask& a, const CoverageTask& b) { return a.end > b.end; });
  const CoverageList list{by_size.data(), static_cast<int64_t>(by_size.size()), row_stride,
                          max_rank};
  if (Kernels().coverage(p, list, plan.mean_list, q, k, sums.data()) != kOk)
    throw std::runtime_error(
        "no memory for the scratch space of moba_coverage: the allocation failed. To fix it, use "
        "fewer threads or fewer tokens per micro-batch.");
  const int64_t group = p.query_heads / p.kv_heads;
  for (const CoverageTask& task : tasks) {
    const int64_t length = p.cu_seqlens[task.sequence + 1] - p.cu_seqlens[task.sequence];
    const double share = 1.0 / static_cast<double>(SampledRows(length, p.block_size, row_stride));
    const int64_t ranks = std::min(max_rank, task.end - 1);
    for (int64_t g = 0; g < group; ++g) {
      const float* sum = sums.data() + task.sums + g * task.ranks;
      float* to = mass + (task.sequence * p.query_heads + task.head * group + g) * max_rank;
      for (int64_t r = 0; r < ranks; ++r) to[r] += static_cast<float>(sum[r] * share);
    }
  }
  for (int64_t i = 0; i < p.sequences * p.query_heads; ++i)
    KeepWithinOne(mass + i * max_rank, max_rank);
}

}  // namespace sb
