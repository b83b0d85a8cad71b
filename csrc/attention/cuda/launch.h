// Host code that all kernels' launches share.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention/cuda/attention.h"
#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

// Hands out pieces of the workspace; with nullptr it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

inline int64_t DivideUp(int64_t n, int64_t by) { return (n + by - 1) / by; }

#if defined(__CUDACC__)
inline void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next launch is not to blame
  throw std::runtime_error(std::string("CUDA refused ") + what + " (" + cudaGetErrorString(error) +
                           "): an attention kernel cannot run. To fix it, look for an earlier CUDA "
                           "error (CUDA_LAUNCH_BLOCKING=1 shows where), and see that `sb doctor` "
                           "names this GPU.");
}
#endif

template <class Arguments>
void Run(const char* name, void (*kernel)(Arguments), dim3 grid, unsigned threads, int64_t shared,
         const Machine& machine, const Arguments& arguments) {
  if (shared > machine.shared_bytes)
    throw std::runtime_error(std::string(name) + " needs " + std::to_string(shared) +
                             " bytes of shared memory: this GPU gives a block " +
                             std::to_string(machine.shared_bytes) +
                             ". To fix it, pass backend='reference', or use a GPU of compute "
                             "capability 8.0 or later.");
#if defined(__CUDACC__)
  // The limit is the kernel's, for all threads of the host: one that lowers it to its own need
  // could make another's launch fail. So it is always the same, the most that the device gives.
  if (shared > 48 * 1024)
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(machine.shared_bytes)),
              name);
  kernel<<<grid, threads, static_cast<size_t>(shared), static_cast<cudaStream_t>(machine.stream)>>>(
      arguments);
  CheckCuda(cudaGetLastError(), name);
#else
  ::emulator::Launch(name, grid, dim3(threads), static_cast<size_t>(shared),
                     [&] { kernel(arguments); });
#endif
}

inline void Clear(void* memory, int64_t bytes, [[maybe_unused]] const Machine& machine) {
#if defined(__CUDACC__)
  CheckCuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes),
                            static_cast<cudaStream_t>(machine.stream)),
            "a memset");
#else
  std::memset(memory, 0, static_cast<size_t>(bytes));
#endif
}

template <class E_, int D_>
struct Variant {
  using E = E_;
  static constexpr int D = D_;
};

// Calls f with the variant of the kernels for this problem.
template <class F>
void WithVariant(const Problem& p, F f) {
  const bool bf16 = p.dtype == Dtype::kBfloat16;
  if (p.dtype == Dtype::kFloat32 || (p.head_dim != 32 && p.head_dim != 64 && p.head_dim != 128))
    throw std::runtime_error(
        "the CUDA kernels are built for bfloat16 and float16 and head_dim 32, 64 and 128: nothing "
        "else was asked for so far. To fix it, convert q, k and v, or pass backend='reference'.");
  if (p.head_dim == 32)
    bf16 ? f(Variant<Bf16, 32>{}) : f(Variant<Fp16, 32>{});
  else if (p.head_dim == 64)
    bf16 ? f(Variant<Bf16, 64>{}) : f(Variant<Fp16, 64>{});
  else
    bf16 ? f(Variant<Bf16, 128>{}) : f(Variant<Fp16, 128>{});
}

// Upper bounds that follow from sizes alone.
inline int64_t MaxBlocks(const Problem& p) { return p.tokens / p.block_size + p.sequences; }
inline int64_t MaxTiles(const Problem& p, int64_t tile_rows) {
  return p.tokens * (p.query_heads / p.kv_heads) / tile_rows + p.sequences;
}
inline int64_t MaxLength(const Problem& p, int64_t max_seqlen) {
  // 0 cannot be right where there are tokens, and no size that follows from it may be 0.
  return max_seqlen <= 0 ? p.tokens : std::min(max_seqlen, p.tokens);
}

constexpr int64_t kAnyNumber = INT64_MAX;
Layout TakeLayout(const Problem& p, int64_t tile_rows, Carver* carver, int64_t block_rows = 0,
                  int64_t most_tiles = kAnyNumber);
void RunLayout(const Problem& p, const Layout& layout, const Machine& machine);
// The means of all blocks that a later token sees, as PoolKernel keeps them.
void RunPool(const Problem& p, const Layout& layout, View k, uint16_t* means,
             const Machine& machine);
// Inclusive sums in place.
void RunScan(int64_t* values, int64_t count, const Machine& machine);

// Rows of a tile of the query-owned kernels: so many that about 128 of them attend a block, but
// that every multiprocessor has several tiles.
int64_t ChooseTileRows(const Problem& p, int64_t max_seqlen, const Machine& machine);
// Blocks of threads of a kernel that walks over tiles.
int64_t WalkingGrid(const Problem& p, int64_t tile_rows, int per_multiprocessor,
                    const Machine& machine);

}  // namespace cuda
}  // namespace sb
