#include "attention/cpu/attention.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/cpu/dispatch.h"
#include "attention/cpu/plan.h"

namespace sb {
namespace {

const pid_t kLoadedIn = getpid();

constexpr int64_t kSelectChunk = 256;

std::string Text(int64_t x) { return std::to_string(x); }

[[noreturn]] void Refuse(const std::string& found, const std::string& why,
                         const std::string& change) {
  throw std::invalid_argument(found + ": " + why + ". To fix it, " + change + ".");
}

void CheckBudget(const Problem& p, int64_t n) {
  const int64_t blocks = NumBlocks(p, n);
  for (int64_t h = 0; h < p.query_heads; ++h) {
    const int64_t k = p.budget[n * p.query_heads + h];
    const std::string where = "budget[" + Text(n) + ", " + Text(h) + "] is " + Text(k);
    if (k < 1)
      Refuse(where, "a query always attends its own block, so the budget counts at least 1",
             "pass budget >= 1");
    if (std::min(k, blocks) > p.max_budget)
      Refuse("max_budget is " + Text(p.max_budget) + " but " + where,
             "max_budget sizes the selection and must bound every budget",
             "pass a larger max_budget");
  }
}

void Run(int status) {
  if (status == kOutOfMemory)
    throw std::runtime_error(
        "no memory for the scratch space of the attention kernel: the allocation failed. To fix "
        "it, use fewer threads, "
        "a smaller block_size or fewer tokens per micro-batch.");
}

}  // namespace

void Check(const Problem& p, int64_t max_seqlen) {
  const int64_t group = p.query_heads / p.kv_heads;
  const char* change = "pass cu_seqlens = cumulative sum of the sequence lengths, with 0 in front";
  if (p.cu_seqlens[0] != 0)
    Refuse("cu_seqlens starts at " + Text(p.cu_seqlens[0]), "the first sequence starts at token 0",
           change);
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = static_cast<int64_t>(p.cu_seqlens[n + 1]) - p.cu_seqlens[n];
    const std::string what = "sequence " + Text(n) + " has " + Text(length) + " tokens";
    if (length < 0)
      Refuse("cu_seqlens decreases at position " + Text(n + 1), "a length cannot be negative",
             change);
    if (max_seqlen >= 0 && length > max_seqlen)
      Refuse("max_seqlen is " + Text(max_seqlen) + " but " + what,
             "max_seqlen must bound every length", "pass a larger max_seqlen");
    if (NumBlocks(p, n) > 32767)
      Refuse("block_size is " + Text(p.block_size) + " and " + what,
             "block numbers are 16-bit, so at most 32767 blocks", "pass a larger block_size");
    if (length * group >= int64_t{1} << 31)
      Refuse(what, "tokens times query heads per KV head must stay below 2^31", "cut the sequence");
  }
  if (p.cu_seqlens[p.sequences] != p.tokens)
    Refuse("cu_seqlens ends at " + Text(p.cu_seqlens[p.sequences]) + " but q has " +
               Text(p.tokens) + " tokens",
           "every token belongs to a sequence", change);
  for (int64_t n = 0; n < p.sequences; ++n) CheckBudget(p, n);
}

int SafeThreads(int wanted) { return getpid() == kLoadedIn ? std::max(wanted, 1) : 1; }

void Select(const Problem& p, View q, View k, int16_t* selection) {
  if (p.max_budget == 1) return;  // no earlier block is selected
  const Plan plan = MakePlan(p, Order::kLongestFirst, kSelectChunk, true);
  Run(Kernels().select(p, plan.task_list, plan.mean_list, q, k, selection));
}

void Forward(const Problem& p, View q, View k, View v, const int64_t* lists, const int32_t* rows,
             void* out, float* lse) {
  const Plan plan = MakePlan(p, Order::kLongestFirst, 0, false);
  Run(Kernels().forward(p, plan.task_list, q, k, v, lists, rows, out, lse));
}

void Backward(const Problem& p, View dout, View q, View k, View v, View out, const float* lse,
              const float* dlse, const int64_t* lists, const int32_t* rows, Gradients gradients) {
  const Plan plan = MakePlan(p, Order::kAscending, 0, false);
  Run(Kernels().backward(p, plan.task_list, dout, q, k, v, out, lse, dlse, lists, rows, gradients));
}

}  // namespace sb
