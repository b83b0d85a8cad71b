// How work is cut, what Check refuses, and the index against brute force.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"
#include "attention/cpu/plan.h"
#include "tests/expect.h"

namespace {

using sb::Problem;

struct Case {
  std::vector<int32_t> cu, budget;
  Problem problem{};
};

Case MakeCase(std::vector<int> lengths, int query_heads, int kv_heads, int block_size,
              std::vector<int32_t> budget, int max_budget) {
  Case c;
  c.cu = {0};
  for (const int length : lengths) c.cu.push_back(c.cu.back() + length);
  c.budget = budget;
  c.problem.tokens = c.cu.back();
  c.problem.query_heads = query_heads;
  c.problem.kv_heads = kv_heads;
  c.problem.head_dim = 32;
  c.problem.sequences = static_cast<int64_t>(lengths.size());
  c.problem.block_size = block_size;
  c.problem.max_budget = max_budget;
  c.problem.threads = 2;
  return c;
}

Problem& Bind(Case& c) {
  c.problem.cu_seqlens = c.cu.data();
  c.problem.budget = c.budget.data();
  return c.problem;
}

void TestTasksCoverEveryRowOnce() {
  Case c = MakeCase({0, 1, 700, 64, 0, 65, 5000}, 4, 2, 64, std::vector<int32_t>(28, 3), 3);
  const Problem& p = Bind(c);
  for (const int64_t chunk : {0, 64, 100, 4096}) {
    const sb::Plan plan = sb::MakePlan(p, sb::Order::kAscending, chunk, true);
    std::set<std::pair<int64_t, int64_t>> rows;  // (KV head, token)
    int64_t last = 0;
    for (const sb::Task& task : plan.tasks) {
      EXPECT(task.begin >= last, "a task would wait for a later one");
      last = task.begin;
      const int64_t length = p.cu_seqlens[task.sequence + 1] - p.cu_seqlens[task.sequence];
      for (int64_t t = task.begin; t < std::min(task.begin + plan.task_list.chunk, length); ++t)
        EXPECT(rows.insert({task.head, p.cu_seqlens[task.sequence] + t}).second,
               "a row has two owners");
    }
    EXPECT(static_cast<int64_t>(rows.size()) == p.tokens * p.kv_heads, "%d rows",
           static_cast<int>(rows.size()));
    EXPECT(plan.task_list.chunk % 64 == 0);
  }
}

void TestDense() {
  Case c = MakeCase({64, 65, 128}, 2, 1, 64, {1, 1, 2, 2, 3, 1}, 3);
  const Problem& p = Bind(c);
  EXPECT(sb::IsDense(p, 0, 0) && sb::IsDense(p, 1, 0) && !sb::IsDense(p, 2, 0));
}

std::string Refusal(const Case& given, int64_t max_seqlen = -1) {
  Case c = given;
  try {
    sb::Check(Bind(c), max_seqlen);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void TestCheck() {
  const Case good = MakeCase({100, 30}, 2, 1, 16, {1, 2, 3, 4}, 4);
  EXPECT(Refusal(good).empty() && Refusal(good, 100).empty());
  EXPECT(Refusal(good, 99).find("max_seqlen") == 0);
  Case c = good;
  c.cu[0] = 1;
  EXPECT(Refusal(c).find("cu_seqlens starts") == 0);
  c = good;
  c.cu[1] = 131;
  EXPECT(Refusal(c).find("cu_seqlens decreases") == 0);
  c = good;
  c.problem.tokens = 129;
  EXPECT(Refusal(c).find("cu_seqlens ends") == 0);
  c = good;
  c.budget[2] = 0;
  EXPECT(Refusal(c).find("budget[1, 0]") == 0);
  c = good;
  c.budget[1] = 5;
  EXPECT(Refusal(c).find("max_budget is 4") == 0);
  c = good;
  c.budget[3] = 1000;  // more than its two blocks
  EXPECT(Refusal(c).empty());
  EXPECT(Refusal(MakeCase({32768 * 16}, 1, 1, 16, {1}, 1)).find("block_size is 16") == 0);
  EXPECT(Refusal(MakeCase({32767 * 16}, 1, 1, 16, {1}, 1)).empty());
  EXPECT(Refusal(MakeCase({1 << 28}, 8, 1, 1 << 20, std::vector<int32_t>(8, 1), 1)).find("2^31") !=
         std::string::npos);
}

void TestIndexOf(const std::vector<int>& lengths, int query_heads, int kv_heads, int threads) {
  Case c = MakeCase(lengths, query_heads, kv_heads, 16,
                    std::vector<int32_t>(lengths.size() * static_cast<size_t>(query_heads)), 9);
  c.problem.threads = threads;
  sb::Random random(7);
  for (int32_t& k : c.budget) k = 1 + random.Below(9);
  const Problem& p = Bind(c);
  const int64_t width = p.max_budget - 1, group = p.query_heads / p.kv_heads;
  std::vector<int16_t> selection(static_cast<size_t>(p.query_heads * p.tokens * width), -1);
  std::vector<std::vector<int32_t>> want;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t start = c.cu[n], length = c.cu[n + 1] - start, blocks = sb::NumBlocks(p, n);
    for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
      const size_t first = want.size();
      want.resize(first + static_cast<size_t>(blocks));
      for (int64_t t = 0; t < length; ++t)
        for (int64_t g = 0; g < group; ++g) {
          const int64_t h = kv * group + g, past = t / 16;
          const int64_t used = std::min<int64_t>(past, c.budget[n * p.query_heads + h] - 1);
          std::vector<int> all(static_cast<size_t>(past));
          for (int64_t i = 0; i < past; ++i) all[i] = static_cast<int>(i);
          for (int64_t i = 0; i < used; ++i)
            std::swap(all[i], all[i + random.Below(static_cast<int>(past - i))]);
          std::sort(all.begin(), all.begin() + used);
          for (int64_t i = 0; i < used; ++i) {
            selection[(h * p.tokens + start + t) * width + i] = static_cast<int16_t>(all[i]);
            if (!sb::IsDense(p, n, kv))
              want[first + all[i]].push_back(static_cast<int32_t>(t * group + g));
          }
        }
    }
  }
  std::vector<int64_t> lists(
      static_cast<size_t>(sb::ListCapacity(p.tokens, p.sequences, p.kv_heads, 16)) + 1, -1);
  std::vector<int32_t> rows(selection.size(), -1);
  sb::Index(p, selection.data(), lists.data(), rows.data());
  EXPECT(want.size() < lists.size());
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT(std::vector<int32_t>(rows.begin() + lists[i], rows.begin() + lists[i + 1]) == want[i],
           "list %zu", i);
  for (size_t i = want.size(); i + 1 < lists.size(); ++i)
    EXPECT(lists[i + 1] == lists[i], "a list too many");
  sb::CheckIndex(p, lists.data(), rows.data());

  // The last row of the first head names a block that is not there, a negative one, or one twice.
  int16_t* last = selection.data() + (static_cast<size_t>(p.tokens) - 1) * width;
  c.budget[(lengths.size() - 1) * static_cast<size_t>(query_heads)] = 3;
  const int16_t wrong[][2] = {{0, 32000}, {-1, 0}, {1, 1}, {1, 0}};
  for (const auto& blocks : wrong) {
    std::copy(blocks, blocks + 2, last);
    bool refused = false;
    try {
      sb::Index(p, selection.data(), lists.data(), rows.data());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    EXPECT(refused, "a wrong selection was taken: %d, %d", blocks[0], blocks[1]);
  }
}

void TestIndex() {
  TestIndexOf({100, 0, 33, 250}, 6, 2, 2);
  // So many rows that several threads share them, in one head or in many sequences.
  for (const int threads : {1, 2, 3, 8}) {
    TestIndexOf({2500}, 8, 1, threads);
    TestIndexOf({1200, 1, 300}, 14, 2, threads);
    TestIndexOf(std::vector<int>(60, 150), 4, 2, threads);
  }
}

void TestDispatch() {
  EXPECT(sb::KernelsOf("baseline") != nullptr);
  EXPECT(sb::KernelsOf("mmx") == nullptr);
}

}  // namespace

int main() {
  TestTasksCoverEveryRowOnce();
  TestDense();
  TestCheck();
  TestIndex();
  TestDispatch();
  return sb::failures == 0 ? 0 : 1;
}
