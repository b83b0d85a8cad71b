// Selection: block means, gate logits, and the highest of them per row. The gate is never stored
// whole.
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cpu/work.h"

namespace sb {
namespace SB_ISA {
namespace {

// For 16 rows at once: which blocks have the row's `want` highest logits. x[n, 16] (row stride ld)
// holds block b's logits in row b; row i of the 16 may choose among the first have[i] <= n blocks,
// 0 <= want[i] <= have[i]. Ties keep the later block, NaN and -inf rank last. chosen[16, words]
// with words = ceil(n / 64): bit b % 64 of word b / 64 is block b. x is overwritten.
//
// Bisection on the value, all rows together: no sort, no data-dependent branch per element.
inline void TopBlocks(float* x, int64_t ld, int n, const float* have, const float* want,
                      uint64_t* chosen) {
  const float lowest = -0x1.fffffcp127f;  // the next above -FLT_MAX
  const Vec num = Load(have), target = Load(want);
  Vec lo = Set1(FLT_MAX), hi = Set1(lowest);
  int all = n;  // the first blocks that every row may choose
  for (int i = 0; i < 16; ++i) all = Smaller(all, static_cast<int>(have[i]));
  // Finite, so that halving works. Max gives its second operand where the first is NaN.
  const auto finite = [=](int b) {
    return Min(Max(Load(x + b * ld), Set1(lowest)), Set1(FLT_MAX));
  };
  for (int b = 0; b < all; ++b) {
    const Vec y = finite(b);
    Store(x + b * ld, y);
    lo = Min(lo, y);
    hi = Max(hi, y);
  }
  for (int b = all; b < n; ++b) {
    const Mask valid = Greater(num, Set1(static_cast<float>(b)));
    const Vec y = finite(b);
    Store(x + b * ld, Select(valid, y, Set1(kNegInf)));
    lo = Min(lo, Select(valid, y, Set1(FLT_MAX)));
    hi = Max(hi, Select(valid, y, Set1(lowest)));
  }
  // A normal number below all values, even where denormals are flushed to zero.
  const Vec margin = Max(Mul(Max(lo, Sub(Zero(), lo)), Set1(1e-6f)), Set1(FLT_MIN));
  lo = Max(Set1(-FLT_MAX), Sub(lo, margin));
  // Invariant: `above` <= want values are above hi; where above < want, more than want are above
  // lo.
  const Mask some = Greater(num, target);
  hi = Select(some, hi, lo);
  Vec above = Select(some, Zero(), target);
  while (true) {
    const Vec mid = Fma(Set1(0.5f), lo, Mul(Set1(0.5f), hi));
    if ((GreaterBits(target, above) & GreaterBits(mid, lo) & GreaterBits(hi, mid)) == 0) break;
    Vec count[4] = {Zero(), Zero(), Zero(), Zero()};
    int b = 0;
    for (; b + 4 <= n; b += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        count[i] = AddWhere(Greater(Load(x + (b + i) * ld), mid), count[i], Set1(1.0f));
    for (; b < n; ++b) count[0] = AddWhere(Greater(Load(x + b * ld), mid), count[0], Set1(1.0f));
    const Vec total = Add(Add(count[0], count[1]), Add(count[2], count[3]));
    // Rows that are done already stay so: between their lo and hi the count is never below want.
    const Mask too_many = Greater(total, target);
    lo = Select(too_many, mid, lo);
    hi = Select(too_many, hi, mid);
    above = Select(too_many, above, total);
  }
  const int words = (n + 63) / 64;
  for (int i = 0; i < 16 * words; ++i) chosen[i] = 0;
  for (int b0 = 0; b0 < n; b0 += 16) {
    // 16 bits of every row as a sum of powers of two.
    Vec sum = Zero();
    for (int b = b0; b < Smaller(n, b0 + 16); ++b)
      sum = AddWhere(Greater(Load(x + b * ld), hi), sum, Set1(static_cast<float>(1 << (b - b0))));
    alignas(64) float bits[16];
    Store(bits, sum);
    for (int i = 0; i < 16; ++i)
      chosen[i * words + b0 / 64] |= static_cast<uint64_t>(bits[i]) << (b0 % 64);
  }
  const uint32_t tied = GreaterBits(target, above);
  if (tied == 0) return;
  alignas(64) float least[16], most[16], sure[16];
  Store(least, lo);
  Store(most, hi);
  Store(sure, above);
  for (int i = 0; i < 16; ++i) {
    if ((tied >> i & 1) == 0) continue;
    // Between lo and hi all values are equal: of those keep the last.
    int ties = static_cast<int>(want[i] - sure[i]);
    for (int b = static_cast<int>(have[i]) - 1; ties > 0 && b >= 0; --b) {
      const float y = x[b * ld + i];
      if (!(y > least[i]) || y > most[i]) continue;
      chosen[i * words + b / 64] |= uint64_t{1} << (b % 64);
      --ties;
    }
  }
}

// Writes the positions of the set bits, ascending.
inline int16_t* WriteBits(const uint64_t* words, int64_t num_words, int16_t* out) {
  for (int64_t w = 0; w < num_words; ++w)
    for (uint64_t bits = words[w]; bits != 0; bits &= bits - 1)
      *out++ = static_cast<int16_t>(64 * w + __builtin_ctzll(bits));
  return out;
}

constexpr int kGateRows = kPanel;  // query rows whose logits are computed together
constexpr int64_t kGateStride = kGateRows + 16;

struct SelectScratch {
  SelectScratch(char* base, int64_t D, int64_t longest) : carver(base) {
    q = carver.Take<float>(kGateRows * D);
    gate = carver.Take<float>(longest * kGateStride);
    chosen = carver.Take<uint64_t>(16 * ((longest + 63) / 64));
  }
  Carver carver;
  float *q, *gate;
  uint64_t* chosen;
};

// means: [columns, D].
template <class E>
void MeanOfBlocks(const Problem& p, const MeanTask& task, Tensor<E> k, float* means) {
  const Head hd(p, task.sequence, task.head);
  const int64_t D = p.head_dim;
  float* mean = means + task.out * D;
  std::memset(mean, 0, static_cast<size_t>(task.count * D) * 4);
  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t t = (task.block + i) * hd.B; t < (task.block + i + 1) * hd.B; ++t)
      AddRow(mean + i * D, k.Row(hd.start + t, hd.kv), D, 1.0f / static_cast<float>(hd.B));
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
  int64_t block = task.begin / hd.B;
  for (int64_t row0 = task.begin * G; row0 < end; row0 += kGateRows) {
    const int M = static_cast<int>(Smaller<int64_t>(kGateRows, end - row0));
    const int64_t past = hd.Token(row0 + M - 1) / hd.B;
    const bool choice = past > least - 1;
    if (choice) {
      PackTransposed([&](int64_t i) { return hd.Row(q, row0 + i); }, M, D, 1.0f, x.q);
      for (int64_t row = row0 + M; row < Smaller(end, row0 + 2 * M); ++row)
        PrefetchRow(hd.Row(q, row), D);
      Gemm<false, Update::kSet>(static_cast<int>(past), M, static_cast<int>(D),
                                means + task.means * D, D, x.q, kPanel, D * kPanel, x.gate,
                                kGateStride);
    }
    for (int i0 = 0; i0 < M; i0 += 16) {
      const int n = Smaller(16, M - i0);
      alignas(64) float have[16] = {}, want[16] = {};
      int16_t* out[16];
      bool chooses = false;
      for (int i = 0; i < n; ++i) {
        const int64_t row = row0 + i0 + i, t = hd.Token(row), h = hd.QueryHead(row, t);
        while (t >= (block + 1) * hd.B) ++block;
        const int64_t k = Smaller<int64_t>(block, budget[h - hd.kv * G] - 1);
        have[i] = static_cast<float>(block);
        want[i] = static_cast<float>(k);
        out[i] = selection + (h * p.tokens + hd.start + t) * width;
        chooses = chooses || (0 < k && k < block);
      }
      const int64_t words = (block + 63) / 64;
      if (chooses)
        TopBlocks(x.gate + i0, kGateStride, static_cast<int>(block), have, want, x.chosen);
      for (int i = 0; i < n; ++i) {
        int16_t *next = out[i], *const stop = out[i] + width;
        if (chooses) {
          next = WriteBits(x.chosen + i * words, words, next);
        } else {
          for (int j = 0; j < static_cast<int>(want[i]); ++j) *next++ = static_cast<int16_t>(j);
        }
        while (next < stop) *next++ = -1;
      }
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
  ForEachTask(threads, mean_list.count, [&](int /*thread*/, int64_t i) {
    MeanOfBlocks<E>(p, mean_list.tasks[i], Tensor<E>(k), means);
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
