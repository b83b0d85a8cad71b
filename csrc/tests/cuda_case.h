// Inputs of the tests of the CUDA kernels, arrays of exactly their length, and the comparison.
//
// Every array is exactly as long as it must be and starts as NaN, so that AddressSanitizer finds
// what is read or written beyond, and the comparison what is read before it was written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/cuda/attention.h"
#include "attention/cuda/device.cuh"
#include "tests/expect.h"

namespace {

using sb::Dtype;
using sb::Problem;
using sb::View;

struct Case {
  std::vector<int> lengths;
  int query_heads, kv_heads, head_dim, block_size;
  Dtype dtype;
  std::vector<int> budgets;  // per sequence; empty: random per sequence and head
  float scale = 0.0f;        // 0: head_dim^-0.5
  int max_budget = 0;        // 0: as small as can be
};

// An array on the heap of exactly `count` elements.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : count_(count), data_(new T[static_cast<size_t>(count)]) {
    std::memset(static_cast<void*>(data_.get()), 0xff, static_cast<size_t>(count) * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_[static_cast<size_t>(i)]; }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  std::unique_ptr<T[]> data_;
};

// Scratch memory that starts at 256 bytes and is NaN.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : memory_(bytes + 256) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.get());
    start_ = memory_.get() + (256 - at % 256);
  }
  void* get() const { return start_; }

 private:
  Array<unsigned char> memory_;
  unsigned char* start_;
};

struct Setup {
  Setup(const Case& c, unsigned seed);

  int64_t Tokens() const { return tokens; }
  double Get(const Array<uint16_t>& x, int64_t i) const {
    return c.dtype == Dtype::kBfloat16 ? sb::cuda::Bf16::Widen(x[i]) : sb::cuda::Fp16::Widen(x[i]);
  }
  void Put(const Array<uint16_t>& x, int64_t i, float value) const {
    x[i] = static_cast<uint16_t>(c.dtype == Dtype::kBfloat16 ? sb::cuda::NarrowBf16(value)
                                                             : sb::cuda::NarrowFp16(value));
  }
  // q, dout: [tokens, query_heads, D]; k, v: [tokens, kv_heads, D]; all but k with room between
  // heads.
  int64_t At(int64_t t, int64_t h, int64_t heads) const { return (t * heads + h) * (D + 8); }
  View ViewOf(const Array<uint16_t>& x, int64_t heads) const {
    return {x.get(), heads * (D + 8), D + 8};
  }

  const Case& c;
  int64_t tokens, D, group, width;
  Array<int32_t> cu, budget;
  Problem p{};
  Array<uint16_t> q, k, v, dout;
  Array<float> dlse;
};

inline int64_t Sum(const std::vector<int>& x) {
  int64_t sum = 0;
  for (const int i : x) sum += i;
  return sum;
}

inline Setup::Setup(const Case& given, unsigned seed)
    : c(given),
      tokens(Sum(given.lengths)),
      D(given.head_dim),
      group(given.query_heads / given.kv_heads),
      cu(static_cast<int64_t>(given.lengths.size()) + 1),
      budget(static_cast<int64_t>(given.lengths.size()) * given.query_heads),
      q(tokens * given.query_heads * (D + 8)),
      k(tokens * given.kv_heads * (D + 8)),
      v(tokens * given.kv_heads * (D + 8)),
      dout(tokens * given.query_heads * (D + 8)),
      dlse(tokens * given.query_heads) {
  sb::Random random(seed);
  const auto fill = [&](const Array<uint16_t>& x, int64_t heads) {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < D; ++d) Put(x, At(t, h, heads) + d, random.Normal());
  };
  fill(q, c.query_heads);
  fill(k, c.kv_heads);
  fill(v, c.kv_heads);
  fill(dout, c.query_heads);
  for (int64_t i = 0; i < dlse.count(); ++i) dlse[i] = random.Normal();
  cu[0] = 0;
  int most = 1;
  for (size_t n = 0; n < c.lengths.size(); ++n) {
    cu[static_cast<int64_t>(n) + 1] = cu[static_cast<int64_t>(n)] + c.lengths[n];
    const int blocks = (c.lengths[n] + c.block_size - 1) / c.block_size;
    for (int h = 0; h < c.query_heads; ++h) {
      const int k0 = c.budgets.empty() ? 1 + random.Below(blocks + 2) : c.budgets[n];
      budget[static_cast<int64_t>(n) * c.query_heads + h] = k0;
      most = std::max(most, std::min(k0, blocks));
    }
  }
  p.tokens = tokens;
  p.query_heads = c.query_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = D;
  p.sequences = static_cast<int64_t>(c.lengths.size());
  p.block_size = c.block_size;
  p.max_budget = std::max(most, c.max_budget);
  p.cu_seqlens = cu.get();
  p.budget = budget.get();
  p.dtype = c.dtype;
  p.scale = c.scale == 0.0f ? 1.0f / std::sqrt(static_cast<float>(D)) : c.scale;
  width = p.max_budget - 1;
}

// Largest difference, and what is allowed: `steps` roundings of the dtype at the size of the
// largest.
inline void Compare(const Setup& s, const char* name, const std::vector<double>& got,
                    const std::vector<double>& want, double unit) {
  double worst = 0, size = 1;
  bool numbers = true;
  for (size_t i = 0; i < want.size(); ++i) {
    numbers = numbers && std::isfinite(got[i]);
    worst = std::max(worst, std::fabs(got[i] - want[i]));
    size = std::max(size, std::fabs(want[i]));
  }
  std::string lengths;
  for (const int length : s.c.lengths) lengths += std::to_string(length) + " ";
  EXPECT(numbers && worst <= unit * size, "%s: off by %g, allowed %g%s; L %sHq %d Hkv %d D %d B %d",
         name, worst, unit * size, numbers ? "" : ", and not finite", lengths.c_str(),
         s.c.query_heads, s.c.kv_heads, s.c.head_dim, s.c.block_size);
}

// The program's arguments: a set of cases, and the emulator's settings. run(set) runs the cases.
template <class Run>
int RunSet(int argc, char** argv, const char* sets, Run run) {
  std::istringstream words(sets);
  bool is_known = false;
  for (std::string word; words >> word;)
    is_known = is_known || (argc > 1 && word.substr(0, word.find(',')) == argv[1] && word != "or");
  if (!is_known) {
    std::fprintf(stderr, "name a set of cases: %s\n", sets);
    return 2;
  }
  std::string settings;
  for (int i = 2; i < argc; ++i) settings += std::string(argv[i]) + " ";
  emulator::Configure(settings.c_str());
  try {
    run(std::string(argv[1]));
  } catch (const std::runtime_error& error) {
    EXPECT(false, "%s", error.what());
  }
  const emulator::Counters& n = emulator::CurrentCounters();
  EXPECT(n.bank_conflicts == 0, "ldmatrix met %llu bank conflicts",
         static_cast<unsigned long long>(n.bank_conflicts));
  std::printf("%d failures; %llu launches, %llu mma\n", sb::failures,
              static_cast<unsigned long long>(n.launches), static_cast<unsigned long long>(n.mma));
  return sb::failures == 0 ? 0 : 1;
}

}  // namespace
