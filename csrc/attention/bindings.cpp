// The ops of namespace `sb`, on LibTorch's stable ABI: one build runs on every torch from 2.11 on.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "attention/arguments.h"
#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"

// The Python package looks for this text in the file before it loads it: extension.py holds the
// number it needs. Raise both when a schema below changes.
#define SB_SCHEMA_VERSION "2"
extern "C" __attribute__((used, visibility("default"))) const char sb_lightning_attention_schema[] =
    "sb_lightning attention schema " SB_SCHEMA_VERSION ";";

namespace {

Tensor Select(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, const Tensor& budget,
              int64_t block_size, int64_t max_seqlen, int64_t max_budget) {
  const Packed packed = Pack(q, k, cu_seqlens, budget, block_size, max_budget, max_seqlen);
  const Tensor selection = Empty(q, {q.size(1), q.size(0), max_budget - 1}, ScalarType::Short);
  const Tensor qr = Readable(q), kr = Readable(k);
  sb::Select(packed.problem, ViewOf(qr), ViewOf(kr), Mutable<int16_t>(selection));
  return selection;
}

std::tuple<Tensor, Tensor> Index(const Tensor& selection, const Tensor& cu_seqlens,
                                 const Tensor& budget, int64_t block_size, int64_t group) {
  const Tensor chosen = Contiguous(selection, ScalarType::Short, "selection");
  if (chosen.dim() != 3)
    Refuse("selection has shape " + Shape(chosen), "it has three dimensions",
           "pass moba_select's result");
  if (group < 1)
    Refuse("group is " + std::to_string(group), "a KV head serves at least one query head",
           "pass group >= 1");
  const int64_t heads = chosen.size(0), tokens = chosen.size(1), width = chosen.size(2);
  if (heads % group != 0)
    Refuse("group is " + std::to_string(group) + " and selection has " + std::to_string(heads) +
               " heads",
           "every KV head serves the same number of query heads", "pass query heads / KV heads");
  const Packed packed(cu_seqlens, budget, tokens, heads, heads / group, block_size, width + 1, -1);
  const int64_t capacity =
      sb::ListCapacity(tokens, packed.problem.sequences, heads / group, block_size);
  const Tensor lists = Empty(chosen, {capacity + 1}, ScalarType::Long);
  const Tensor rows = Empty(chosen, {tokens * heads * width}, ScalarType::Int);
  sb::Index(packed.problem, Data<int16_t>(chosen), Mutable<int64_t>(lists), Mutable<int32_t>(rows));
  // What no list uses: so that two calls give the same tensor.
  const int64_t used = Data<int64_t>(lists)[capacity];
  std::fill(Mutable<int32_t>(rows) + used, Mutable<int32_t>(rows) + rows.numel(), -1);
  return {lists, rows};
}

std::tuple<Tensor, Tensor> RunForward(const Problem& p, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const int64_t* lists, const int32_t* rows) {
  CheckShape(v, "v", {k.size(0), k.size(1), k.size(2)});
  if (v.scalar_type() != q.scalar_type())
    Refuse("q and v differ in dtype", "the kernels take one dtype",
           "convert q, k and v to the same dtype");
  const Tensor out = Empty(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  const Tensor lse = Empty(q, {q.size(1), q.size(0)}, ScalarType::Float);
  const Tensor qr = Readable(q), kr = Readable(k), vr = Readable(v);
  sb::Forward(p, ViewOf(qr), ViewOf(kr), ViewOf(vr), lists, rows, out.data_ptr(),
              Mutable<float>(lse));
  return {out, lse};
}

void CheckSelection(const Tensor& selection, const Tensor& q) {
  if (selection.dim() != 3 || selection.size(0) != q.size(1) || selection.size(1) != q.size(0))
    Refuse("selection has shape " + Shape(selection), "q has shape " + Shape(q),
           "pass [query_heads, tokens, max_budget - 1]");
}

std::tuple<Tensor, Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& selection, const Tensor& list_ptr,
                                   const Tensor& list_rows, const Tensor& cu_seqlens,
                                   const Tensor& budget, int64_t block_size, int64_t max_seqlen,
                                   double scale) {
  CheckSelection(selection, q);
  Packed packed = Pack(q, k, cu_seqlens, budget, block_size, selection.size(2) + 1, max_seqlen);
  packed.problem.scale = static_cast<float>(scale);
  const Lists lists(list_ptr, list_rows, packed.problem);
  return RunForward(packed.problem, q, k, v, Data<int64_t>(lists.bounds),
                    Data<int32_t>(lists.rows));
}

std::tuple<Tensor, Tensor, Tensor> Backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& selection,
    const Tensor& list_ptr, const Tensor& list_rows, const Tensor& cu_seqlens, const Tensor& budget,
    int64_t block_size, int64_t max_seqlen, double scale, bool /*deterministic: always*/) {
  CheckSelection(selection, q);
  Packed packed = Pack(q, k, cu_seqlens, budget, block_size, selection.size(2) + 1, max_seqlen);
  Problem& p = packed.problem;
  p.scale = static_cast<float>(scale);
  CheckShape(v, "v", {k.size(0), k.size(1), k.size(2)});
  CheckShape(out, "out", {q.size(0), q.size(1), q.size(2)});
  CheckShape(dout, "dout", {q.size(0), q.size(1), q.size(2)});
  CheckShape(lse, "lse", {q.size(1), q.size(0)});
  for (const Tensor* x : {&v, &out, &dout})
    if (x->scalar_type() != q.scalar_type())
      Refuse("v, out or dout differs from q in dtype", "the kernels take one dtype",
             "convert them to the dtype of q");
  const Lists lists(list_ptr, list_rows, p);
  const Tensor sums = Contiguous(lse, ScalarType::Float, "lse");
  std::optional<Tensor> dsums;
  if (dlse.has_value()) {
    CheckShape(*dlse, "dlse", {q.size(1), q.size(0)});
    dsums = Contiguous(*dlse, ScalarType::Float, "dlse");
  }
  const Tensor dq = Empty(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  const Tensor dk = Empty(k, {k.size(0), k.size(1), k.size(2)}, q.scalar_type());
  const Tensor dv = Empty(k, {k.size(0), k.size(1), k.size(2)}, q.scalar_type());
  const Tensor dr = Readable(dout), qr = Readable(q), kr = Readable(k), vr = Readable(v),
               our = Readable(out);
  sb::Backward(p, ViewOf(dr), ViewOf(qr), ViewOf(kr), ViewOf(vr), ViewOf(our), Data<float>(sums),
               dsums.has_value() ? Data<float>(*dsums) : nullptr, Data<int64_t>(lists.bounds),
               Data<int32_t>(lists.rows), {dq.data_ptr(), dk.data_ptr(), dv.data_ptr()});
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& cu_seqlens, const Tensor& budget,
                                             int64_t block_size, int64_t max_seqlen,
                                             int64_t max_budget, double scale,
                                             bool /*deterministic: always*/) {
  Packed packed = Pack(q, k, cu_seqlens, budget, block_size, max_budget, max_seqlen);
  Problem& p = packed.problem;
  p.scale = static_cast<float>(scale);
  const Tensor selection = Empty(q, {q.size(1), q.size(0), max_budget - 1}, ScalarType::Short);
  const Tensor qr = Readable(q), kr = Readable(k);
  sb::Select(p, ViewOf(qr), ViewOf(kr), Mutable<int16_t>(selection));
  const Tensor lists = Empty(
      q, {sb::ListCapacity(p.tokens, p.sequences, p.kv_heads, block_size) + 1}, ScalarType::Long);
  const Tensor rows = Empty(q, {p.tokens * p.query_heads * (max_budget - 1)}, ScalarType::Int);
  sb::Index(p, Data<int16_t>(selection), Mutable<int64_t>(lists), Mutable<int32_t>(rows));
  auto [out, lse] = RunForward(p, qr, kr, v, Data<int64_t>(lists), Data<int32_t>(rows));
  return {out, lse, selection};
}

std::string CpuIsa() { return sb::Kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY(sb, m) {
  m.def("cpu_isa() -> str");
  m.def(
      "moba_select(Tensor q, Tensor k, Tensor cu_seqlens, Tensor budget, int block_size, SymInt "
      "max_seqlen, "
      "SymInt max_budget) -> Tensor");
  m.def(
      "moba_index(Tensor selection, Tensor cu_seqlens, Tensor budget, int block_size, int group) "
      "-> (Tensor, Tensor)");
  m.def(
      "moba_forward(Tensor q, Tensor k, Tensor v, Tensor selection, Tensor list_ptr, Tensor "
      "list_rows, "
      "Tensor cu_seqlens, Tensor budget, int block_size, SymInt max_seqlen, float scale) -> "
      "(Tensor, Tensor)");
  m.def(
      "moba_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, "
      "Tensor selection, Tensor list_ptr, Tensor list_rows, Tensor cu_seqlens, Tensor budget, int "
      "block_size, "
      "SymInt max_seqlen, float scale, bool deterministic) -> (Tensor, Tensor, Tensor)");
  m.def(
      "moba_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor budget, int "
      "block_size, "
      "SymInt max_seqlen, SymInt max_budget, float scale, bool deterministic) -> (Tensor, Tensor, "
      "Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sb, CPU, m) {
  m.impl("moba_select", TORCH_BOX(&Select));
  m.impl("moba_index", TORCH_BOX(&Index));
  m.impl("moba_forward", TORCH_BOX(&Forward));
  m.impl("moba_backward", TORCH_BOX(&Backward));
  m.impl("moba_attention", TORCH_BOX(&Attention));
}

STABLE_TORCH_LIBRARY_IMPL(sb, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&CpuIsa));
}

// Importing the module is enough: the ops above register when the library is loaded.
PyMODINIT_FUNC PyInit__attention(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_attention",
                               "Attention kernels (registers the ops of sb).",
                               -1,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
