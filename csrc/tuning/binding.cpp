#include "tuning/binding.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <vector>

#include "tuning/budget.h"

namespace sb {
namespace {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Values are checked by sb_lightning/tuning/budgets.py, which alone calls this; shapes here too.
py::array_t<int32_t> Choose(const Array<double>& coverage, const Array<int32_t>& cost_us,
                            int64_t tau_us, double tolerance, const Array<int64_t>& k0,
                            int64_t min_budget, const Array<int64_t>& rows,
                            const Array<int64_t>& blocks, bool tune_short) {
  const bool fits = coverage.ndim() == 2 && cost_us.ndim() == 2 && coverage.shape(1) >= 1 &&
                    std::equal(coverage.shape(), coverage.shape() + 2, cost_us.shape());
  const py::ssize_t count = fits ? coverage.shape(0) : 0;
  if (!fits || k0.size() != count || rows.size() != count || blocks.size() != count ||
      min_budget < 1 || std::any_of(k0.data(), k0.data() + count, [](int64_t k) { return k < 1; }))
    throw py::value_error(
        "the arrays do not fit together: each sequence has a curve, its costs, k0, rows and "
        "blocks. To fix it, call sb_lightning.tuning.choose_budgets.");
  const int64_t width = coverage.shape(1);
  const BudgetRule rule{tau_us, FixedPoint(tolerance), min_budget, width, tune_short};
  py::array_t<int32_t> budgets(count);
  int32_t* to = budgets.mutable_data();
  const double* share = coverage.data();
  const int32_t* cost = cost_us.data();
  const int64_t *usual = k0.data(), *weight = rows.data(), *number = blocks.data();
  py::gil_scoped_release release;
  std::vector<int64_t> curves(static_cast<size_t>(count * width)), most(static_cast<size_t>(count));
  std::vector<BudgetSequence> sequences;
  for (int64_t n = 0; n < count; ++n) {
    int64_t* curve = curves.data() + n * width;
    int64_t highest = 0;  // a curve that falls is raised to what came before
    for (int64_t k = 0; k < width; ++k)
      curve[k] = highest = std::max(highest, FixedPoint(share[n * width + k]));
    sequences.push_back({curve, cost + n * width, usual[n], weight[n], number[n]});
  }
  ChooseBudgets(rule, sequences.data(), count, to, most.data());
  return budgets;
}

}  // namespace

void BindTuning(py::module_& m) {
  m.def("choose_budgets", &Choose, py::arg("coverage"), py::arg("cost_us"), py::arg("tau_us"),
        py::arg("tolerance"), py::arg("k0"), py::arg("min_budget"), py::arg("rows"),
        py::arg("blocks"), py::arg("tune_short"));
}

}  // namespace sb
