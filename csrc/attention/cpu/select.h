// Selection: block means, gate logits, and the highest of them per row. The gate is never stored
// whole.
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cpu/work.h"

namespace sb {
namespace SB_ISA {
namespace {

// Writes the `want` highest of x[0, n) as ascending indices, 0 < want < n; ties keep the later
// index, NaN and -inf rank last. x has room up to a multiple of 16. Bisection on the value: no
// sort, no data-dependent branch per element.
inline void TopBlocks(float* x, int n, int want, int16_t* out) {
  const int vectors = (n + 15) / 16;
  const float lowest = -0x1.fffffcp127f;  // the next above -FLT_MAX
  Vec vmin = Set1(FLT_MAX), vmax = Set1(lowest);
  for (int v = 0; v < vectors; ++v) {
    const Mask valid = FirstLanes(n - 16 * v);
    // Finite, so that halving works. Max gives its second operand where the first is NaN.
    const Vec y = Min(Max(Load(x + 16 * v), Set1(lowest)), Set1(FLT_MAX));
    Store(x + 16 * v, Select(valid, y, Set1(kNegInf)));
    vmin = Min(vmin, Select(valid, y, Set1(FLT_MAX)));
    vmax = Max(vmax, Select(valid, y, Set1(lowest)));
  }
  float lo = ReduceMin(vmin), hi = ReduceMax(vmax);
  // A normal number below all values, even where denormals are flushed to zero.
  lo = Larger(-FLT_MAX, lo - Larger(fabsf(lo) * 1e-6f, FLT_MIN));
  // Invariant: more than `want` values are above lo, at most `want` (namely `above`) are above hi.
  int above = 0;
  while (true) {
    const float mid = 0.5f * lo + 0.5f * hi;
    if (!(mid > lo && mid < hi)) break;
    const Vec m = Set1(mid);
    int count = 0;
    for (int v = 0; v < vectors; ++v) count += __builtin_popcount(GreaterBits(Load(x + 16 * v), m));
    if (count > want) {
      lo = mid;
    } else {
      hi = mid;
      above = count;
      if (count == want) break;
    }
  }
  // Between lo and hi all values are equal: of those keep the last.
  const int ties = want - above;
  const Vec vlo = Set1(lo), vhi = Set1(hi);
  int skip = -want;
  if (ties > 0)
    for (int v = 0; v < vectors; ++v)
      skip += __builtin_popcount(GreaterBits(Load(x + 16 * v), vlo));
  for (int v = 0; v < vectors; ++v) {
    const Vec y = Load(x + 16 * v);
    uint32_t keep = GreaterBits(y, vhi);
    if (ties > 0) {
      uint32_t equal = GreaterBits(y, vlo) & ~keep;
      for (; skip > 0 && equal != 0; --skip) equal &= equal - 1;
      keep |= equal;
    }
    for (; keep != 0; keep &= keep - 1) *out++ = static_cast<int16_t>(16 * v + __builtin_ctz(keep));
  }
}

struct SelectScratch {
  SelectScratch(char* base, int64_t D, int64_t longest)
      : ldq(D + 16), ldg(longest + 16), carver(base) {
    q = carver.Take<float>(kTileRows * ldq);
    gate = carver.Take<float>(kTileRows * ldg);
    mean = carver.Take<float>(16 * D);
  }
  int64_t ldq, ldg;
  Carver carver;
  float *q, *gate, *mean;
};

// means: panels of kPanel columns [D][kPanel], as PackTransposed makes them.
template <class E>
void MeanOfBlocks(const Problem& p, const MeanTask& task, Tensor<E> k, float* means,
                  const SelectScratch& x) {
  const Head hd(p, task.sequence, task.head);
  const int64_t D = p.head_dim;
  std::memset(x.mean, 0, static_cast<size_t>(16 * D) * 4);
  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t t = (task.block + i) * hd.B; t < (task.block + i + 1) * hd.B; ++t)
      AddRow(x.mean + i * D, k.Row(hd.start + t, hd.kv), D, 1.0f / static_cast<float>(hd.B));
  Vec r[16];
  for (int64_t d0 = 0; d0 < D; d0 += 16) {
    for (int i = 0; i < 16; ++i) r[i] = Load(x.mean + i * D + d0);
    Transpose16(r, means + task.out / kPanel * kPanel * D + task.out % kPanel + d0 * kPanel,
                kPanel);
  }
}

template <class E>
void SelectTask(const Problem& p, const TaskList& list, const Task& task, Tensor<E> q,
                const float* means, int16_t* selection, const SelectScratch& x) {
  const Head hd(p, task.sequence, task.head);
  const int64_t G = hd.G, D = p.head_dim, width = p.max_budget - 1;
  const int64_t end = Smaller(task.begin + list.chunk, hd.len) * G;
  const int32_t* budget = p.budget + task.sequence * p.query_heads + hd.kv * G;
  int64_t least = budget[0];
  for (int64_t g = 1; g < G; ++g) least = Smaller<int64_t>(least, budget[g]);
  for (int64_t row0 = task.begin * G; row0 < end; row0 += kTileRows) {
    const int M = static_cast<int>(Smaller<int64_t>(kTileRows, end - row0));
    const int64_t past = hd.Token(row0 + M - 1) / hd.B;
    if (past > least - 1) {
      for (int i = 0; i < M; ++i) LoadRow(hd.Row(q, row0 + i), x.q + i * x.ldq, D, 1.0f);
      Gemm<false, Update::kSet>(M, static_cast<int>(past), static_cast<int>(D), x.q, x.ldq,
                                means + task.means * D, kPanel, D * kPanel, x.gate, x.ldg);
    }
    for (int i = 0; i < M; ++i) {
      const int64_t t = hd.Token(row0 + i), h = hd.QueryHead(row0 + i, t);
      const int have = static_cast<int>(t / hd.B);
      const int want = static_cast<int>(Smaller<int64_t>(have, budget[h - hd.kv * G] - 1));
      int16_t* out = selection + (h * p.tokens + hd.start + t) * width;
      if (want == have)
        for (int j = 0; j < want; ++j) out[j] = static_cast<int16_t>(j);
      else if (want > 0)
        TopBlocks(x.gate + i * x.ldg, have, want, out);
      for (int64_t j = want; j < width; ++j) out[j] = -1;
    }
  }
}

template <class E>
int Select(const Problem& p, const TaskList& list, const MeanList& mean_list, View q, View k,
           int16_t* selection) {
  const int threads = Threads(p, Larger(list.count, mean_list.count));
  const int64_t D = p.head_dim, bytes = SelectScratch(nullptr, D, mean_list.longest).carver.bytes();
  Carver shared(nullptr);
  shared.Take<float>(mean_list.columns * D);
  const Scratch scratch(shared.bytes() + bytes * threads, p.poison);
  if (!scratch.ok()) return kOutOfMemory;
  float* means = Carver(scratch.data()).Take<float>(mean_list.columns * D);
  char* own = scratch.data() + shared.bytes();
  ForEachTask(threads, mean_list.count, [&](int thread, int64_t i) {
    const SelectScratch x(own + thread * bytes, D, mean_list.longest);
    MeanOfBlocks<E>(p, mean_list.tasks[i], Tensor<E>(k), means, x);
  });
  ForEachTask(threads, list.count, [&](int thread, int64_t i) {
    const SelectScratch x(own + thread * bytes, D, mean_list.longest);
    SelectTask<E>(p, list, list.tasks[i], Tensor<E>(q), means, selection, x);
  });
  return kOk;
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
