// The choice of budgets: against all choices for one sequence, by hand for several, and whatever
// the numbers are it ends.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/expect.h"
#include "tuning/budget.h"

namespace {

struct Case {
  std::vector<std::vector<int64_t>> coverage;
  std::vector<std::vector<int32_t>> cost;
  std::vector<int64_t> k0, rows, blocks;
  sb::BudgetRule rule;
};

std::vector<int32_t> Choose(const Case& c) {
  std::vector<sb::BudgetSequence> sequences;
  for (size_t n = 0; n < c.coverage.size(); ++n)
    sequences.push_back({c.coverage[n].data(), c.cost[n].data(), c.k0[n], c.rows[n], c.blocks[n]});
  std::vector<int32_t> budgets(sequences.size());
  std::vector<int64_t> most(sequences.size());
  sb::ChooseBudgets(c.rule, sequences.data(), static_cast<int64_t>(sequences.size()),
                    budgets.data(), most.data());
  return budgets;
}

void TestFixedPoint() {
  EXPECT(sb::FixedPoint(0) == 0 && sb::FixedPoint(-1) == 0 && sb::FixedPoint(NAN) == 0);
  EXPECT(sb::FixedPoint(1) == sb::kFixedOne && sb::FixedPoint(INFINITY) == sb::kFixedOne);
  EXPECT(sb::FixedPoint(0x1p-30) == 1 && sb::FixedPoint(0x1p-31) == 1);
  EXPECT(sb::FixedPoint(0x1.fffp-32) == 0 && sb::FixedPoint(0x1.8p-30) == 2);
}

void TestMass() {
  const float mass[] = {0.5f, 0.25f, 0.0f, 0.75f, NAN, 0.25f};  // two heads of three ranks
  int64_t coverage[3];
  sb::CoverageOfMass(mass, 2, 3, 3, coverage);
  EXPECT(coverage[0] == 0 && coverage[1] == sb::kFixedOne * 5 / 4);
  EXPECT(coverage[2] == sb::kFixedOne * 3 / 2, "NaN counts as 0");
}

// The largest allowed budget within tau, else the least allowed one.
void TestOneSequence() {
  sb::Random random(1);
  for (int round = 0; round < 20000; ++round) {
    const int width = 1 + random.Below(9);
    Case c{{{0}},
           {{random.Below(5)}},
           {1 + random.Below(width + 2)},
           {random.Below(4)},
           {random.Below(width + 3)},
           {}};
    for (int k = 1; k < width; ++k) {
      c.coverage[0].push_back(c.coverage[0].back() + random.Below(4));
      c.cost[0].push_back(c.cost[0].back() + random.Below(4));
    }
    c.rule = {random.Below(30) - 2, random.Below(6), 1 + random.Below(4), width,
              random.Below(2) == 0};
    const int64_t got = Choose(c)[0], usual = std::min<int64_t>(c.k0[0], width);
    const auto& coverage = c.coverage[0];
    int64_t want;
    if (c.blocks[0] <= c.k0[0] && !c.rule.tune_short) {
      want = c.k0[0];
    } else if (c.rule.tolerance == 0 || coverage[0] == coverage[width - 1]) {
      want = usual;
    } else {
      want = 0;
      int64_t least = 0;
      const int64_t end = std::max(usual, std::min<int64_t>(c.blocks[0], width));
      for (int64_t k = std::min(usual, c.rule.min_budget); k <= end; ++k) {
        if (std::abs(coverage[k - 1] - coverage[usual - 1]) > c.rule.tolerance) continue;
        if (least == 0) least = k;
        if (c.cost[0][k - 1] <= c.rule.tau_us) want = k;
      }
      if (want == 0) want = least;
    }
    EXPECT(got == want, "round %d: %d, not %d", round, static_cast<int>(got),
           static_cast<int>(want));
  }
}

Case Two() {
  return {{{0, 40, 60, 70}, {0, 30, 50, 60}},
          {{10, 20, 30, 40}, {10, 20, 30, 40}},
          {2, 2},
          {1, 1},
          {4, 4},
          {0, 100, 1, 4, false}};
}

void ExpectBudgets(const Case& c, int32_t first, int32_t second) {
  const std::vector<int32_t> got = Choose(c);
  EXPECT(got[0] == first && got[1] == second, "tau %d: %d %d, not %d %d",
         static_cast<int>(c.rule.tau_us), got[0], got[1], first, second);
}

void TestSeveral() {
  // Gains per 10 us: 40 20 10 and 30 20 10.
  const int32_t want[][2] = {{1, 1}, {1, 1}, {2, 1}, {2, 2}, {3, 2}, {3, 3}, {4, 3}, {4, 4}};
  for (int i = 0; i < 8; ++i) {
    Case c = Two();
    c.rule.tau_us = 10 * (i + 1);
    ExpectBudgets(c, want[i][0], want[i][1]);
  }
  Case heavy = Two();
  heavy.rows = {1, 2};  // 60 40 20 for the second
  heavy.rule.tau_us = 50;
  ExpectBudgets(heavy, 2, 3);
  heavy.rule.tau_us = 40;  // 40 for either: the lower position
  ExpectBudgets(heavy, 2, 2);
  heavy.rule.tau_us = 30;
  ExpectBudgets(heavy, 1, 2);
  // A step that does not fit is skipped: the other sequence's does.
  Case skip = Two();
  skip.cost[0] = {10, 22, 34, 46};
  skip.rule.tau_us = 30;
  ExpectBudgets(skip, 1, 2);
  // What costs nothing is taken, though it gains nothing.
  Case free = Two();
  free.coverage[1] = {0, 0, 1, 1};
  free.cost[1] = {10, 10, 50, 50};
  free.rule.tau_us = 20;
  ExpectBudgets(free, 1, 2);
  free.rule.tau_us = 19;  // infeasible: the least
  ExpectBudgets(free, 1, 1);
  // It comes before all that cost something, for what it leads to.
  Case behind = Two();
  behind.coverage = {{0, 10, 10, 10}, {0, 0, 90, 90}};
  behind.cost = {{10, 20, 30, 40}, {10, 10, 20, 20}};
  behind.rule.tau_us = 30;
  ExpectBudgets(behind, 1, 4);
  // A short sequence keeps what it has and pays for it.
  Case small = Two();
  small.blocks = {2, 4};
  small.rule.tau_us = 40;
  ExpectBudgets(small, 2, 2);
  small.rule.tune_short = true;
  ExpectBudgets(small, 2, 2);
  small.rule.tau_us = 30;
  ExpectBudgets(small, 2, 1);
  small.rule.tau_us = 20;
  ExpectBudgets(small, 1, 1);
}

// Products of rows, gain and cost beyond 64 bits.
void TestLargeNumbers() {
  const int64_t one = 128 * sb::kFixedOne;
  const int32_t most = std::numeric_limits<int32_t>::max();
  Case c{{{0, one - 1}, {0, one}}, {{0, most}, {0, most}}, {2, 2}, {most, most}, {3, 3},
         {most, one, 1, 2, false}};
  ExpectBudgets(c, 1, 2);
  c.coverage[0][1] = one;
  ExpectBudgets(c, 2, 1);  // equal: the lower position
  c.cost[0][1] = most - 1;
  c.coverage[0][1] = one - 50;
  ExpectBudgets(c, 2, 1);
}

}  // namespace

int main() {
  TestFixedPoint();
  TestMass();
  TestOneSequence();
  TestSeveral();
  TestLargeNumbers();
  return sb::failures == 0 ? 0 : 1;
}
