// Selection, forward and backward of one instruction set against a double-precision loop, on odd
// shapes, with scratch memory poisoned by NaN; and the same bits from any number of threads.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/dispatch.h"
#include "attention/cpu/parallel.h"
#include "tests/expect.h"

namespace {

struct Setup {
  std::vector<int> lengths;
  int query_heads, kv_heads, head_dim, block_size;
  std::vector<int> budgets;               // per sequence; every other head gets one more
  sb::Dtype dtype = sb::Dtype::kFloat32;  // or kBfloat16
};

struct Run {
  std::vector<int32_t> cu{0}, budget;
  std::vector<float> q, k, v, dout, dlse;
  std::vector<int16_t> selection;
  std::vector<int64_t> lists;
  std::vector<int32_t> rows;
  std::vector<float> out, lse, dq, dk, dv;
  sb::Problem p{};
  int64_t query_stride,
      kv_stride;  // of a token: rows are wider than the heads need, as in a fused qkv
};

// What the kernels are given of a tensor: its floats, or a copy in bf16, of exactly its size.
class Memory {
 public:
  Memory(std::vector<float>& values, sb::Dtype dtype) : values_(values) {
    if (dtype == sb::Dtype::kFloat32) return;
    half_.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &values[i], 4);
      half_[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  void* data() {
    return half_.empty() ? static_cast<void*>(values_.data()) : static_cast<void*>(half_.data());
  }
  // Makes the floats what the memory holds.
  void Read() {
    for (size_t i = 0; i < half_.size(); ++i) {
      const uint32_t bits = static_cast<uint32_t>(half_[i]) << 16;
      std::memcpy(&values_[i], &bits, 4);
    }
  }

 private:
  std::vector<float>& values_;
  std::vector<uint16_t> half_;
};

float NaN() { return std::numeric_limits<float>::quiet_NaN(); }

// A run with its inputs and nothing else.
Run Prepare(const Setup& s) {
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
  p.dtype = s.dtype;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
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
  return r;
}

Run Execute(Run r, int threads) {
  sb::Problem& p = r.p;
  p.cu_seqlens = r.cu.data();
  p.budget = r.budget.data();
  p.threads = threads;
  const int64_t D = p.head_dim;
  Memory qm(r.q, p.dtype), km(r.k, p.dtype), vm(r.v, p.dtype), doutm(r.dout, p.dtype);
  for (Memory* x : {&qm, &km, &vm, &doutm}) x->Read();
  const sb::View q{qm.data(), r.query_stride, D}, k{km.data(), r.kv_stride, D},
      v{vm.data(), r.kv_stride, D};
  sb::Check(p, -1);
  r.selection.assign(static_cast<size_t>(p.query_heads * p.tokens * (p.max_budget - 1)), -9);
  sb::Select(p, q, k, r.selection.data());
  r.lists.assign(
      static_cast<size_t>(sb::ListCapacity(p.tokens, p.sequences, p.kv_heads, p.block_size)) + 1,
      -9);
  r.rows.assign(r.selection.size(), -9);
  sb::Index(p, r.selection.data(), r.lists.data(), r.rows.data());
  sb::CheckIndex(p, r.lists.data(), r.rows.data());
  r.out.assign(r.dout.size(), NaN());
  r.lse.assign(r.dlse.size(), NaN());
  r.dq.assign(r.dout.size(), NaN());
  r.dk.assign(static_cast<size_t>(p.tokens * p.kv_heads * D), NaN());
  r.dv = r.dk;
  Memory outm(r.out, p.dtype), dqm(r.dq, p.dtype), dkm(r.dk, p.dtype), dvm(r.dv, p.dtype);
  sb::Forward(p, q, k, v, r.lists.data(), r.rows.data(), outm.data(), r.lse.data());
  const sb::View dout{doutm.data(), p.query_heads * D, D}, out{outm.data(), p.query_heads * D, D};
  sb::Backward(p, dout, q, k, v, out, r.lse.data(), r.dlse.data(), r.lists.data(), r.rows.data(),
               {dqm.data(), dkm.data(), dvm.data()});
  for (Memory* x : {&outm, &dqm, &dkm, &dvm}) x->Read();
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
    EXPECT(errors[i] < (s.dtype == sb::Dtype::kFloat32 ? 3e-6 : 1e-2),
           "%s off by %g (heads %d/%d, D %d, B %d)", names[i], errors[i], s.query_heads, s.kv_heads,
           s.head_dim, s.block_size);
}

bool Same(const Run& a, const Run& b) {
  return a.selection == b.selection && a.lists == b.lists && a.rows == b.rows && a.out == b.out &&
         a.lse == b.lse && a.dq == b.dq && a.dk == b.dk && a.dv == b.dv;
}

void ExpectSameForAnyThreads(const Run& one) {
  for (const int threads : {2, 4, 16})
    EXPECT(Same(one, Execute(one, threads)), "%d threads give other bits", threads);
}

// Chunks of one block, of an odd number of tokens, of a whole long sequence.
void ExpectSameForAnyChunk(const Run& one) {
  for (const int chunk : {1, 300, 1100, 1 << 20}) {
    Run other = one;
    other.p.chunk = chunk;
    EXPECT(Same(one, Execute(other, 3)), "chunks of %d tokens give other bits", chunk);
  }
}

#if defined(SB_THREAD_SANITIZER)
constexpr bool kCompareValues = false;  // a long loop on one thread; other builds run it
#else
constexpr bool kCompareValues = true;
#endif

// Two callers at once inside a parallel region, where OpenMP may give each a team of one.
void ExpectSameWhenNested(const Run& alone) {
  bool same[2] = {false, false};
  sb::ForEachTask(2, 2, [&](int, int64_t i) { same[i] = Same(alone, Execute(alone, 3)); });
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
      {{270, 64}, 6, 2, 64, 32, {3, 2}, sb::Dtype::kBfloat16},
  };
  // Long enough that every step runs on several threads.
  const Setup long_setups[] = {
      {{900, 33, 0, 1, 260}, 14, 2, 32, 32, {4, 2, 1, 1, 20}},
      {{2100}, 4, 1, 32, 32, {5}, sb::Dtype::kBfloat16},
      {{1500}, 8, 1, 32, 48, {4}},
      {std::vector<int>(90, 50), 4, 2, 32, 16, std::vector<int>(90, 2)},
  };
  for (const Setup& s : setups) {
    const Run one = Execute(Prepare(s), 1);
    if (kCompareValues) ExpectNaive(s, one);
    ExpectSameForAnyThreads(one);
  }
  for (const Setup& s : long_setups) {
    const Run one = Execute(Prepare(s), 1);
    ExpectSameForAnyThreads(one);
    ExpectSameForAnyChunk(one);
    ExpectSameWhenNested(one);
  }
  return sb::failures == 0 ? 0 : 1;
}
