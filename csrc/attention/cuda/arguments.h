// From checked CUDA tensors to what the kernels take. Only the two files of bindings include this.
// Compiled with SB_EMULATED the tensors are the CPU's, and the kernels run on csrc/emulator.
//
// Nothing here waits for the device: values in tensors are not looked at.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>

#include "attention/arguments.h"
#include "attention/cuda/attention.h"

#if defined(SB_EMULATED)
#include "emulator/runtime.h"
#else
#include <dlfcn.h>
#endif

namespace {

using sb::cuda::Machine;

#if defined(SB_EMULATED)

struct Launcher {
  explicit Launcher(const Tensor& q) : machine(sb::cuda::CurrentMachine(nullptr)) {
    if (!q.is_cpu())
      Refuse("the tensors are not on the CPU", "the emulator runs there", "move them");
  }
  Machine machine;
};

#else

// torch has a stable function for this only from 2.13 on; where torch has CUDA, it has this one.
void* CurrentStream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (function == nullptr || function(device, &stream) != 0)
    Refuse("torch does not tell its current CUDA stream",
           "the kernels must run in order with torch's own", "install a torch built with CUDA");
  return stream;
}

// Makes q's device current for as long as it lives.
struct Launcher {
  explicit Launcher(const Tensor& q) : guard(q.get_device_index()) {
    machine = sb::cuda::CurrentMachine(CurrentStream(q.get_device_index()));
  }
  torch::stable::accelerator::DeviceGuard guard;
  Machine machine{};
};

#endif

void CheckDevice(const Tensor& x, const Tensor& q, const char* name, const char* of = "q") {
  if (x.is_cpu() != q.is_cpu() || (!q.is_cpu() && x.get_device_index() != q.get_device_index()))
    Refuse(std::string(name) + " is on another device than " + of, "one device runs the attention",
           std::string("move ") + name + " to the device of " + of);
}

Tensor Integers(const Tensor& x, const Tensor& q, ScalarType type, const char* name,
                const char* of = "q") {
  CheckDevice(x, q, name, of);
  if (x.scalar_type() != type)
    Refuse(std::string(name) + " has the wrong dtype", "this op reads it as fixed by its schema",
           std::string("convert ") + name);
  return torch::stable::contiguous(x);
}

// What the kernels can read 16 bytes at a time: a copy only where x is not so.
Tensor Aligned(const Tensor& x) {
  const auto fits = [&](int64_t dim) { return x.size(dim) == 1 || x.stride(dim) % 8 == 0; };
  const bool fine = (x.stride(2) == 1 || x.size(2) == 1) && fits(0) && fits(1) &&
                    reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  if (fine || x.numel() == 0) return x;
  const Tensor packed = Empty(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type());
  Tensor target = packed;
  torch::stable::copy_(target, x);
  return packed;
}

// Keeps the integer tensors alive that the problem points to.
struct CudaProblem {
  CudaProblem(const Tensor& like, const Tensor& cu, const std::optional<Tensor>& k, int64_t tokens,
              int64_t query_heads, int64_t kv_heads, int64_t block_size, int64_t max_budget)
      : cu_seqlens(Integers(cu, like, ScalarType::Int, "cu_seqlens")) {
    if (cu_seqlens.dim() != 1 || cu_seqlens.numel() < 1)
      Refuse("cu_seqlens has shape " + Shape(cu), "it holds the sequence bounds",
             "pass [sequences + 1]");
    if (cu_seqlens.numel() == 1 && tokens > 0)
      Refuse("cu_seqlens has one number and q has " + std::to_string(tokens) + " tokens",
             "every token belongs to a sequence", "pass [sequences + 1]");
    if (block_size < 16 || block_size % 16 != 0 || block_size > kMaxBlockSize)
      Refuse("block_size is " + std::to_string(block_size),
             "the kernels work in steps of 16 keys, below 2^31", "pass a positive multiple of 16");
    if (kv_heads < 1 || query_heads < 1 || query_heads % kv_heads != 0 || kv_heads > 65535)
      Refuse(
          "q has " + std::to_string(query_heads) + " heads and k has " + std::to_string(kv_heads),
          "every KV head serves the same number of query heads, and a grid has up to 65535 rows",
          "make the heads of q a multiple of those of k");
    if (max_budget < 1 || max_budget > kMaxBudget)
      Refuse("max_budget is " + std::to_string(max_budget),
             "it sizes the selection, and no sequence has more than 32767 blocks",
             "pass 1 to the blocks of the longest sequence");
    // Kernels step over rows in 32 bits, up to a tile of the index (2^23 rows) past the last.
    if (tokens * (query_heads / kv_heads) > (int64_t{1} << 31) - (int64_t{1} << 24))
      Refuse("q has " + std::to_string(tokens) + " tokens",
             "tokens times query heads per KV head must not pass 2^31 - 2^24", "pass fewer tokens");
    problem.tokens = tokens;
    problem.query_heads = query_heads;
    problem.kv_heads = kv_heads;
    problem.sequences = cu_seqlens.numel() - 1;
    problem.block_size = block_size;
    problem.max_budget = max_budget;
    problem.cu_seqlens = Data<int32_t>(cu_seqlens);
    if (!k.has_value()) return;
    budget = Integers(*k, like, ScalarType::Int, "budget");
    problem.budget = Data<int32_t>(*budget);
    CheckShape(*budget, "budget", {problem.sequences, query_heads});
  }
  Tensor cu_seqlens;
  std::optional<Tensor> budget;
  Problem problem{};
};

CudaProblem ProblemOf(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens,
                      const std::optional<Tensor>& budget, int64_t block_size, int64_t max_budget,
                      double scale) {
  if (q.dim() != 3 || k.dim() != 3)
    Refuse("q has shape " + Shape(q) + " and k " + Shape(k), "they are packed sequences",
           "pass [tokens, heads, head_dim]");
  const int64_t D = q.size(2);
  if (D != 32 && D != 64 && D != 128)
    Refuse("head_dim is " + std::to_string(D), "the kernels are built for 32, 64 and 128",
           "use one of those");
  CheckShape(k, "k", {q.size(0), k.size(1), D});
  CheckDevice(k, q, "k");
  if (k.scalar_type() != q.scalar_type())
    Refuse("q and k differ in dtype", "the kernels take one dtype",
           "convert q, k and v to the same dtype");
  if (q.scalar_type() != ScalarType::BFloat16 && q.scalar_type() != ScalarType::Half)
    Refuse("q is neither bfloat16 nor float16", "the CUDA kernels run on tensor cores in those",
           "convert q, k and v (torch.autocast does), or pass backend='reference'");
  CudaProblem p(q, cu_seqlens, budget, q.size(0), q.size(1), k.size(1), block_size, max_budget);
  p.problem.head_dim = D;
  p.problem.dtype = DtypeOf(q, "q");
  p.problem.scale = static_cast<float>(scale);
  return p;
}

// Calls an op of attention.h twice: for the size of its workspace, and to run.
template <class Op>
void RunWithWorkspace(const Tensor& like, Op op) {
  const int64_t bytes = op(nullptr) + 256;
  const Tensor workspace = Empty(like, {bytes}, ScalarType::Byte);
  const uintptr_t start = reinterpret_cast<uintptr_t>(workspace.data_ptr());
  op(reinterpret_cast<void*>((start + 255) / 256 * 256));
}

}  // namespace
