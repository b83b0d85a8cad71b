// The ops of namespace `sb`, on LibTorch's stable ABI: one build runs on every torch from 2.11 on.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"

// The Python package looks for this text in the file before it loads it: library.py holds the
// number it needs. Raise both when a schema below changes.
#define SB_SCHEMA_VERSION "1"
extern "C" __attribute__((used, visibility("default"))) const char sb_lightning_attention_schema[] =
    "sb_lightning attention schema " SB_SCHEMA_VERSION ";";

namespace {

using sb::Problem;
using sb::View;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void Refuse(const std::string& found, const std::string& why,
                         const std::string& change) {
  throw std::runtime_error(found + ": " + why + ". To fix it, " + change + ".");
}

std::string Shape(const Tensor& x) {
  std::string text = "[";
  for (int64_t i = 0; i < x.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(x.size(i));
  return text + "]";
}

sb::Dtype DtypeOf(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return sb::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return sb::Dtype::kBfloat16;
    case ScalarType::Half:
      return sb::Dtype::kFloat16;
    default:
      Refuse(std::string(name) + " has an unsupported dtype",
             "the kernels run float32, bfloat16 and float16", "convert q, k and v to one of them");
  }
}

void CheckShape(const Tensor& x, const char* name, std::initializer_list<int64_t> sizes) {
  bool same = x.dim() == static_cast<int64_t>(sizes.size());
  std::string want = "[";
  int64_t i = 0;
  for (const int64_t size : sizes) {
    same = same && x.size(i) == size;
    want += (i++ == 0 ? "" : ", ") + std::to_string(size);
  }
  if (!same)
    Refuse(std::string(name) + " has shape " + Shape(x),
           "the other arguments make it " + want + "]",
           std::string("pass ") + name + " of that shape");
}

Tensor Contiguous(const Tensor& x, ScalarType type, const char* name) {
  if (!x.is_cpu()) Refuse(std::string(name) + " is not on the CPU", "q is", "move it there");
  if (x.scalar_type() != type)
    Refuse(std::string(name) + " has the wrong dtype", "this op reads it as fixed by its schema",
           std::string("convert ") + name);
  return torch::stable::contiguous(x);
}

// A [tokens, heads, D] tensor that the kernels can read: a copy only if the last dimension is not
// contiguous.
Tensor Readable(const Tensor& x) {
  return x.stride(2) == 1 || x.size(2) == 1 ? x : torch::stable::contiguous(x);
}
View ViewOf(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1)}; }

template <class T>
const T* Data(const Tensor& x) {
  return static_cast<const T*>(x.data_ptr());
}
template <class T>
T* Mutable(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

Tensor Empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(
      like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}

// Keeps the integer tensors alive that the problem points to.
struct Packed {
  Packed(const Tensor& cu, const Tensor& k, int64_t tokens, int64_t query_heads, int64_t kv_heads,
         int64_t block_size, int64_t max_budget, int64_t max_seqlen)
      : cu_seqlens(Contiguous(cu, ScalarType::Int, "cu_seqlens")),
        budget(Contiguous(k, ScalarType::Int, "budget")) {
    if (cu_seqlens.dim() != 1 || cu_seqlens.numel() < 1)
      Refuse("cu_seqlens has shape " + Shape(cu), "it holds the sequence bounds",
             "pass [sequences + 1]");
    if (block_size < 16 || block_size % 16 != 0)
      Refuse("block_size is " + std::to_string(block_size), "the kernels work in steps of 16 keys",
             "pass a positive multiple of 16");
    if (kv_heads < 1 || query_heads < 1 || query_heads % kv_heads != 0)
      Refuse(
          "q has " + std::to_string(query_heads) + " heads and k has " + std::to_string(kv_heads),
          "every KV head serves the same number of query heads",
          "make the heads of q a multiple of those of k");
    if (max_budget < 1)
      Refuse("max_budget is " + std::to_string(max_budget), "every budget is at least 1",
             "pass max_budget >= 1");
    problem.tokens = tokens;
    problem.query_heads = query_heads;
    problem.kv_heads = kv_heads;
    problem.sequences = cu_seqlens.numel() - 1;
    problem.block_size = block_size;
    problem.max_budget = max_budget;
    problem.cu_seqlens = Data<int32_t>(cu_seqlens);
    problem.budget = Data<int32_t>(budget);
    problem.threads = sb::SafeThreads(static_cast<int>(torch::stable::get_num_threads()));
    static const bool poison = std::getenv("SB_POISON_SCRATCH") != nullptr;
    problem.poison = poison;
    CheckShape(budget, "budget", {problem.sequences, query_heads});
    sb::Check(problem, max_seqlen);
  }
  Tensor cu_seqlens, budget;
  Problem problem{};
};

Packed Pack(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, const Tensor& budget,
            int64_t block_size, int64_t max_budget, int64_t max_seqlen) {
  if (q.dim() != 3 || k.dim() != 3)
    Refuse("q has shape " + Shape(q) + " and k " + Shape(k), "they are packed sequences",
           "pass [tokens, heads, head_dim]");
  const int64_t D = q.size(2);
  if (D != 32 && D != 64 && D != 128)
    Refuse("head_dim is " + std::to_string(D), "the kernels are built for 32, 64 and 128",
           "use one of those");
  CheckShape(k, "k", {q.size(0), k.size(1), D});
  if (!q.is_cpu() || !k.is_cpu())
    Refuse("q or k is not on the CPU", "this is the CPU kernel", "move them there");
  if (k.scalar_type() != q.scalar_type())
    Refuse("q and k differ in dtype", "the kernels take one dtype",
           "convert q, k and v to the same dtype");
  Packed packed(cu_seqlens, budget, q.size(0), q.size(1), k.size(1), block_size, max_budget,
                max_seqlen);
  packed.problem.head_dim = D;
  packed.problem.dtype = DtypeOf(q, "q");
  return packed;
}

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
  return {lists, rows};
}

// The index as the kernels read it, checked so far that a wrong one cannot send them outside the
// rows.
struct Lists {
  Lists(const Tensor& list_ptr, const Tensor& list_rows, const Problem& p)
      : bounds(Contiguous(list_ptr, ScalarType::Long, "list_ptr")),
        rows(Contiguous(list_rows, ScalarType::Int, "list_rows")) {
    const int64_t capacity = sb::ListCapacity(p.tokens, p.sequences, p.kv_heads, p.block_size);
    CheckShape(bounds, "list_ptr", {capacity + 1});
    const int64_t* b = Data<int64_t>(bounds);
    bool fine = b[0] == 0 && b[capacity] <= rows.numel();
    for (int64_t i = 0; i < capacity; ++i) fine = fine && b[i] <= b[i + 1];
    if (!fine)
      Refuse("list_ptr is not ascending from 0 within list_rows", "it bounds the lists of rows",
             "pass what moba_index returns for the same arguments");
  }
  Tensor bounds, rows;
};

std::tuple<Tensor, Tensor> RunForward(const Problem& p, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& list_ptr,
                                      const Tensor& list_rows) {
  CheckShape(v, "v", {k.size(0), k.size(1), k.size(2)});
  if (v.scalar_type() != q.scalar_type())
    Refuse("q and v differ in dtype", "the kernels take one dtype",
           "convert q, k and v to the same dtype");
  const Lists lists(list_ptr, list_rows, p);
  const Tensor out = Empty(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  const Tensor lse = Empty(q, {q.size(1), q.size(0)}, ScalarType::Float);
  const Tensor qr = Readable(q), kr = Readable(k), vr = Readable(v);
  sb::Forward(p, ViewOf(qr), ViewOf(kr), ViewOf(vr), Data<int64_t>(lists.bounds),
              Data<int32_t>(lists.rows), out.data_ptr(), Mutable<float>(lse));
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
  return RunForward(packed.problem, q, k, v, list_ptr, list_rows);
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
  auto [out, lse] = RunForward(p, qr, kr, v, lists, rows);
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
