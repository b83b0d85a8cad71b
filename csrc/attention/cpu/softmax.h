// Online softmax of gathered rows, and its gradient.
#pragma once

#include "attention/cpu/rows.h"

namespace sb {
namespace SB_ISA {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kNegInf = -__builtin_inff();
// The running maximum starts here and not at -inf, so that a row whose scores so far are all -inf
// stays defined.
constexpr float kLowest = -__FLT_MAX__;

// Up to 16 rows of base-2 scores s[n, cols], cols a multiple of 16. s becomes probabilities
// relative to the new running maximum; alpha is the factor by which what was accumulated before
// must shrink. max and sum are indexed by `rows`.
inline void Softmax16(float* s, int64_t lds, int n, int cols, const int32_t* rows, float* max,
                      float* sum, float* alpha) {
  const Vec old_max = Gather(max, rows, n);
  Vec v[16];
  for (int i = 0; i < 16; ++i) {
    const float* p = s + (i < n ? i : 0) * lds;
    Vec x = Load(p);
    for (int j = 16; j < cols; j += 16) x = Max(x, Load(p + j));
    v[Slot(i)] = x;
  }
  const Vec new_max =
      Max(old_max, ReduceRows(v, [](reg::Float a, reg::Float b) { return reg::Max(a, b); }));
  const Vec shrink = Exp2(Sub(old_max, new_max));
  alignas(64) float row_max[16];
  Store(row_max, new_max);
  for (int i = 0; i < n; ++i) {
    float* p = s + i * lds;
    const Vec m = Set1(row_max[i]);
    Vec total = Zero();
#pragma GCC unroll 2
    for (int j = 0; j < cols; j += 16) {
      const Vec e = Exp2(Sub(Load(p + j), m));
      total = Add(total, e);
      Store(p + j, e);
    }
    v[Slot(i)] = total;
  }
  for (int i = n; i < 16; ++i) v[Slot(i)] = Zero();
  const Vec total = ReduceRows(v, [](reg::Float a, reg::Float b) { return reg::Add(a, b); });
  const Vec old_sum = Gather(sum, rows, n);
  Scatter(max, rows, n, new_max);
  Scatter(sum, rows, n, Fma(old_sum, shrink, total));
  StoreFirst(alpha, n, shrink);
}

// s: base-2 scores -> P; dp: dO V^T -> dS = P * (dP - delta). Columns from valid to cols become 0.
inline void GradRow(float* s, float* dp, int valid, int cols, float lse2, float delta) {
  const Vec l = Set1(lse2), d = Set1(delta);
  const int full = valid & ~15;
  int j = 0;
  for (; j < full; j += 16) {
    const Vec p = Exp2(Sub(Load(s + j), l));
    Store(s + j, p);
    Store(dp + j, Mul(p, Sub(Load(dp + j), d)));
  }
  if (valid & 15) {
    const Mask tail = FirstLanes(valid & 15);
    const Vec p = Exp2(Sub(Load(s + j), l));
    Store(s + j, Select(tail, p, Zero()));
    Store(dp + j, Select(tail, Mul(p, Sub(Load(dp + j), d)), Zero()));
    j += 16;
  }
  for (; j < cols; j += 16) {
    Store(s + j, Zero());
    Store(dp + j, Zero());
  }
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
