// Mass by rank of one instruction set against a double-precision loop, with scratch memory poisoned
// by NaN; NaN and infinite logits; and the same bits from any number of threads.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"
#include "tests/expect.h"
#include "tuning/sampling.h"

namespace {

struct Setup {
  std::vector<int> lengths;
  int query_heads, kv_heads, head_dim, block_size, row_stride;
  int max_rank = 0;  // 0: all
};

struct Run {
  std::vector<int32_t> cu{0};
  std::vector<float> q, k, mass;
  sb::Problem p{};
  int64_t row_stride, max_rank;
};

Run Prepare(const Setup& s) {
  Run r;
  int longest = 0;
  for (const int length : s.lengths) {
    r.cu.push_back(r.cu.back() + length);
    longest = std::max(longest, length);
  }
  sb::Problem& p = r.p;
  p.tokens = r.cu.back();
  p.query_heads = s.query_heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = s.head_dim;
  p.sequences = static_cast<int64_t>(s.lengths.size());
  p.block_size = s.block_size;
  p.dtype = sb::Dtype::kFloat32;
  p.poison = true;
  p.cu_seqlens = r.cu.data();
  r.row_stride = s.row_stride;
  r.max_rank = s.max_rank > 0 ? s.max_rank : (longest + s.block_size - 1) / s.block_size;
  sb::Random random(5);
  r.q.resize(static_cast<size_t>(p.tokens * s.query_heads * s.head_dim));
  r.k.resize(static_cast<size_t>(p.tokens * s.kv_heads * s.head_dim));
  for (float& x : r.q) x = 2 * random.Normal();
  for (float& x : r.k) x = 2 * random.Normal();
  return r;
}

void Execute(Run& r, int threads) {
  r.p.cu_seqlens = r.cu.data();
  r.p.threads = threads;
  r.mass.assign(static_cast<size_t>(r.p.sequences * r.p.query_heads * r.max_rank), NAN);
  const int64_t D = r.p.head_dim;
  sb::Coverage(r.p, {r.q.data(), r.p.query_heads * D, D}, {r.k.data(), r.p.kv_heads * D, D},
               r.row_stride, r.max_rank, r.mass.data());
}

// Mass of one sequence and head, and the number of its rows.
std::vector<double> Naive(const Run& r, int64_t n, int64_t h, int64_t* num_rows) {
  const sb::Problem& p = r.p;
  const int64_t D = p.head_dim, B = p.block_size, start = r.cu[n], length = r.cu[n + 1] - start;
  const int64_t kv = h / (p.query_heads / p.kv_heads);
  std::vector<double> mass(static_cast<size_t>(length / B + 1));
  *num_rows = 0;
  for (int64_t t = B; t < length; ++t) {
    if (t % r.row_stride != 0 && (t + 1) % B != 0 && t + 1 != length) continue;
    ++*num_rows;
    std::vector<double> share;
    for (int64_t b = 0; b < t / B; ++b) {
      double logit = 0;
      for (int64_t d = 0; d < D; ++d) {
        double mean = 0;
        for (int64_t i = b * B; i < (b + 1) * B; ++i)
          mean += r.k[((start + i) * p.kv_heads + kv) * D + d];
        logit += r.q[((start + t) * p.query_heads + h) * D + d] * mean / static_cast<double>(B);
      }
      share.push_back(logit / std::sqrt(static_cast<double>(D)));
    }
    const double most = *std::max_element(share.begin(), share.end());
    double sum = 0;
    for (double& x : share) sum += x = std::exp(x - most);
    std::sort(share.rbegin(), share.rend());
    for (size_t j = 0; j < share.size(); ++j) mass[j] += share[j] / sum;
  }
  for (double& x : mass) x /= static_cast<double>(std::max<int64_t>(*num_rows, 1));
  return mass;
}

void ExpectShares(const Run& r) {
  for (int64_t row = 0; row < r.p.sequences * r.p.query_heads; ++row) {
    const float* mass = r.mass.data() + row * r.max_rank;
    double total = 0;
    for (int64_t j = 0; j < r.max_rank; ++j) {
      EXPECT(mass[j] >= 0 && (j == 0 || mass[j] <= mass[j - 1]), "row %d rank %d: %g",
             static_cast<int>(row), static_cast<int>(j), mass[j]);
      total += mass[j];
    }
    EXPECT(total <= 1, "row %d: the total is 1 + %g", static_cast<int>(row), total - 1);
  }
}

void ExpectNaive(const Run& r) {
  for (int64_t n = 0; n < r.p.sequences; ++n)
    for (int64_t h = 0; h < r.p.query_heads; ++h) {
      int64_t rows;
      const std::vector<double> want = Naive(r, n, h, &rows);
      const int64_t length = r.cu[n + 1] - r.cu[n];
      EXPECT(rows == sb::SampledRows(length, r.p.block_size, r.row_stride), "length %d",
             static_cast<int>(length));
      const float* mass = r.mass.data() + (n * r.p.query_heads + h) * r.max_rank;
      for (int64_t j = 0; j < r.max_rank; ++j) {
        const double expected = j < static_cast<int64_t>(want.size()) ? want[j] : 0;
        EXPECT(std::fabs(mass[j] - expected) < 2e-6, "sequence %d head %d rank %d: %g, not %g",
               static_cast<int>(n), static_cast<int>(h), static_cast<int>(j), mass[j], expected);
      }
    }
}

void ExpectSameForAnyThreads(Run r) {
  const std::vector<float> one = r.mass;
  for (const int threads : {2, 3, 8}) {
    Execute(r, threads);
    EXPECT(r.mass == one, "%d threads", threads);  // no NaN: ExpectShares
  }
}

// NaN ranks last and -inf likewise, +inf first: what is left must still be shares.
void TestBadLogits() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (const float bad : {nan, inf, -inf, 3e38f, -3e38f})
    for (const bool in_all : {false, true}) {
      Run r = Prepare({{200}, 1, 1, 32, 32, 1});
      for (float& x : r.q) x = 1.0f;
      for (size_t i = 0; i < r.k.size(); ++i) r.k[i] = in_all || i / 32 / 32 == 2 ? bad : 0.0f;
      Execute(r, 2);
      ExpectShares(r);
      double total = 0;
      for (const float x : r.mass) total += x;
      EXPECT(total > 1 - 1e-5, "%g: %g is left", bad, total);
      // Rows see 1 to 6 blocks. A block that ranks last leaves the others equal; a first takes all.
      if (!in_all && !(bad > 0)) {
        int64_t rows;
        double want = 0;
        Naive(r, 0, 0, &rows);
        for (int t = 32; t < 200; ++t) want += 1.0 / (t / 32 - (t / 32 > 2 ? 1 : 0)) / 168;
        EXPECT(std::fabs(r.mass[0] - want) < 1e-5, "%g: %g, not %g", bad, r.mass[0], want);
      }
    }
}

}  // namespace

int main(int argc, char** argv) {
  const char* isa = argc > 1 ? argv[1] : "baseline";
  if (sb::KernelsOf(isa) == nullptr) {
    std::printf("this CPU lacks %s\n", isa);
    return sb::kSkipped;
  }
  setenv("SB_CPU_ISA", isa, 1);
  const Setup setups[] = {
      {{300}, 2, 1, 64, 64, 64},
      {{333, 1, 0, 65, 64}, 4, 2, 64, 64, 64},
      {{1100}, 1, 1, 32, 16, 1},  // every number of blocks up to 68
      {{1100}, 3, 1, 32, 16, 7, 5},
      {{257, 900}, 4, 2, 128, 128, 64},
      {{129, 0, 320}, 3, 3, 128, 32, 64, 40},  // more ranks than there are
      {{400}, 2, 2, 32, 48, 64},
      {{300}, 2, 1, 64, 1024, 64},  // one block
      {{}, 2, 1, 32, 16, 64, 3},
      {{0, 0}, 2, 1, 32, 16, 64, 3},
      {std::vector<int>(40, 50), 4, 2, 32, 16, 64},
  };
  for (const Setup& s : setups) {
    Run r = Prepare(s);
    Execute(r, 1);
    ExpectNaive(r);
    ExpectShares(r);
    ExpectSameForAnyThreads(r);
  }
  // Long enough that several threads run.
  const Setup long_setups[] = {
      {{9000}, 4, 2, 32, 16, 64},
      {std::vector<int>(300, 50), 4, 2, 32, 16, 64},
      {{2000, 33, 0, 1, 3000}, 7, 7, 32, 32, 64},
  };
  for (const Setup& s : long_setups) {
    Run r = Prepare(s);
    Execute(r, 1);
    ExpectShares(r);
    ExpectSameForAnyThreads(r);
  }
  TestBadLogits();
  return sb::failures == 0 ? 0 : 1;
}
