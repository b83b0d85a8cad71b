// Row-wise pieces: load and store with conversion, packing, dot product.
#pragma once

#include "attention/cpu/gemm.h"
#include "attention/cpu/shuffle.h"

namespace sb {
namespace SB_ISA {
namespace {

template <class T>
inline T Smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T Larger(T a, T b) {
  return a < b ? b : a;
}
inline int64_t RoundUp(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

template <class E>
inline void LoadRow(const E* p, float* out, int64_t D) {
  for (int64_t d = 0; d < D; d += 16) Store(out + d, Load(p + d));
}
template <class E>
inline void AddRow(float* sum, const E* p, int64_t D, float weight) {
  const Vec w = Set1(weight);
  for (int64_t d = 0; d < D; d += 16) Store(sum + d, Fma(Load(p + d), w, Load(sum + d)));
}
template <class E>
inline void StoreRow(const float* p, E* out, int64_t D, float scale) {
  const Vec s = Set1(scale);
  for (int64_t d = 0; d < D; d += 16) Store(out + d, Mul(Load(p + d), s));
}
template <class E>
inline float Dot(const E* a, const E* b, int64_t D) {
  Vec sum = Zero();
  for (int64_t d = 0; d < D; d += 16) sum = Fma(Load(a + d), Load(b + d), sum);
  return ReduceAdd(sum);
}
template <class E>
inline void PrefetchRow(const E* p, int64_t D) {
  const char* c = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < D * static_cast<int64_t>(sizeof(E)); i += 64)
    __builtin_prefetch(c + i, 0, 2);
}

// The same for a row that will be written.
template <class E>
inline void PrefetchForWrite(const E* p, int64_t D) {
  const char* c = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < D * static_cast<int64_t>(sizeof(E)); i += 64)
    __builtin_prefetch(c + i, 1, 2);
}

// Rows row(0) .. row(n - 1) of D elements -> scale * their transpose in panels of kPanel columns:
// out[i / kPanel][D][kPanel]; columns from n to the next multiple of 16 are 0.
template <class Row>
void PackTransposed(Row row, int64_t n, int64_t D, float scale, float* out) {
  const Vec s = Set1(scale);
  for (int64_t k0 = 0; k0 < n; k0 += 16) {
    float* panel = out + k0 / kPanel * kPanel * D + k0 % kPanel;
    // What lies past the end is read from the last row and then dropped.
    decltype(row(k0)) from[16];
    for (int i = 0; i < 16; ++i) from[i] = row(Smaller(k0 + i, n - 1));
    const int have = static_cast<int>(n - k0);
    for (int64_t d0 = 0; d0 < D; d0 += 16) {
      Vec r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = Mul(Load(from[i] + d0), s);
      if (have < 16)
        for (int i = have; i < 16; ++i) r[i] = Zero();
      Transpose16(r, panel + d0 * kPanel, kPanel);
    }
  }
}
template <class E>
void PackTransposed(const E* x, int64_t ld, int64_t n, int64_t D, float scale, float* out) {
  PackTransposed([=](int64_t i) { return x + i * ld; }, n, D, scale, out);
}

// Columns of a panel that is cut along the head dimension.
inline int64_t HeadPanel(int64_t D) { return Smaller<int64_t>(kPanel, D); }

// x[n, D] as panels of columns: out[d / panel][n][panel].
template <class E>
void PackRows(const E* x, int64_t ld, int64_t n, int64_t D, float* out) {
  const int64_t panel = HeadPanel(D);
  for (int64_t p = 0; p < D; p += panel)
    for (int64_t i = 0; i < n; ++i, out += panel)
      for (int64_t d = 0; d < panel; d += 16) Store(out + d, Load(x + i * ld + p + d));
}

// Columns from valid to cols become x; cols is a multiple of 16.
inline void FillTail(float* s, int valid, int cols, float x) {
  for (int j = valid & ~15; j < cols; j += 16)
    Store(s + j, Select(FirstLanes(valid - j), Load(s + j), Set1(x)));
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
