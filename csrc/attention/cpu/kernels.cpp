// One instruction set's kernels. The build compiles this file once per SB_ISA, with that set's
// compiler flags.
//
// No torch header and no standard container here: whatever the linker could merge between two
// instruction sets must carry the name of its own.
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsic headers trip these.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "attention/cpu/kernels.h"

#include "attention/cpu/backward.h"
#include "attention/cpu/coverage.h"
#include "attention/cpu/forward.h"
#include "attention/cpu/select.h"

#define SB_STRING_(x) #x
#define SB_STRING(x) SB_STRING_(x)

namespace sb {
namespace SB_ISA {
namespace {

template <class Pointer>
struct Pointee;
template <class T>
struct Pointee<T*> {
  using type = T;
};
template <class Pointer>
using Element = typename Pointee<Pointer>::type;

// Calls f with a null pointer of the element type.
template <class F>
int ByDtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return f(static_cast<Bf16*>(nullptr));
    case Dtype::kFloat16:
      return f(static_cast<Fp16*>(nullptr));
    case Dtype::kFloat32:
      break;
  }
  return f(static_cast<float*>(nullptr));
}

int SelectAny(const Problem& p, const TaskList& tasks, const MeanList& means, View q, View k,
              int16_t* selection) {
  return ByDtype(p.dtype, [&](auto* element) {
    using E = Element<decltype(element)>;
    return Select<E>(p, tasks, means, q, k, selection);
  });
}

int ForwardAny(const Problem& p, const TaskList& tasks, View q, View k, View v,
               const int64_t* lists, const int32_t* rows, void* out, float* lse) {
  return ByDtype(p.dtype, [&](auto* element) {
    using E = Element<decltype(element)>;
    return Forward<E>(p, tasks, q, k, v, lists, rows, out, lse);
  });
}

int BackwardAny(const Problem& p, const TaskList& tasks, View dout, View q, View k, View v,
                View out, const float* lse, const float* dlse, const int64_t* lists,
                const int32_t* rows, Gradients gradients) {
  return ByDtype(p.dtype, [&](auto* element) {
    using E = Element<decltype(element)>;
    return Backward<E>(p, tasks, dout, q, k, v, out, lse, dlse, lists, rows, gradients);
  });
}

int CoverageAny(const Problem& p, const CoverageList& tasks, const MeanList& means, View q, View k,
                float* sums) {
  return ByDtype(p.dtype, [&](auto* element) {
    using E = Element<decltype(element)>;
    return Coverage<E>(p, tasks, means, q, k, sums);
  });
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {SB_STRING(SB_ISA), SelectAny, ForwardAny, BackwardAny, CoverageAny};

}  // namespace SB_ISA
}  // namespace sb
