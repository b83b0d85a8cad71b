// Coverage: how the routing score of sampled rows is spread over the earlier blocks, by rank.
#pragma once

#include "attention/cpu/select.h"

namespace sb {
namespace SB_ISA {
namespace {

constexpr int kSampledRows = 64;  // rows of one query head whose logits are computed together
constexpr int64_t kSampledStride = kSampledRows + 16;

// Sorts 16 rows at once, descending; x[n, 16] holds place j of all rows in its row j. Batcher's
// merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M): no branch on data.
inline void SortDescending(float* x, int n) {
  int top = 1;
  while (2 * top < n) top *= 2;
  for (int p = top; p > 0; p /= 2) {
    for (int q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
      for (int begin = r; begin < n - d; begin += 2 * p) {
        const int end = Smaller(begin + p, n - d);
        for (int i = begin; i < end; ++i) {
          const Vec a = Load(x + 16 * i), b = Load(x + 16 * (i + d));
          Store(x + 16 * i, Max(a, b));
          Store(x + 16 * (i + d), Min(a, b));
        }
      }
      if (q == p) break;
    }
  }
}

// Adds 16 rows' softmax by rank to sum[ranks]. logits[n, 16] (row stride ld, base 2) hold block b
// in row b; row i has the first have[i] <= n blocks, and nothing is added for it if that is 0. NaN
// and -inf count as the lowest number, +inf as the highest: sums stay finite. sorted[n, 16] is
// scratch.
inline void AddMass(const float* logits, int64_t ld, int n, const float* have, int ranks,
                    float* sorted, float* sum) {
  const Vec num = Load(have), lowest = Set1(-FLT_MAX), highest = Set1(FLT_MAX);
  Vec most = lowest;
  for (int b = 0; b < n; ++b) {
    // Max gives its second operand where the first is NaN.
    const Vec y = Min(Max(Load(logits + b * ld), lowest), highest);
    const Vec x = Select(Greater(num, Set1(static_cast<float>(b))), y, Set1(kNegInf));
    most = Max(most, x);
    Store(sorted + 16 * b, x);
  }
  Vec total = Zero();
  for (int b = 0; b < n; ++b) {
    const Vec e = Exp2(Sub(Load(sorted + 16 * b), most));
    total = Add(total, e);
    Store(sorted + 16 * b, e);
  }
  alignas(64) float inverse[16];
  Store(inverse, total);
  for (float& y : inverse) y = y > 0 ? 1.0f / y : 0.0f;
  const Vec scale = Load(inverse);
  SortDescending(sorted, n);
  const int end = Smaller(n, ranks);
  for (int j = 0; j < end; j += 16) {
    Vec rows[16];
    for (int i = 0; i < 16; ++i)
      rows[Slot(i)] = j + i < end ? Mul(Load(sorted + 16 * (j + i)), scale) : Zero();
    const Vec mass = ReduceRows(rows, [](reg::Float a, reg::Float b) { return reg::Add(a, b); });
    Store(sum + j, Add(Load(sum + j), mass));
  }
}

// The first sampled token from t on.
inline int64_t NextSampled(const Head& hd, int64_t t, int64_t row_stride) {
  return Smaller(RoundUp(t, row_stride), Smaller((t / hd.B + 1) * hd.B, hd.len) - 1);
}

struct CoverageScratch {
  CoverageScratch(char* base, int64_t D, int64_t longest) : carver(base) {
    q = carver.Take<float>(RoundUp(kSampledRows, kPanel) * D);
    logits = carver.Take<float>(longest * kSampledStride);
    sorted = carver.Take<float>(longest * 16);
  }
  Carver carver;
  float *q, *logits, *sorted;
};

template <class E>
void AddTask(const Problem& p, const CoverageList& list, const CoverageTask& task, Tensor<E> q,
             const float* means, float* sums, const CoverageScratch& x) {
  const Head hd(p, task.sequence, task.head);
  const int64_t D = p.head_dim, end = Smaller(task.end * hd.B, hd.len);
  const float scale = kLog2e / sqrtf(static_cast<float>(D));
  for (int64_t t = task.begin * hd.B; t < end;) {
    int64_t tokens[kSampledRows];
    int M = 0;
    for (; M < kSampledRows && t < end; ++t) tokens[M++] = t = NextSampled(hd, t, list.row_stride);
    const int past = static_cast<int>(tokens[M - 1] / hd.B);
    for (int64_t g = 0; g < hd.G; ++g) {
      const auto row = [&](int64_t i) { return q.Row(hd.start + tokens[i], hd.kv * hd.G + g); };
      PackTransposed(row, M, D, scale, x.q);
      Gemm<false, Update::kSet>(past, M, static_cast<int>(D), means + task.means * D, D, x.q,
                                kPanel, D * kPanel, x.logits, kSampledStride);
      for (int i0 = 0; i0 < M; i0 += 16) {
        const int n = Smaller(16, M - i0);
        alignas(64) float have[16] = {};
        for (int i = 0; i < n; ++i) have[i] = static_cast<float>(tokens[i0 + i] / hd.B);
        AddMass(x.logits + i0, kSampledStride, static_cast<int>(have[n - 1]), have,
                static_cast<int>(list.max_rank), x.sorted, sums + task.sums + g * task.ranks);
      }
    }
  }
}

template <class E>
int Coverage(const Problem& p, const CoverageList& list, const MeanList& mean_list, View q, View k,
             float* sums) {
  const int threads = Threads(p, Larger(list.count, mean_list.count));
  const int64_t D = p.head_dim,
                bytes = CoverageScratch(nullptr, D, mean_list.longest).carver.bytes();
  Carver shared(nullptr);
  shared.Take<float>(mean_list.columns * D);
  const Scratch scratch(shared.bytes() + bytes * threads, p.poison);
  if (!scratch.ok()) return kOutOfMemory;
  float* means = Carver(scratch.data()).Take<float>(mean_list.columns * D);
  char* own = scratch.data() + shared.bytes();
  // Means first, then rows, in one go: waking threads twice would take longer than the work.
  int64_t num_done = 0;
  ForEachTask(threads, mean_list.count + list.count, [&](int thread, int64_t i) {
    if (i < mean_list.count) {
      MeanOfBlocks<E>(p, mean_list.tasks[i], Tensor<E>(k), means);
      __atomic_fetch_add(&num_done, 1, __ATOMIC_RELEASE);
      return;
    }
    WaitFor(&num_done, mean_list.count);
    const CoverageScratch x(own + thread * bytes, D, mean_list.longest);
    AddTask<E>(p, list, list.tasks[i - mean_list.count], Tensor<E>(q), means, sums, x);
  });
  return kOk;
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
