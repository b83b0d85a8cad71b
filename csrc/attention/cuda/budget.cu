#include "attention/cuda/budget.cuh"
#include "attention/cuda/launch.h"

namespace sb {
namespace cuda {

int64_t Budget(const BudgetProblem& p, const Machine& machine, int32_t* budgets, void* workspace) {
  if (p.sequences == 0) return 0;
  Carver carver(workspace);
  int64_t* coverage = carver.Take<int64_t>(p.sequences * p.max_budget);
  BudgetSequence* sequences = carver.Take<BudgetSequence>(p.sequences);
  int64_t* most = carver.Take<int64_t>(p.sequences);
  if (workspace == nullptr) return carver.bytes();
  const BudgetArguments a{p, coverage, sequences, most, budgets};
  Run("CurveKernel", CurveKernel, dim3(static_cast<unsigned>(p.sequences)), kScanThreads,
      kCurveShared, machine, a);
  Run("BudgetKernel", BudgetKernel, dim3(1), 32, 0, machine, a);
  return carver.bytes();
}

}  // namespace cuda
}  // namespace sb
