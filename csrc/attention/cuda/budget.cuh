// The choice of budgets: the lines of tuning/budget.h, so that the GPU chooses what the CPU does.
#pragma once

#include "attention/cuda/attention.h"
#include "attention/cuda/scan.cuh"
#include "tuning/budget.h"
#include "tuning/sampling.h"

namespace sb {
namespace cuda {

constexpr int kCurveShared = kScanWarps * 8;

struct BudgetArguments {
  BudgetProblem p;
  int64_t* coverage;          // [sequences, max_budget]
  BudgetSequence* sequences;  // [sequences]
  int64_t* most;              // [sequences]
  int32_t* budgets;           // [sequences]
};

// Grid: sequences.
__global__ void __launch_bounds__(kScanThreads) CurveKernel(BudgetArguments a) {
  SB_SHARED(shared);
  int64_t* sums = reinterpret_cast<int64_t*>(shared);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t n = blockIdx.x, max_budget = a.p.max_budget;
  const float* mass = a.p.mass + n * a.p.heads * a.p.ranks;
  int64_t* curve = a.coverage + n * max_budget;
  int64_t so_far = 0;
  for (int64_t first = 0; first < max_budget; first += kScanThreads) {
    const int64_t k = first + tid;
    const bool some = k > 0 && k < max_budget;
    const int64_t sum =
        ScanBlock(some ? MassOfRank(mass, a.p.heads, a.p.ranks, k - 1) : 0, sums, &so_far);
    if (k < max_budget) curve[k] = sum;
  }
  // What the CPU refuses must do no harm: k0 below 1.
  const int64_t k0 = a.p.k0[a.p.one_k0 ? 0 : n];
  BudgetSequence s{curve, a.p.cost_us + n * max_budget, k0 < 1 ? 1 : k0, 1, kManyBlocks};
  if (a.p.cu_seqlens != nullptr) {
    const int64_t length = static_cast<int64_t>(a.p.cu_seqlens[n + 1]) - a.p.cu_seqlens[n];
    s.blocks = (length + a.p.block_size - 1) / a.p.block_size;
    int64_t own = 0;
    for (int64_t b = 1 + tid; b < s.blocks; b += kScanThreads)
      own += SampledRowsOfBlock(b, length, a.p.block_size, a.p.row_stride);
    s.rows = 0;
    ScanBlock(own, sums, &s.rows);
  }
  if (tid == 0) a.sequences[n] = s;
}

// A warp.
struct Warp {
  SB_DEVICE int64_t First() const { return static_cast<int64_t>(threadIdx.x); }
  SB_DEVICE int64_t Size() const { return 32; }
  SB_DEVICE int64_t Sum(int64_t mine) const {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) mine += __shfl_xor_sync(kAllLanes, mine, by);
    return mine;
  }
  SB_DEVICE void TakeBest(int64_t* best, BudgetStep* step) const {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
      const uint64_t low = static_cast<uint64_t>(step->gain);
      const int64_t high = static_cast<int64_t>(step->gain >> 64);
      const int64_t other = __shfl_xor_sync(kAllLanes, *best, by);
      const uint64_t other_low = __shfl_xor_sync(kAllLanes, low, by);
      const int64_t other_high = __shfl_xor_sync(kAllLanes, high, by);
      const BudgetStep theirs{
          static_cast<__int128>(other_high) * (static_cast<__int128>(1) << 64) + other_low,
          __shfl_xor_sync(kAllLanes, step->cost, by)};
      const bool take = other >= 0 && (*best < 0 || IsBetter(theirs, *step) ||
                                       (other < *best && !IsBetter(*step, theirs)));
      if (take) {
        *best = other;
        *step = theirs;
      }
    }
  }
};

// One warp.
__global__ void __launch_bounds__(32) BudgetKernel(BudgetArguments a) {
  const BudgetRule rule{*a.p.tau_us, FixedPoint(*a.p.tolerance) * a.p.heads, a.p.min_budget,
                        a.p.max_budget, a.p.tune_short};
  ChooseBudgets(rule, a.sequences, a.p.sequences, a.budgets, a.most, Warp());
}

}  // namespace cuda
}  // namespace sb
