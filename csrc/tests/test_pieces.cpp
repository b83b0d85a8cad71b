// Tile products, exp2, conversions, packing and top-k of one instruction set (SB_ISA), against
// plain loops.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "attention/cpu/select.h"
#include "tests/expect.h"

namespace sb {
namespace SB_ISA {
namespace {

template <bool kTransA, Update kMode>
void TestGemm(int M, int N, int K, int panel) {
  Random random(static_cast<unsigned>(M * 131 + N * 17 + K));
  const int N16 = (N + 15) / 16 * 16, panels = (N + panel - 1) / panel,
            lda = kTransA ? M + 3 : K + 5, ldc = N16 + 7;
  std::vector<float> a(static_cast<size_t>(lda) * (kTransA ? K : M)),
      b(static_cast<size_t>(panels) * K * panel);
  std::vector<float> c(static_cast<size_t>(2 * M + 1) * ldc), alpha(static_cast<size_t>(M));
  for (auto* x : {&a, &b, &c, &alpha})
    for (float& y : *x) y = random.Normal();
  std::vector<int32_t> rows(static_cast<size_t>(M));
  for (int i = 0; i < M; ++i) rows[i] = 2 * i + 1;  // every other row, so that a wrong row shows
  constexpr bool kRows = kMode == Update::kAddRows || kMode == Update::kScaleAddRows;
  const std::vector<float> before = c;
  Gemm<kTransA, kMode>(M, N, K, a.data(), lda, b.data(), panel, static_cast<int64_t>(K) * panel,
                       c.data(), ldc, kRows ? rows.data() : nullptr,
                       kMode == Update::kScaleAddRows ? alpha.data() : nullptr);
  double worst = 0;
  for (int i = 0; i < M; ++i) {
    const int row = kRows ? rows[i] : i;
    for (int j = 0; j < N; ++j) {
      double want = 0;
      for (int k = 0; k < K; ++k)
        want += static_cast<double>(kTransA ? a[i + k * lda] : a[i * lda + k]) *
                b[static_cast<size_t>(j / panel) * K * panel + k * panel + j % panel];
      const double old = before[static_cast<size_t>(row) * ldc + j];
      if (kMode == Update::kScaleAddRows) want += old * alpha[i];
      if (kMode == Update::kAdd || kMode == Update::kAddRows) want += old;
      worst = std::max(worst, std::fabs(want - c[static_cast<size_t>(row) * ldc + j]));
    }
    for (int j = N16; j < ldc; ++j)
      EXPECT(c[static_cast<size_t>(row) * ldc + j] == before[static_cast<size_t>(row) * ldc + j],
             "wrote past N");
    if (kRows) {
      const size_t other = static_cast<size_t>(row - 1) * ldc;
      EXPECT(std::equal(c.begin() + other, c.begin() + other + ldc, before.begin() + other),
             "wrote another row");
    }
  }
  EXPECT(worst < 2e-5, "M %d N %d K %d: off by %g", M, N, K, worst);
}

void TestGemms() {
  for (const int M : {1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 48, 96})
    for (const int N : {1, 15, 16, 17, 31, 33, 48, 49, 64, 65, 100, 128})
      for (const int K : {1, 7, 64}) {
        TestGemm<false, Update::kSet>(M, N, K, kPanel);
        if (N % 16 == 0) {
          const int panel = std::min(kPanel, N);
          TestGemm<false, Update::kScaleAddRows>(M, N, K, panel);
          TestGemm<false, Update::kAddRows>(M, N, K, panel);
          TestGemm<true, Update::kAdd>(M, N, K, panel);
        }
      }
}

void TestExp2() {
  alignas(64) float x[16], y[16];
  double worst = 0;
  for (int i = -126 * 64; i <= 127 * 64; i += 16) {
    for (int j = 0; j < 16; ++j)
      x[j] = std::min(127.0f, static_cast<float>(i + j) / 64.0f + 0.0003f * j);
    Store(y, Exp2(Load(x)));
    for (int j = 0; j < 16; ++j)
      worst = std::max(worst, std::fabs(y[j] / std::exp2(static_cast<double>(x[j])) - 1));
  }
  EXPECT(worst < 2.5e-7, "relative error %g", worst);
  const float inf = std::numeric_limits<float>::infinity(),
              nan = std::numeric_limits<float>::quiet_NaN();
  const float special[16] = {0,      -0.0f, 1,   -1,   -126, -126.01f, -127,  -150,
                             -1e30f, -inf,  nan, -nan, 127,  0.5f,     -0.5f, 3};
  Store(y, Exp2(Load(special)));
  EXPECT(y[0] == 1 && y[1] == 1 && y[2] == 2 && y[3] == 0.5f && y[15] == 8);
  EXPECT(y[4] == 0x1p-126f, "%g", y[4]);
  for (int j = 5; j < 10; ++j)
    EXPECT(y[j] == 0, "2^%g is %g, a denormal or worse", special[j], y[j]);
  EXPECT(std::isnan(y[10]) && std::isnan(y[11]), "NaN was lost");
}

template <class E>
float Value(E x);
template <>
float Value(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
template <>
float Value(Fp16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float y = exponent == 31
                ? (fraction != 0 ? NAN : INFINITY)
                : std::ldexp(static_cast<float>(exponent > 0 ? fraction + 1024 : fraction),
                             std::max(exponent, 1) - 25);
  return x.bits >> 15 ? -y : y;
}

// Every 16-bit value loads as itself, stores as itself, and what lies between two goes to the
// nearest, ties to even.
template <class E>
void TestHalf() {
  E from[16], to[16];
  alignas(64) float x[16];
  for (int base = 0; base < 0x10000; base += 16) {
    for (int j = 0; j < 16; ++j) from[j].bits = static_cast<uint16_t>(base + j);
    Store(x, Load(from));
    Store(to, Load(x));
    for (int j = 0; j < 16; ++j) {
      const float want = Value(from[j]);
      if (std::isnan(want)) {
        EXPECT(std::isnan(x[j]) && std::isnan(Value(to[j])), "%x: NaN was lost", from[j].bits);
        continue;
      }
      EXPECT(x[j] == want && to[j].bits == from[j].bits, "%x: %g, stored as %x", from[j].bits, x[j],
             to[j].bits);
      E next = from[j];
      ++next.bits;
      if ((next.bits & 0x7fff) == 0 || !std::isfinite(Value(next))) continue;
      const double a = want, b = Value(next), middle = (a + b) / 2;
      // The exact middle between two 16-bit values, and a hundredth of the gap to either side.
      const double off = (b - a) / 100;
      alignas(64) float near[16] = {static_cast<float>(middle - off), static_cast<float>(middle),
                                    static_cast<float>(middle + off)};
      E rounded[16];
      Store(rounded, Load(near));
      const uint16_t even = from[j].bits & 1 ? next.bits : from[j].bits;
      EXPECT(rounded[1].bits == even, "%g rounds to %x", near[1], rounded[1].bits);
      // Among the smallest bf16 values fp32 cannot tell the sides apart.
      if (std::fabs(middle) > 1e-38)
        EXPECT(rounded[0].bits == from[j].bits && rounded[2].bits == next.bits, "%g or %g", near[0],
               near[2]);
    }
  }
  x[0] = std::numeric_limits<float>::max();
  Store(to, Load(x));
  EXPECT(std::isinf(Value(to[0])), "the largest float is %g", Value(to[0]));
}

void TestPacking() {
  const int n = 37, padded = 48, D = 32, ld = 40;
  std::vector<float> x(n * ld), t((padded + kPanel) * D), r(n * D);
  for (int i = 0; i < n * ld; ++i) x[i] = static_cast<float>(i);
  PackTransposed(x.data(), ld, n, D, 3.0f, t.data());
  PackRows(x.data(), ld, n, D, r.data());
  const int panel = static_cast<int>(HeadPanel(D));
  for (int i = 0; i < padded; ++i)
    for (int d = 0; d < D; ++d) {
      EXPECT(
          t[i / kPanel * kPanel * D + d * kPanel + i % kPanel] == (i < n ? 3 * x[i * ld + d] : 0),
          "key %d dim %d", i, d);
      if (i < n)
        EXPECT(r[d / panel * panel * n + i * panel + d % panel] == x[i * ld + d], "row %d dim %d",
               i, d);
    }
}

// Sixteen rows at once: row i holds x rotated by i and chooses among fewer of its values.
void TestTopBlocksOf(const std::vector<float>& x, int want) {
  const int n = static_cast<int>(x.size()), ld = 20, words = (n + 63) / 64;
  std::vector<float> gate(static_cast<size_t>(n) * ld, NAN);
  float have[16], number[16];
  std::vector<uint64_t> chosen(static_cast<size_t>(16 * words), ~uint64_t{0});
  std::vector<std::vector<bool>> expected(16);
  for (int i = 0; i < 16; ++i) {
    const int m = i == 15 ? 0 : n - i % 3 * std::min(n / 4, 5), k = std::min(want, m);
    have[i] = static_cast<float>(m);
    number[i] = static_cast<float>(k);
    std::vector<float> row;
    std::vector<int> order;
    for (int b = 0; b < m; ++b) {
      row.push_back(x[static_cast<size_t>((b + i) % n)]);
      order.push_back(b);
      gate[static_cast<size_t>(b) * ld + i] = row.back();
    }
    const auto rank = [&](int b) { return std::isnan(row[b]) ? -INFINITY : row[b]; };
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a > b; });
    expected[i].assign(static_cast<size_t>(n), false);
    for (int j = 0; j < k; ++j) expected[i][order[j]] = true;
  }
  TopBlocks(gate.data(), ld, n, have, number, chosen.data());
  for (int i = 0; i < 16; ++i) {
    std::vector<int16_t> got(static_cast<size_t>(n) + 1, -9);
    const int16_t* end = WriteBits(chosen.data() + i * words, words, got.data());
    std::vector<int16_t> sorted;
    for (int b = 0; b < n; ++b)
      if (expected[i][b]) sorted.push_back(static_cast<int16_t>(b));
    EXPECT(end - got.data() == static_cast<int64_t>(sorted.size()), "n %d want %d row %d: %d", n,
           want, i, static_cast<int>(end - got.data()));
    got.resize(sorted.size());
    EXPECT(got == sorted, "n %d want %d row %d", n, want, i);
  }
}

void TestTopBlocks() {
  Random random(3);
  for (const int n : {2, 3, 15, 16, 17, 31, 32, 33, 64, 129, 500})
    for (int round = 0; round < 12; ++round) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& y : x) {
        switch (round) {
          case 0:
            y = 1.5f;  // all equal
            break;
          case 1:
            y = static_cast<float>(random.Below(3));  // many ties
            break;
          case 2:
            y = NAN;
            break;
          case 3:
            y = random.Below(4) == 0 ? NAN : random.Normal();
            break;
          case 4:
            y = random.Below(3) == 0 ? -INFINITY
                                     : (random.Below(3) == 0 ? INFINITY : random.Normal());
            break;
          case 5:
            y = random.Normal() * 1e-40f;  // denormal
            break;
          case 6:
            y = random.Normal() * 1e37f;
            break;
          case 7:
            y = random.Below(2) == 0 ? 0.0f : -0.0f;
            break;
          case 8:
            y = 1.0f + static_cast<float>(random.Below(4)) * 0x1p-23f;  // neighbours
            break;
          default:
            y = random.Normal();
        }
      }
      for (const int want : {0, 1, n / 2, n - 1, n}) TestTopBlocksOf(x, want);
    }
}

void TestSoftmaxOfRowsWithoutAnyScore() {
  // A block whose scores are all -inf must not spoil what another block adds.
  alignas(64) float s[16], max[1] = {kLowest}, sum[1] = {0}, alpha[16];
  const int32_t row[16] = {0};
  for (float& x : s) x = kNegInf;
  Softmax16(s, 16, 1, 16, row, max, sum, alpha);
  EXPECT(sum[0] == 0 && s[0] == 0, "sum %g", sum[0]);
  for (float& x : s) x = 2.0f;
  Softmax16(s, 16, 1, 16, row, max, sum, alpha);
  EXPECT(sum[0] == 16 && max[0] == 2 && s[3] == 1, "sum %g max %g", sum[0], max[0]);
}

void TestRowNumbers() {
  const int32_t cu[2] = {0, 1 << 20};
  for (int64_t G = 1; G <= 130; ++G) {
    Problem p{};
    p.query_heads = G;
    p.kv_heads = 1;
    p.block_size = 64;
    p.cu_seqlens = cu;
    const Head hd(p, 0, 0);
    for (int64_t row = (int64_t{1} << 31) - 400; row < int64_t{1} << 31; ++row)
      EXPECT(hd.Token(row) == row / G, "G %d", static_cast<int>(G));
    for (int64_t row = 0; row < 400; ++row)
      EXPECT(hd.Token(row) == row / G, "G %d", static_cast<int>(G));
  }
}

}  // namespace

void TestPieces();
void TestPieces() {
  TestGemms();
  TestExp2();
  TestHalf<Bf16>();
  TestHalf<Fp16>();
  TestPacking();
  TestTopBlocks();
  TestSoftmaxOfRowsWithoutAnyScore();
  TestRowNumbers();
}

}  // namespace SB_ISA
}  // namespace sb

extern "C" int sb_test_pieces() {
  sb::SB_ISA::TestPieces();
  return sb::failures;
}
