// Register-blocked fp32 tile products: C[M, N] (op)= A[M, K] * B[K, N].
#pragma once

#include "attention/cpu/simd.h"

namespace sb {
namespace SB_ISA {
namespace {

enum class Update { kSet, kAdd, kScaleAddRows, kAddRows };

constexpr int kPanel = 16 * kTileN;  // columns of B that are packed together
constexpr int kRegsPer16 = 16 / reg::kLanes;

// C[MR, NV * 16]. Element (i, k) of A is a[i * lda + k], or a[i + k * lda] with kTransA. Row i of C
// starts at c + i * ldc, or at c + rows[i] * ldc for the ...Rows modes (scatter to gathered rows).
template <int MR, int NV, bool kTransA, Update kMode>
__attribute__((noinline)) void MicroTile(const float* __restrict a, int64_t lda,
                                         const float* __restrict b, int64_t ldb, int K,
                                         float* __restrict c, int64_t ldc, const int32_t* rows,
                                         const float* alpha) {
  constexpr int NR = NV * kRegsPer16, W = reg::kLanes;
  reg::Float acc[MR][NR];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) acc[i][j] = reg::Set1(0.0f);
#pragma GCC unroll 2
  for (int k = 0; k < K; ++k) {
    reg::Float bv[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) bv[j] = reg::Load(b + W * j);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const reg::Float av = reg::Set1(kTransA ? a[i] : a[i * lda]);
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) acc[i][j] = reg::Fma(av, bv[j], acc[i][j]);
    }
    b += ldb;
    a += kTransA ? lda : 1;
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    constexpr bool kRows = kMode == Update::kScaleAddRows || kMode == Update::kAddRows;
    float* p = kRows ? c + rows[i] * ldc : c + i * ldc;
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) {
      reg::Float r = acc[i][j];
      if constexpr (kMode == Update::kAdd || kMode == Update::kAddRows)
        r = reg::Add(r, reg::Load(p + W * j));
      if constexpr (kMode == Update::kScaleAddRows)
        r = reg::Fma(reg::Load(p + W * j), reg::Set1(alpha[i]), r);
      reg::Store(p + W * j, r);
    }
  }
}

template <int NV, bool kTransA, Update kMode, int MR = kTileM>
inline void TileOfRows(int mr, const float* a, int64_t lda, const float* b, int64_t ldb, int K,
                       float* c, int64_t ldc, const int32_t* rows, const float* alpha) {
  if constexpr (MR > 0) {
    if (mr == MR) return MicroTile<MR, NV, kTransA, kMode>(a, lda, b, ldb, K, c, ldc, rows, alpha);
    TileOfRows<NV, kTransA, kMode, MR - 1>(mr, a, lda, b, ldb, K, c, ldc, rows, alpha);
  }
}

template <int NV, bool kTransA, Update kMode>
void GemmPanel(int M, int K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
               int64_t ldc, const int32_t* rows, const float* alpha) {
  for (int m = 0; m < M;) {
    const int left = M - m;
    // Spread the remainder over two tiles: 6 + 1 would run the last row at a sixth of the speed.
    const int mr =
        left >= 2 * kTileM || left == kTileM ? kTileM : (left > kTileM ? (left + 1) / 2 : left);
    TileOfRows<NV, kTransA, kMode>(mr, kTransA ? a + m : a + m * lda, lda, b, ldb, K,
                                   rows ? c : c + m * ldc, ldc, rows ? rows + m : nullptr,
                                   alpha ? alpha + m : nullptr);
    m += mr;
  }
}

// B is cut into panels of kPanel columns: panel p starts at b + p * panel_stride and has rows of
// stride ldb. The panel is the outer loop, so that it stays in L1 while A streams. N counts up to
// whole vectors of 16: what lies between N and the next multiple of 16 is computed and written too.
template <bool kTransA, Update kMode>
void Gemm(int M, int N, int K, const float* a, int64_t lda, const float* b, int64_t ldb,
          int64_t panel_stride, float* c, int64_t ldc, const int32_t* rows = nullptr,
          const float* alpha = nullptr) {
  for (int n = 0; n < N; n += kPanel, b += panel_stride) {
    if constexpr (kTileN >= 4) {
      const int vectors = (N - n + 15) / 16;
      if (vectors == 1) {
        GemmPanel<1, kTransA, kMode>(M, K, a, lda, b, ldb, c + n, ldc, rows, alpha);
        continue;
      }
      if (vectors == 2) {
        GemmPanel<2, kTransA, kMode>(M, K, a, lda, b, ldb, c + n, ldc, rows, alpha);
        continue;
      }
      if (vectors == 3) {
        GemmPanel<3, kTransA, kMode>(M, K, a, lda, b, ldb, c + n, ldc, rows, alpha);
        continue;
      }
    }
    GemmPanel<kTileN, kTransA, kMode>(M, K, a, lda, b, ldb, c + n, ldc, rows, alpha);
  }
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
