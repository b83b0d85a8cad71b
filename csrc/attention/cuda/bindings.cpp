// The ops of namespace `sb` for CUDA tensors, on LibTorch's stable ABI. Compiled with SB_EMULATED
// they are ops of namespace `sb_emulated` for CPU tensors, whose kernels run on csrc/emulator.
// Those that tune budgets are in tuning_bindings.cpp.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "attention/cuda/arguments.h"

namespace {

void CheckLike(const Tensor& x, const Tensor& q, const char* name, int64_t heads) {
  CheckShape(x, name, {q.size(0), heads, q.size(2)});
  CheckDevice(x, q, name);
  if (x.scalar_type() != q.scalar_type())
    Refuse(std::string(name) + " differs from q in dtype", "the kernels take one dtype",
           std::string("convert ") + name + " to the dtype of q");
}

struct IndexTensors {
  IndexTensors(const Tensor& like, const Problem& p)
      : bounds(Empty(like, {p.kv_heads * (p.tokens / p.block_size + p.sequences) + 1},
                     ScalarType::Long)),
        rows(Empty(like, {p.tokens * p.query_heads * (p.max_budget - 1)}, ScalarType::Int)) {}
  IndexTensors(const Tensor& q, const Tensor& list_ptr, const Tensor& list_rows, const Problem& p)
      : bounds(Integers(list_ptr, q, ScalarType::Long, "list_ptr")),
        rows(Integers(list_rows, q, ScalarType::Int, "list_rows")) {
    CheckShape(bounds, "list_ptr", {p.kv_heads * (p.tokens / p.block_size + p.sequences) + 1});
    CheckShape(rows, "list_rows", {p.tokens * p.query_heads * (p.max_budget - 1)});
  }
  Tensor bounds, rows;
};

void RunSelect(const Launcher& on, const Problem& p, int64_t max_seqlen, const Tensor& q,
               const Tensor& k, const Tensor& selection) {
  RunWithWorkspace(q, [&](void* workspace) {
    return sb::cuda::Select(p, max_seqlen, on.machine, ViewOf(q), ViewOf(k),
                            Mutable<int16_t>(selection), workspace);
  });
}

void RunIndex(const Launcher& on, const Problem& p, const Tensor& selection,
              const IndexTensors& lists) {
  RunWithWorkspace(selection, [&](void* workspace) {
    return sb::cuda::Index(p, on.machine, Data<int16_t>(selection), Mutable<int64_t>(lists.bounds),
                           Mutable<int32_t>(lists.rows), workspace);
  });
}

std::tuple<Tensor, Tensor> RunForward(const Launcher& on, const Problem& p, int64_t max_seqlen,
                                      const Tensor& q, const Tensor& k, const Tensor& v,
                                      const IndexTensors& lists) {
  const Tensor out = Empty(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  const Tensor lse = Empty(q, {q.size(1), q.size(0)}, ScalarType::Float);
  RunWithWorkspace(q, [&](void* workspace) {
    return sb::cuda::Forward(p, max_seqlen, on.machine, ViewOf(q), ViewOf(k), ViewOf(v),
                             Data<int64_t>(lists.bounds), Data<int32_t>(lists.rows), out.data_ptr(),
                             Mutable<float>(lse), workspace);
  });
  return {out, lse};
}

Tensor Select(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, const Tensor& budget,
              int64_t block_size, int64_t max_seqlen, int64_t max_budget) {
  const CudaProblem p = ProblemOf(q, k, cu_seqlens, budget, block_size, max_budget, 1.0);
  const Launcher on(q);
  const Tensor selection = Empty(q, {q.size(1), q.size(0), max_budget - 1}, ScalarType::Short);
  RunSelect(on, p.problem, max_seqlen, Aligned(q), Aligned(k), selection);
  return selection;
}

std::tuple<Tensor, Tensor> Index(const Tensor& selection, const Tensor& cu_seqlens,
                                 const Tensor& budget, int64_t block_size, int64_t group) {
  const Tensor chosen = Integers(selection, selection, ScalarType::Short, "selection");
  if (chosen.dim() != 3)
    Refuse("selection has shape " + Shape(chosen), "it has three dimensions",
           "pass moba_select's result");
  if (group < 1 || chosen.size(0) % group != 0)
    Refuse("group is " + std::to_string(group) + " and selection has " +
               std::to_string(chosen.size(0)) + " heads",
           "every KV head serves the same number of query heads", "pass query heads / KV heads");
  const CudaProblem p(selection, cu_seqlens, budget, chosen.size(1), chosen.size(0),
                      chosen.size(0) / group, block_size, chosen.size(2) + 1);
  const Launcher on(chosen);
  const IndexTensors lists(chosen, p.problem);
  RunIndex(on, p.problem, chosen, lists);
  return {lists.bounds, lists.rows};
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
  const CudaProblem p =
      ProblemOf(q, k, cu_seqlens, budget, block_size, selection.size(2) + 1, scale);
  CheckLike(v, q, "v", k.size(1));
  const Launcher on(q);
  const IndexTensors lists(q, list_ptr, list_rows, p.problem);
  return RunForward(on, p.problem, max_seqlen, Aligned(q), Aligned(k), Aligned(v), lists);
}

std::tuple<Tensor, Tensor, Tensor> Backward(const Tensor& dout, const std::optional<Tensor>& dlse,
                                            const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& lse,
                                            const Tensor& selection, const Tensor& list_ptr,
                                            const Tensor& list_rows, const Tensor& cu_seqlens,
                                            const Tensor& budget, int64_t block_size,
                                            int64_t max_seqlen, double scale, bool deterministic) {
  CheckSelection(selection, q);
  const CudaProblem p =
      ProblemOf(q, k, cu_seqlens, budget, block_size, selection.size(2) + 1, scale);
  CheckLike(v, q, "v", k.size(1));
  CheckLike(out, q, "out", q.size(1));
  CheckLike(dout, q, "dout", q.size(1));
  CheckShape(lse, "lse", {q.size(1), q.size(0)});
  const Tensor sums = Integers(lse, q, ScalarType::Float, "lse");
  std::optional<Tensor> dsums;
  if (dlse.has_value()) {
    CheckShape(*dlse, "dlse", {q.size(1), q.size(0)});
    dsums = Integers(*dlse, q, ScalarType::Float, "dlse");
  }
  const Launcher on(q);
  const IndexTensors lists(q, list_ptr, list_rows, p.problem);
  const Tensor dq = Empty(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  const Tensor dk = Empty(k, {k.size(0), k.size(1), k.size(2)}, q.scalar_type());
  const Tensor dv = Empty(k, {k.size(0), k.size(1), k.size(2)}, q.scalar_type());
  const Tensor dr = Aligned(dout), qr = Aligned(q), kr = Aligned(k), vr = Aligned(v),
               our = Aligned(out);
  RunWithWorkspace(q, [&](void* workspace) {
    return sb::cuda::Backward(
        p.problem, max_seqlen, on.machine, ViewOf(dr), ViewOf(qr), ViewOf(kr), ViewOf(vr),
        ViewOf(our), Data<float>(sums), dsums.has_value() ? Data<float>(*dsums) : nullptr,
        Data<int64_t>(lists.bounds), Data<int32_t>(lists.rows),
        {dq.data_ptr(), dk.data_ptr(), dv.data_ptr()}, deterministic, workspace);
  });
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor> Attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& cu_seqlens, const Tensor& budget,
                                             int64_t block_size, int64_t max_seqlen,
                                             int64_t max_budget, double scale,
                                             bool /*deterministic: the forward always is*/) {
  const CudaProblem p = ProblemOf(q, k, cu_seqlens, budget, block_size, max_budget, scale);
  CheckLike(v, q, "v", k.size(1));
  const Launcher on(q);
  const Tensor qr = Aligned(q), kr = Aligned(k);
  const Tensor selection = Empty(q, {q.size(1), q.size(0), max_budget - 1}, ScalarType::Short);
  RunSelect(on, p.problem, max_seqlen, qr, kr, selection);
  const IndexTensors lists(q, p.problem);
  RunIndex(on, p.problem, selection, lists);
  auto [out, lse] = RunForward(on, p.problem, max_seqlen, qr, kr, Aligned(v), lists);
  return {out, lse, selection};
}

}  // namespace

#if defined(SB_EMULATED)

STABLE_TORCH_LIBRARY(sb_emulated, m) {
  m.def(
      "moba_select(Tensor q, Tensor k, Tensor cu_seqlens, Tensor budget, int block_size, SymInt "
      "max_seqlen, SymInt max_budget) -> Tensor");
  m.def(
      "moba_index(Tensor selection, Tensor cu_seqlens, Tensor budget, int block_size, int group) "
      "-> (Tensor, Tensor)");
  m.def(
      "moba_forward(Tensor q, Tensor k, Tensor v, Tensor selection, Tensor list_ptr, Tensor "
      "list_rows, Tensor cu_seqlens, Tensor budget, int block_size, SymInt max_seqlen, float "
      "scale) -> (Tensor, Tensor)");
  m.def(
      "moba_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, Tensor selection, Tensor list_ptr, Tensor list_rows, Tensor cu_seqlens, Tensor budget, "
      "int block_size, SymInt max_seqlen, float scale, bool deterministic) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "moba_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor budget, int "
      "block_size, SymInt max_seqlen, SymInt max_budget, float scale, bool deterministic) -> "
      "(Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(sb_emulated, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(sb, CUDA, m) {
#endif
  m.impl("moba_select", TORCH_BOX(&Select));
  m.impl("moba_index", TORCH_BOX(&Index));
  m.impl("moba_forward", TORCH_BOX(&Forward));
  m.impl("moba_backward", TORCH_BOX(&Backward));
  m.impl("moba_attention", TORCH_BOX(&Attention));
}

#if defined(SB_EMULATED)
// For ctypes: settings as text, counters as numbers. 0: an unknown setting.
extern "C" __attribute__((visibility("default"))) int sb_emulator_configure(const char* text) {
  try {
    emulator::Configure(text);
  } catch (const std::exception&) {
    return 0;
  }
  return 1;
}

extern "C" __attribute__((visibility("default"))) uint64_t sb_emulator_launches() {
  return emulator::CurrentCounters().launches;
}
#endif
