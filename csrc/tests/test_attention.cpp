// Selection, forward and backward of one instruction set against a double-precision loop, on odd
// shapes, with scratch memory poisoned by NaN.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"
#include "tests/expect.h"

namespace {

struct Setup {
  std::vector<int> lengths;
  int query_heads, kv_heads, head_dim, block_size;
  std::vector<int> budgets;  // per sequence; every other head gets one more
};

struct Run {
  std::vector<int32_t> cu{0}, budget;
  std::vector<float> q, k, v, dout, dlse;
  std::vector<int16_t> selection;
  std::vector<float> out, lse, dq, dk, dv;
  sb::Problem p{};
  int64_t query_stride,
      kv_stride;  // of a token: rows are wider than the heads need, as in a fused qkv
};

float NaN() { return std::numeric_limits<float>::quiet_NaN(); }

Run Execute(const Setup& s, int threads) {
  Run r;
  for (const int length : s.lengths) r.cu.push_back(r.cu.back() + length);
  int most = 1;
  for (const int k : s.budgets)
    for (int h = 0; h < s.query_heads; ++h) {
      r.budget.push_back(k + (h + 1) % 2);
      most = std::max(most, r.budget.back());
    }
  sb::Problem& p = r.p;
  p.tokens = r.cu.back();
  p.query_heads = s.query_heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = s.head_dim;
  p.sequences = static_cast<int64_t>(s.lengths.size());
  p.block_size = s.block_size;
  p.max_budget = most;
  p.cu_seqlens = r.cu.data();
  p.budget = r.budget.data();
  p.dtype = sb::Dtype::kFloat32;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  p.threads = threads;
  p.poison = true;
  const int64_t D = s.head_dim;
  r.query_stride = s.query_heads * D + 24;
  r.kv_stride = s.kv_heads * D + 8;
  sb::Random random(11);
  const auto fill = [&](std::vector<float>& x, int64_t n) {
    x.resize(static_cast<size_t>(n));
    for (float& y : x) y = random.Normal();
  };
  fill(r.q, p.tokens * r.query_stride);
  fill(r.k, p.tokens * r.kv_stride);
  fill(r.v, p.tokens * r.kv_stride);
  fill(r.dout, p.tokens * s.query_heads * D);
  fill(r.dlse, p.tokens * s.query_heads);
  const sb::View q{r.q.data(), r.query_stride, D}, k{r.k.data(), r.kv_stride, D},
      v{r.v.data(), r.kv_stride, D};
  sb::Check(p, -1);
  r.selection.assign(static_cast<size_t>(p.query_heads * p.tokens * (most - 1)), -9);
  sb::Select(p, q, k, r.selection.data());
  std::vector<int64_t> lists(
      static_cast<size_t>(sb::ListCapacity(p.tokens, p.sequences, p.kv_heads, p.block_size)) + 1);
  std::vector<int32_t> rows(r.selection.size() + 1);
  sb::Index(p, r.selection.data(), lists.data(), rows.data());
  r.out.assign(r.dout.size(), NaN());
  r.lse.assign(r.dlse.size(), NaN());
  r.dq.assign(r.dout.size(), NaN());
  r.dk.assign(static_cast<size_t>(p.tokens * p.kv_heads * D), NaN());
  r.dv = r.dk;
  sb::Forward(p, q, k, v, lists.data(), rows.data(), r.out.data(), r.lse.data());
  const sb::View dout{r.dout.data(), p.query_heads * D, D}, out{r.out.data(), p.query_heads * D, D};
  sb::Backward(p, dout, q, k, v, out, r.lse.data(), r.dlse.data(), lists.data(), rows.data(),
               {r.dq.data(), r.dk.data(), r.dv.data()});
  return r;
}

double Dot(const float* a, const float* b, int64_t D) {
  double sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(a[d]) * b[d];
  return sum;
}

// The count, the order, and that no block left out has a clearly higher logit.
void ExpectSelection(const Run& r, int64_t n, int64_t h, int64_t t, std::vector<bool>& attended) {
  const sb::Problem& p = r.p;
  const int64_t start = r.cu[n], B = p.block_size, D = p.head_dim,
                kv = h / (p.query_heads / p.kv_heads);
  const int64_t past = t / B, want = std::min<int64_t>(past, r.budget[n * p.query_heads + h] - 1);
  const int16_t* row = r.selection.data() + (h * p.tokens + start + t) * (p.max_budget - 1);
  attended.assign(static_cast<size_t>(past) + 1, false);
  attended[static_cast<size_t>(past)] = true;
  for (int64_t j = 0; j < p.max_budget - 1; ++j) {
    if (j >= want) {
      EXPECT(row[j] == -1, "padding is %d", row[j]);
      continue;
    }
    EXPECT(row[j] >= 0 && row[j] < past && (j == 0 || row[j] > row[j - 1]), "block %d of %d",
           row[j], static_cast<int>(past));
    attended[static_cast<size_t>(row[j])] = true;
  }
  double lowest_in = 1e300, highest_out = -1e300;
  for (int64_t b = 0; b < past; ++b) {
    double logit = 0;
    for (int64_t i = 0; i < B; ++i)
      logit += Dot(r.q.data() + (start + t) * r.query_stride + h * D,
                   r.k.data() + (start + b * B + i) * r.kv_stride + kv * D, D);
    logit /= static_cast<double>(B);
    if (attended[static_cast<size_t>(b)])
      lowest_in = std::min(lowest_in, logit);
    else
      highest_out = std::max(highest_out, logit);
  }
  EXPECT(highest_out - lowest_in < 1e-4, "a block with a higher logit was left out by %g",
         highest_out - lowest_in);
}

double Worst(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 1e-30;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - want[i]) <= 1e30)) return 1e30;  // NaN too
    error = std::max(error, std::fabs(got[i] - want[i]));
    size = std::max(size, std::fabs(want[i]));
  }
  return error / size;
}

void ExpectNaive(const Setup& s, const Run& r) {
  const sb::Problem& p = r.p;
  const int64_t D = p.head_dim, B = p.block_size, G = p.query_heads / p.kv_heads;
  std::vector<double> out(r.out.size()), lse(r.lse.size()), dq(r.dq.size()), dk(r.dk.size()),
      dv(r.dv.size());
  std::vector<bool> attended;
  for (int64_t n = 0; n < p.sequences; ++n)
    for (int64_t h = 0; h < p.query_heads; ++h)
      for (int64_t t = 0; t < r.cu[n + 1] - r.cu[n]; ++t) {
        ExpectSelection(r, n, h, t, attended);
        const int64_t start = r.cu[n], kv = h / G, row = ((start + t) * p.query_heads + h) * D;
        const float* q = r.q.data() + (start + t) * r.query_stride + h * D;
        std::vector<double> logit;
        std::vector<int64_t> key;
        for (int64_t j = 0; j <= t; ++j)
          if (attended[static_cast<size_t>(j / B)]) {
            key.push_back(start + j);
            logit.push_back(Dot(q, r.k.data() + (start + j) * r.kv_stride + kv * D, D) * p.scale);
          }
        const double top = *std::max_element(logit.begin(), logit.end());
        double sum = 0;
        for (const double x : logit) sum += std::exp(x - top);
        lse[h * p.tokens + start + t] = top + std::log(sum);
        double delta = -r.dlse[h * p.tokens + start + t];
        std::vector<double> prob, dprob;
        for (size_t i = 0; i < key.size(); ++i) {
          const float* v = r.v.data() + key[i] * r.kv_stride + kv * D;
          prob.push_back(std::exp(logit[i] - lse[h * p.tokens + start + t]));
          dprob.push_back(Dot(r.dout.data() + row, v, D));
          delta += prob[i] * dprob[i];
          for (int64_t d = 0; d < D; ++d) out[row + d] += prob[i] * v[d];
        }
        for (size_t i = 0; i < key.size(); ++i) {
          const double ds = prob[i] * (dprob[i] - delta) * p.scale;
          const float* k = r.k.data() + key[i] * r.kv_stride + kv * D;
          for (int64_t d = 0; d < D; ++d) {
            dq[row + d] += ds * k[d];
            dk[(key[i] * p.kv_heads + kv) * D + d] += ds * q[d];
            dv[(key[i] * p.kv_heads + kv) * D + d] += prob[i] * r.dout[row + d];
          }
        }
      }
  const double errors[] = {Worst(r.out, out), Worst(r.lse, lse), Worst(r.dq, dq), Worst(r.dk, dk),
                           Worst(r.dv, dv)};
  const char* names[] = {"out", "lse", "dq", "dk", "dv"};
  for (int i = 0; i < 5; ++i)
    EXPECT(errors[i] < 3e-6, "%s off by %g (heads %d/%d, D %d, B %d)", names[i], errors[i],
           s.query_heads, s.kv_heads, s.head_dim, s.block_size);
}

bool Same(const Run& a, const Run& b) {
  return a.selection == b.selection && a.out == b.out && a.lse == b.lse && a.dq == b.dq &&
         a.dk == b.dk && a.dv == b.dv;
}

// Two callers at once inside a parallel region, where OpenMP gives each a team of one.
void ExpectSameWhenNested(const Setup& s) {
  const Run alone = Execute(s, 1);
  bool same[2] = {false, false};
#pragma omp parallel for num_threads(2)
  for (int i = 0; i < 2; ++i) same[i] = Same(alone, Execute(s, 3));
  EXPECT(same[0] && same[1], "nested calls give other bits");
}

}  // namespace

int main(int argc, char** argv) {
  const char* isa = argc > 1 ? argv[1] : "baseline";
  if (sb::KernelsOf(isa) == nullptr) {
    std::printf("this CPU lacks %s\n", isa);
    return sb::kSkipped;
  }
  setenv("SB_CPU_ISA", isa, 1);
  EXPECT(std::string(sb::Kernels().name) == isa);
  const Setup setups[] = {
      {{300}, 2, 1, 64, 64, {2}},
      {{333, 1, 0, 65}, 4, 2, 64, 64, {3, 1, 2, 1}},
      {{200}, 7, 1, 32, 16, {4}},
      {{257, 100}, 4, 2, 128, 128, {1, 2}},
      {{129, 0, 320}, 3, 3, 128, 32, {3, 2, 6}},
      {{400}, 2, 2, 32, 48, {20}},   // dense
      {{300}, 2, 1, 64, 1024, {1}},  // a block longer than the sequence
      {{700}, 5, 1, 32, 16, {40}},   // dense for one head only
      {{}, 2, 1, 32, 16, {}},
      {{0, 0}, 2, 1, 32, 16, {1, 1}},
  };
  for (const Setup& s : setups) {
    const Run one = Execute(s, 1);
    ExpectNaive(s, one);
    for (const int threads : {2, 5})
      EXPECT(Same(one, Execute(s, threads)), "%d threads give other bits", threads);
  }
  ExpectSameWhenNested(setups[1]);
  return sb::failures == 0 ? 0 : 1;
}
