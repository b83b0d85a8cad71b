#include "attention/cpu/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention/cpu/kernels.h"

namespace sb {
namespace {

constexpr const char* kNames[] = {"avx512", "avx2", "baseline"};  // best first

const KernelTable& Choose(const char* wanted) {
  std::string lower = wanted == nullptr ? "" : wanted;
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  const char* forced = lower.c_str();
  if (lower.empty()) {
    for (const char* name : kNames)
      if (const KernelTable* table = KernelsOf(name)) return *table;
  } else if (const KernelTable* table = KernelsOf(forced)) {
    return *table;
  }
  bool known = false;
  std::string runs;
  for (const char* name : kNames) {
    known = known || std::strcmp(name, forced) == 0;
    if (KernelsOf(name) != nullptr) runs += (runs.empty() ? "" : ", ") + std::string(name);
  }
  throw std::runtime_error("SB_CPU_ISA is '" + std::string(wanted) + "': " +
                           (known ? "this CPU or this build does not have that instruction set"
                                  : "no instruction set has that name") +
                           ". To fix it, unset SB_CPU_ISA or set it to one of: " + runs + ".");
}

}  // namespace

const KernelTable* KernelsOf(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512") == 0) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("fma");
    return has ? &avx512::kTable : nullptr;
  }
  if (std::strcmp(isa, "avx2") == 0) {
    // Every CPU with AVX2 has F16C.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kTable
                                                                           : nullptr;
  }
#endif
  return std::strcmp(isa, "baseline") == 0 ? &baseline::kTable : nullptr;
}

const KernelTable& Kernels() {
  static const KernelTable& table = Choose(std::getenv("SB_CPU_ISA"));
  return table;
}

}  // namespace sb
