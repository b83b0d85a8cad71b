// The planner: what every plan keeps, bounds, known optima, limits, threads.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "balance/bounds.h"
#include "balance/karmarkar_karp.h"
#include "balance/packing.h"
#include "balance/plan.h"
#include "balance/search.h"
#include "balance/slot_fill.h"
#include "balance/swaps.h"
#include "tests/expect.h"

namespace {

using namespace sb::balance;

Problem RandomProblem(unsigned seed, bool large) {
  sb::Random random(seed);
  Problem p;
  p.ranks = 1 + random.Below(6);
  p.accumulate = 1 + random.Below(5);
  const int size = p.num_cells() + random.Below(2) * random.Below(large ? 400 : 20);
  int64_t sum = 0, most = 1;
  for (int i = 0; i < size; ++i) {
    p.tokens.push_back(1 + random.Below(seed % 3 == 0 ? 60 : 4000));
    p.costs.push_back(seed % 4 == 0   ? random.Below(9)
                      : seed % 4 == 1 ? p.tokens[i]
                                      : p.tokens[i] * p.tokens[i]);
    sum += p.tokens[i];
    most = std::max(most, p.tokens[i]);
  }
  p.max_tokens =
      random.Below(2) == 0 ? kNoCap : std::max(most, sum / p.num_cells() + random.Below(30));
  p.equal_counts = random.Below(3) == 0;
  return p;
}

int64_t Value(const Problem& p, const std::vector<Parts>& rows, bool is_fsdp) {
  Numbers slots(p.accumulate);
  int64_t makespan = 0, slot_sum = 0;
  for (const Parts& row : rows) {
    int64_t sum = 0;
    for (size_t a = 0; a < row.size(); ++a) {
      int64_t load = 0;
      for (const int32_t item : row[a]) load += p.costs[item];
      slots[a] = std::max(slots[a], load);
      sum += load;
    }
    makespan = std::max(makespan, sum);
  }
  for (const int64_t slot : slots) slot_sum += slot;
  return is_fsdp ? slot_sum : makespan;
}

// Each item once, no empty cell, counts and tokens within limits, no value below its bound.
void ExpectPlan(const Problem& p, bool is_fsdp, int64_t node_limit) {
  const Plan plan = is_fsdp ? PlanFsdp(p, node_limit) : PlanDdp(p, node_limit);
  if (plan.rows.empty()) {
    EXPECT(p.max_tokens != kNoCap);
    return;
  }
  Items seen(p.size());
  EXPECT(static_cast<int>(plan.rows.size()) == p.ranks);
  for (const Parts& row : plan.rows) {
    EXPECT(static_cast<int>(row.size()) == p.accumulate);
    for (const Items& cell : row) {
      const int count = static_cast<int>(cell.size());
      EXPECT(count >= p.cell_least() && count <= p.cell_most(), "%d items", count);
      int64_t tokens = 0;
      for (const int32_t item : cell) {
        ++seen[item];
        tokens += p.tokens[item];
      }
      EXPECT(p.max_tokens == kNoCap || tokens <= p.max_tokens);
    }
  }
  for (const int32_t times : seen) EXPECT(times == 1);
  const int64_t bound = is_fsdp ? FsdpBound(p) : DdpBound(p), value = Value(p, plan.rows, is_fsdp);
  EXPECT(value >= bound);
  EXPECT(plan.finished || value > bound);
}

void TestPlansKeepTheirLimits() {
  for (unsigned seed = 1; seed <= 300; ++seed)
    for (const bool is_fsdp : {false, true})
      ExpectPlan(RandomProblem(seed, seed % 5 == 0), is_fsdp, seed % 7 == 0 ? 20 : 4000);
}

// Every partition of a few items, none left out.
int64_t LeastMakespan(const Problem& p, size_t item, Numbers& sums, Items& counts) {
  if (item == p.costs.size()) {
    for (const int32_t count : counts)
      if (count < p.rank_least() || count > p.rank_most()) return INT64_MAX;
    return *std::max_element(sums.begin(), sums.end());
  }
  int64_t best = INT64_MAX;
  for (int r = 0; r < p.ranks; ++r) {
    sums[r] += p.costs[item];
    ++counts[r];
    best = std::min(best, LeastMakespan(p, item + 1, sums, counts));
    --counts[r];
    sums[r] -= p.costs[item];
  }
  return best;
}

void TestBestOfAllPartitions() {
  sb::Random random(9);
  for (int round = 0; round < 60; ++round) {
    Problem p{{}, {}, 2 + random.Below(2), 1 + random.Below(3), kNoCap, round % 3 == 0};
    const int size = p.num_cells() + random.Below(2);
    for (int i = 0; i < size; ++i) p.costs.push_back(random.Below(100));
    p.tokens = p.costs;
    Numbers sums(p.ranks);
    Items counts(p.ranks);
    const int64_t best = LeastMakespan(p, 0, sums, counts);
    const Plan plan = PlanDdp(p, kUnlimited);
    EXPECT(plan.finished && Value(p, plan.rows, false) == best);
    EXPECT(DdpBound(p) <= best);
  }
}

void TestDifferencing() {
  // The example of Karmarkar and Karp: 8, 7, 6, 5, 4 in two bins end 2 apart.
  const Numbers costs = {8, 7, 6, 5, 4};
  const auto sum = [&](const Items& part) {
    int64_t total = 0;
    for (const int32_t item : part) total += costs[item];
    return total;
  };
  Parts parts = Differencing(costs, 2, 1);
  EXPECT(std::max(sum(parts[0]), sum(parts[1])) == 16);
  parts = Differencing(costs, 2, 2);
  EXPECT(parts[0].size() + parts[1].size() == 5 && parts[0].size() >= 2 && parts[1].size() >= 2);
  EXPECT(Improve(costs, parts, 2, 3, 15) == 15);
  Parts few = {{0, 1, 2, 3, 4}, {}, {}};
  MeetLeast(costs, few, 1);
  EXPECT(few[1] == Items{4} && few[2] == Items{3});
}

void TestSlotsAreFilled() {
  // What fits beside the giant is spread over its slot, one item per later cell is kept.
  Problem p{{100, 9, 8, 7, 6, 5, 4, 3, 2, 1}, Numbers(10, 1), 2, 3, kNoCap, false};
  EXPECT(FillSlots(p) == (Parts{{0}, {1, 2, 3, 4, 5}, {6}, {7}, {8}, {9}}));
  EXPECT(FsdpBound(p) == 100 + 2 + 4);
  // 60 + 40 and 55 + 45 reach 100; the rest is spread over the other slot.
  p = {{100, 60, 55, 45, 40, 34, 33, 33, 2}, Numbers(9, 1), 3, 2, kNoCap, false};
  EXPECT(FillSlots(p) == (Parts{{0}, {1, 4}, {2, 3}, {5}, {6, 8}, {7}}));
  p = {{9, 8, 7, 6, 5, 4, 3, 2, 1}, Numbers(9, 1), 2, 3, kNoCap, false};
  EXPECT(OneFullSlot(p) == (Parts{{0, 3, 4}, {1, 2}, {5}, {6}, {7}, {8}}));
}

void TestPacking() {
  // Neither spreading nor best fit finds it; the one way is 7 + 3 + 3 and 5 + 4 + 4.
  const Numbers tokens = {7, 5, 4, 4, 3, 3};
  const Packing packing = Pack(tokens, {0, 1, 2, 3, 4, 5}, 2, 1, 6, 13);
  EXPECT(packing.cells && (*packing.cells)[0] == (Items{0, 4, 5}));
  const Packing none = Pack({5, 5, 5}, {0, 1, 2}, 2, 1, 3, 9);
  EXPECT(!none.cells && none.certain);
  const Packing unknown =
      Pack(Numbers(30, 5), Items{0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                                 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29},
           20, 1, 30, 9);
  EXPECT(!unknown.cells && !unknown.certain);
}

// Sums near 2^62 and products of them with the number of bins stay right.
void TestHugeCosts() {
  Problem p{{}, {}, 5, 3, kNoCap, false};
  for (int i = 0; i < 16; ++i) {
    p.costs.push_back((int64_t{1} << 58) - i * 1000003);
    p.tokens.push_back(1);
  }
  for (const bool is_fsdp : {false, true}) {
    ExpectPlan(p, is_fsdp, 4000);
    p.costs.pop_back();
    p.tokens.pop_back();
    ExpectPlan(p, is_fsdp, kUnlimited);
    p.costs.push_back(int64_t{1} << 57);
    p.tokens.push_back(1);
  }
}

void TestThreads() {
  const Problem p = RandomProblem(25, true);
  const Plan want = PlanDdp(p, 4000);
  std::vector<std::thread> threads;
  std::vector<int> wrong(6, 0);
  for (int n = 0; n < 6; ++n)
    threads.emplace_back([&, n] {
      for (int round = 0; round < 5; ++round) wrong[n] += PlanDdp(p, 4000).rows != want.rows;
    });
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) EXPECT(count == 0);
}

}  // namespace

int main() {
  TestPlansKeepTheirLimits();
  TestBestOfAllPartitions();
  TestDifferencing();
  TestSlotsAreFilled();
  TestPacking();
  TestHugeCosts();
  TestThreads();
  return sb::failures == 0 ? 0 : 1;
}
