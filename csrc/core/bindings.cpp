// Python module `_core`: what needs no torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <string>

#include "balance/bounds.h"
#include "balance/plan.h"
#include "latency/table.h"
#include "tuning/binding.h"

namespace py = pybind11;

namespace {

using Integers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// Whole numbers only: numpy would otherwise cut fractions off without a word.
Integers AsIntegers(const py::object& given, const char* name) {
  const py::array values = py::array::ensure(given);
  if (!values) {
    PyErr_Clear();
    throw py::type_error(std::string(name) +
                         " is not a list of numbers: each sequence has one. To fix it, pass whole "
                         "numbers, as a list or an array.");
  }
  const char kind = values.dtype().kind();
  if (values.size() > 0 && kind != 'i' && kind != 'u')
    throw py::type_error(std::string(name) +
                         " holds other things than integers: tokens and blocks are counted. To fix "
                         "it, pass whole numbers, as a list or an array.");
  if (values.ndim() > 1)
    throw py::value_error(
        std::string(name) + " has " + std::to_string(values.ndim()) +
        " dimensions: it holds one number per sequence. To fix it, pass a flat list.");
  return Integers(values);
}

// Lengths and budgets of the same number of sequences; a single budget serves all.
struct Sequences {
  Integers lengths, budgets;
  int64_t count;

  Sequences(const py::object& given_lengths, const py::object& given_budgets)
      : lengths(AsIntegers(given_lengths, "lengths")),
        budgets(AsIntegers(given_budgets, "budgets")),
        count(lengths.size()) {
    if (budgets.ndim() == 0) {
      Integers all(count);
      std::fill_n(all.mutable_data(), count, *budgets.data());
      budgets = all;
    }
    if (budgets.size() != count)
      throw py::value_error(std::to_string(budgets.size()) + " budgets for " +
                            std::to_string(count) +
                            " lengths: each sequence has exactly one budget. To fix it, pass one "
                            "budget for all, or as many budgets as lengths.");
  }
};

py::array_t<double> PredictMany(const sb::LatencyTable& table, const py::object& lengths,
                                const py::object& budgets) {
  const Sequences s(lengths, budgets);
  py::array_t<double> out(s.count);
  const int64_t *l = s.lengths.data(), *k = s.budgets.data();
  double* to = out.mutable_data();
  py::gil_scoped_release release;
  table.PredictMany(l, k, s.count, to);
  return out;
}

py::array_t<int64_t> PredictManyUs(const sb::LatencyTable& table, const py::object& lengths,
                                   const py::object& budgets) {
  const py::array_t<double> ms = PredictMany(table, lengths, budgets);
  py::array_t<int64_t> out(ms.size());
  for (py::ssize_t i = 0; i < ms.size(); ++i)
    out.mutable_data()[i] = sb::WholeMicroseconds(ms.data()[i]);
  return out;
}

double MicroBatchMs(const sb::LatencyTable& table, const py::object& lengths,
                    const py::object& budgets) {
  const Sequences s(lengths, budgets);
  const int64_t *l = s.lengths.data(), *k = s.budgets.data();
  py::gil_scoped_release release;
  return table.MicroBatchMs(l, k, s.count);
}

py::array_t<int32_t> CostUs(const sb::LatencyTable& table, int64_t length, int64_t max_budget) {
  if (max_budget > (int64_t{1} << 24))
    throw py::value_error(
        "max_budget is " + std::to_string(max_budget) +
        ": a row of costs has at most 16777216 budgets. To fix it, pass the largest "
        "budget that can be chosen.");
  py::array_t<int32_t> out(max_budget > 0 ? max_budget : 0);
  int32_t* to = out.mutable_data();
  py::gil_scoped_release release;
  table.CostUs(length, max_budget, to);
  return out;
}

// Nanoseconds per call of a loop that stays in C++, for the benchmark.
double TimeCalls(const sb::LatencyTable& table, const std::string& call, const py::object& lengths,
                 const py::object& budgets, int64_t rounds) {
  const Sequences s(lengths, budgets);
  const int64_t *l = s.lengths.data(), *k = s.budgets.data();
  py::gil_scoped_release release;
  const bool predict = call == "predict";
  std::vector<double> times(static_cast<size_t>(s.count));
  table.PredictMany(l, k, s.count, times.data());
  double sum = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t i = 0; i < s.count; ++i)
      sum += predict ? table.Predict(l[i], k[i])
                     : static_cast<double>(table.BudgetWithin(l[i], times[i]));
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  // The sum is used, so that nothing is left out.
  return spent.count() / static_cast<double>(rounds * s.count) + (sum < 0 ? 1.0 : 0.0);
}

sb::balance::Problem AsProblem(const Integers& costs, const Integers& tokens, int ranks,
                               int accumulate, int64_t max_tokens, bool equal_counts) {
  return {{costs.data(), costs.data() + costs.size()},
          {tokens.data(), tokens.data() + tokens.size()},
          ranks,
          accumulate,
          max_tokens,
          equal_counts};
}

// What sb_lightning/balance/reference/__init__.py describes; its caller has checked the arguments.
py::tuple PlanCells(const Integers& costs, const Integers& tokens, int ranks, int accumulate,
                    bool is_fsdp, int64_t max_tokens, bool equal_counts, int64_t node_limit) {
  const sb::balance::Problem problem =
      AsProblem(costs, tokens, ranks, accumulate, max_tokens, equal_counts);
  if (problem.costs.size() != problem.tokens.size() || ranks < 1 || accumulate < 1 ||
      problem.costs.size() / static_cast<size_t>(ranks) < static_cast<size_t>(accumulate))
    throw py::value_error(
        "fewer items than cells: no cell may be empty. To fix it, call plan_window.");
  sb::balance::Plan plan;
  {
    py::gil_scoped_release release;
    plan = is_fsdp ? sb::balance::PlanFsdp(problem, node_limit)
                   : sb::balance::PlanDdp(problem, node_limit);
  }
  py::array_t<int64_t> items(plan.rows.empty() ? 0 : problem.size());
  py::array_t<int64_t> counts(plan.rows.empty() ? 0 : problem.num_cells());
  int64_t *item = items.mutable_data(), *count = counts.mutable_data();
  for (const auto& row : plan.rows)
    for (const auto& cell : row) {
      item = std::copy(cell.begin(), cell.end(), item);
      *count++ = static_cast<int64_t>(cell.size());
    }
  return py::make_tuple(items, counts, plan.finished);
}

int64_t LowerBoundUs(const Integers& costs, int ranks, int accumulate, bool is_fsdp,
                     bool equal_counts) {
  const sb::balance::Problem problem =
      AsProblem(costs, costs, ranks, accumulate, sb::balance::kNoCap, equal_counts);
  return is_fsdp ? sb::balance::FsdpBound(problem) : sb::balance::DdpBound(problem);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "What sb_lightning computes in C++ without torch.";
  // sb_lightning/latency/engine.py asks for this number.
  m.attr("SCHEMA_VERSION") = 2;

  sb::BindTuning(m);

  m.def("plan_cells", &PlanCells, py::arg("costs"), py::arg("tokens"), py::arg("ranks"),
        py::arg("accumulate"), py::arg("is_fsdp"), py::arg("max_tokens"), py::arg("equal_counts"),
        py::arg("node_limit"));
  m.def("lower_bound_us", &LowerBoundUs, py::arg("costs"), py::arg("ranks"), py::arg("accumulate"),
        py::arg("is_fsdp"), py::arg("equal_counts"));

  // Single look-ups keep the GIL: they take less time than giving it back and asking for it again.
  using sb::LatencyTable;
  py::class_<LatencyTable>(m, "LatencyTable")
      .def(py::init([](int64_t block_size, int64_t layers, int64_t dense_layers, double fixed_ms,
                       std::vector<int64_t> lengths, std::vector<std::vector<int64_t>> budgets,
                       const std::vector<std::vector<std::vector<double>>>& sparse,
                       const std::vector<std::vector<double>>& dense,
                       const std::vector<std::vector<double>>& rest,
                       const std::vector<std::vector<double>>& outside) {
             const auto curve = [](const std::vector<std::vector<double>>& passes) {
               return passes.size() == 2 ? sb::Curve{passes[0], passes[1]} : sb::Curve{};
             };
             sb::Measurements given;
             given.block_size = block_size;
             given.layers = layers;
             given.dense_layers = dense_layers;
             given.micro_batch_ms = fixed_ms;
             given.lengths = std::move(lengths);
             given.budgets = std::move(budgets);
             for (const auto& row : sparse) given.sparse.push_back(curve(row));
             given.dense = curve(dense);
             given.rest = curve(rest);
             given.outside = curve(outside);
             py::gil_scoped_release release;
             return std::make_unique<LatencyTable>(given);
           }),
           py::arg("block_size"), py::arg("layers"), py::arg("dense_layers"), py::arg("fixed_ms"),
           py::arg("lengths"), py::arg("budgets"), py::arg("sparse"), py::arg("dense"),
           py::arg("rest"), py::arg("outside"))
      .def("predict", &LatencyTable::Predict, py::arg("length"), py::arg("budget"))
      .def("predict_us", &LatencyTable::PredictUs, py::arg("length"), py::arg("budget"))
      .def("predict_passes", &LatencyTable::PredictPasses, py::arg("length"), py::arg("budget"))
      .def("predict_many", &PredictMany, py::arg("lengths"), py::arg("budgets"))
      .def("predict_many_us", &PredictManyUs, py::arg("lengths"), py::arg("budgets"))
      .def("attention_ms", &LatencyTable::AttentionMs, py::arg("length"), py::arg("budget"))
      .def("attention_passes", &LatencyTable::AttentionPasses, py::arg("length"), py::arg("budget"))
      .def("budget_within", &LatencyTable::BudgetWithin, py::arg("length"), py::arg("ms"))
      .def("micro_batch_ms", &MicroBatchMs, py::arg("lengths"), py::arg("budgets"))
      .def("cost_us", &CostUs, py::arg("length"), py::arg("max_budget"))
      .def("scaled", &LatencyTable::Scaled, py::arg("log2_lengths"), py::arg("log2_factors"),
           py::call_guard<py::gil_scoped_release>())
      .def("_time_calls", &TimeCalls, py::arg("call"), py::arg("lengths"), py::arg("budgets"),
           py::arg("rounds"))
      .def_property_readonly("block_size", &LatencyTable::block_size)
      .def_property_readonly("layers", &LatencyTable::layers)
      .def_property_readonly("dense_layers", &LatencyTable::dense_layers)
      .def_property_readonly("fixed_ms", &LatencyTable::fixed_ms)
      .def_property_readonly("correction", &LatencyTable::correction)
      .def_property_readonly("mean_correction", &LatencyTable::mean_correction)
      .def_property_readonly("extrapolated", &LatencyTable::extrapolated);
}
