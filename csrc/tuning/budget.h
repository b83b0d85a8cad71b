// The choice of attention budgets for one micro-batch and one layer.
//
// Whole numbers only: what is not is rounded once, before anything is compared, so that every
// processor chooses alike. No containers: the CPU and the GPU run these same lines.
#pragma once

#include <cstdint>

#include "tuning/both.h"

namespace sb {

constexpr int64_t kFixedOne = int64_t{1} << 30;
constexpr int64_t kManyBlocks = (int64_t{1} << 31) - 1;  // where a length is not known

// A share in units of 2^-30, the nearest; NaN counts as 0. The product and the sum are exact.
SB_BOTH inline int64_t FixedPoint(double share) {
  if (!(share > 0)) return 0;
  if (share >= 1) return kFixedOne;
  return static_cast<int64_t>(share * static_cast<double>(kFixedOne) + 0.5);
}

struct BudgetRule {
  int64_t tau_us;      // what the micro-batch may take
  int64_t tolerance;   // in the units of the coverage curves; 0: nothing is tuned
  int64_t min_budget;  // at least 1
  int64_t max_budget;  // entries of each curve
  bool tune_short;     // also cut sequences that k0 covers whole
};

struct BudgetSequence {
  const int64_t* coverage;  // [max_budget], never falling
  const int32_t* cost_us;   // [max_budget], never falling
  int64_t k0;
  int64_t rows;    // weight of its coverage
  int64_t blocks;  // in the sequence
};

// The mass of one rank over all heads, in units of 2^-30 / heads; mass[heads, ranks].
SB_BOTH inline int64_t MassOfRank(const float* mass, int64_t heads, int64_t ranks, int64_t rank) {
  int64_t sum = 0;
  for (int64_t h = 0; h < heads; ++h) sum += FixedPoint(mass[h * ranks + rank]);
  return sum;
}

// coverage[k - 1] = the sum of the first k - 1 masses over all heads, in units of 2^-30 / heads.
inline void CoverageOfMass(const float* mass, int64_t heads, int64_t ranks, int64_t max_budget,
                           int64_t* coverage) {
  int64_t sum = 0;
  for (int64_t k = 0; k < max_budget; ++k) {
    if (k > 0) sum += MassOfRank(mass, heads, ranks, k - 1);
    coverage[k] = sum;
  }
}

struct AllowedBudgets {
  int64_t least, most;
};

// The budgets that keep the coverage within the tolerance; k0 is one of them.
SB_BOTH inline AllowedBudgets Allowed(const BudgetRule& rule, const BudgetSequence& s) {
  const int64_t end = rule.max_budget, k0 = s.k0 < end ? s.k0 : end;
  const bool is_short = s.blocks <= s.k0;
  if (is_short && !rule.tune_short) return {s.k0, s.k0};
  if (rule.tolerance <= 0 || s.coverage[0] == s.coverage[end - 1]) return {k0, k0};
  const int64_t whole = s.blocks < end ? s.blocks : end, highest = whole > k0 ? whole : k0;
  const int64_t at_k0 = s.coverage[k0 - 1];
  // By bisection, as a curve never falls.
  int64_t least = k0, below = (rule.min_budget < k0 ? rule.min_budget : k0) - 1;
  while (least - below > 1) {
    const int64_t k = below + (least - below) / 2;
    (at_k0 - s.coverage[k - 1] <= rule.tolerance ? least : below) = k;
  }
  int64_t most = k0, above = highest + 1;
  while (above - most > 1) {
    const int64_t k = most + (above - most) / 2;
    (s.coverage[k - 1] - at_k0 <= rule.tolerance ? most : above) = k;
  }
  return {least, most};
}

// The largest allowed budget within tau, or the least.
SB_BOTH inline int64_t LargestWithin(const BudgetRule& rule, const BudgetSequence& s) {
  const AllowedBudgets allowed = Allowed(rule, s);
  // By bisection, as costs never fall.
  int64_t largest = allowed.least, above = allowed.most + 1;
  while (above - largest > 1) {
    const int64_t k = largest + (above - largest) / 2;
    (s.cost_us[k - 1] <= rule.tau_us ? largest : above) = k;
  }
  return largest;
}

// One more block for one sequence.
struct BudgetStep {
  __int128 gain;
  int64_t cost;
};

// More coverage per time; a step that costs nothing comes before all that cost something.
SB_BOTH inline bool IsBetter(const BudgetStep& a, const BudgetStep& b) {
  if (a.cost <= 0 || b.cost <= 0) return a.cost <= 0 && b.cost > 0;
  return a.gain * b.cost > b.gain * a.cost;
}

// Who chooses: member `First` of a team of `Size`, each with every Size-th sequence. Here one does
// all, and what a member found is what the team found.
struct Alone {
  SB_BOTH int64_t First() const { return 0; }
  SB_BOTH int64_t Size() const { return 1; }
  SB_BOTH int64_t Sum(int64_t mine) const { return mine; }
  // The best step of all, and of equal ones that of the lower position; position -1: none.
  SB_BOTH void TakeBest(int64_t*, BudgetStep*) const {}
};

// All sequences start at their least allowed budget. The step with the most rows x coverage per
// time is taken if the sum of costs stays within tau, and otherwise ends its sequence; of equal
// ones that of the lower position. For one sequence that comes to the largest allowed budget within
// tau, or the least. `most` [count] is scratch. Members of a team call it together.
template <class Team = Alone>
SB_BOTH void ChooseBudgets(const BudgetRule& rule, const BudgetSequence* sequences, int64_t count,
                           int32_t* budgets, int64_t* most, const Team& team = Team()) {
  if (count == 1) {
    if (team.First() == 0) budgets[0] = static_cast<int32_t>(LargestWithin(rule, sequences[0]));
    return;
  }
  int64_t mine = 0;
  for (int64_t i = team.First(); i < count; i += team.Size()) {
    const AllowedBudgets allowed = Allowed(rule, sequences[i]);
    budgets[i] = static_cast<int32_t>(allowed.least);
    most[i] = allowed.most;
    const int64_t k = allowed.least < rule.max_budget ? allowed.least : rule.max_budget;
    mine += sequences[i].cost_us[k - 1];
  }
  int64_t total = team.Sum(mine);
  while (true) {
    int64_t best = -1;
    BudgetStep best_step{};
    for (int64_t i = team.First(); i < count; i += team.Size()) {
      const int64_t k = budgets[i];
      if (k >= most[i]) continue;
      const BudgetSequence& s = sequences[i];
      const BudgetStep step{static_cast<__int128>(s.rows) * (s.coverage[k] - s.coverage[k - 1]),
                            static_cast<int64_t>(s.cost_us[k]) - s.cost_us[k - 1]};
      if (best >= 0 && !IsBetter(step, best_step)) continue;
      best = i;
      best_step = step;
    }
    team.TakeBest(&best, &best_step);
    if (best < 0) return;
    const bool fits = total + best_step.cost <= rule.tau_us;
    if (fits) total += best_step.cost;
    if (best % team.Size() != team.First()) continue;
    if (fits)
      ++budgets[best];
    else
      most[best] = budgets[best];
  }
}

}  // namespace sb
