// From checked tensors to what the kernels take. Only the bindings include this.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "attention/cpu/attention.h"

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

constexpr int64_t kMaxBlockSize = (int64_t{1} << 31) - 16;
constexpr int64_t kMaxBudget = 32767;

// Keeps the integer tensors alive that the problem points to.
struct Packed {
  Packed(const Tensor& cu, const Tensor& k, int64_t tokens, int64_t query_heads, int64_t kv_heads,
         int64_t block_size, int64_t max_budget, int64_t max_seqlen)
      : cu_seqlens(Contiguous(cu, ScalarType::Int, "cu_seqlens")),
        budget(Contiguous(k, ScalarType::Int, "budget")) {
    if (cu_seqlens.dim() != 1 || cu_seqlens.numel() < 1)
      Refuse("cu_seqlens has shape " + Shape(cu), "it holds the sequence bounds",
             "pass [sequences + 1]");
    if (block_size < 16 || block_size % 16 != 0 || block_size > kMaxBlockSize)
      Refuse("block_size is " + std::to_string(block_size),
             "the kernels work in steps of 16 keys, below 2^31", "pass a positive multiple of 16");
    if (kv_heads < 1 || query_heads < 1 || query_heads % kv_heads != 0)
      Refuse(
          "q has " + std::to_string(query_heads) + " heads and k has " + std::to_string(kv_heads),
          "every KV head serves the same number of query heads",
          "make the heads of q a multiple of those of k");
    if (max_budget < 1)
      Refuse("max_budget is " + std::to_string(max_budget), "every budget is at least 1",
             "pass max_budget >= 1");
    if (max_budget > kMaxBudget)
      Refuse("max_budget is " + std::to_string(max_budget),
             "no sequence has more than 32767 blocks, and max_budget sizes the selection",
             "pass at most the blocks of the longest sequence");
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

// An index from outside, checked: the kernels read and write wherever it says.
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
    sb::CheckIndex(p, b, Data<int32_t>(rows));
  }
  Tensor bounds, rows;
};

}  // namespace
