// The CUDA kernels, on the emulator, against a naive implementation in double precision.
//
//   test_cuda_kernels SET [SETTINGS...]     SET: tiny, long, few, all
#include "tests/cuda_case.h"

namespace {

// Every row: the count, the order, and that no block left out has a clearly higher logit.
void CheckSelection(const Setup& s, const Array<int16_t>& selection) {
  int wrong = 0;
  for (int64_t n = 0; n < s.p.sequences; ++n)
    for (int64_t h = 0; h < s.p.query_heads; ++h) {
      const int64_t start = s.cu[n], length = s.cu[n + 1] - start, B = s.p.block_size;
      const int64_t past = length > 0 ? (length - 1) / B : 0;
      std::vector<std::vector<double>> mean(static_cast<size_t>(past));
      for (int64_t b = 0; b < past; ++b) {
        auto& m = mean[static_cast<size_t>(b)];
        m.assign(static_cast<size_t>(s.D), 0.0);
        for (int64_t t = b * B; t < (b + 1) * B; ++t)
          for (int64_t d = 0; d < s.D; ++d)
            m[static_cast<size_t>(d)] +=
                s.Get(s.k, s.At(start + t, h / s.group, s.p.kv_heads) + d) / static_cast<double>(B);
      }
      for (int64_t t = 0; t < length; ++t) {
        const int64_t own = t / B;
        const int64_t want = std::min<int64_t>(own, s.budget[n * s.p.query_heads + h] - 1);
        const int16_t* row = selection.get() + (h * s.tokens + start + t) * s.width;
        std::vector<bool> chosen(static_cast<size_t>(own), false);
        bool fine = true;
        for (int64_t j = 0; j < s.width; ++j) {
          if (j >= want) {
            fine = fine && row[j] == -1;
          } else {
            fine = fine && row[j] >= 0 && row[j] < own && (j == 0 || row[j] > row[j - 1]);
            if (fine) chosen[static_cast<size_t>(row[j])] = true;
          }
        }
        double lowest = INFINITY, highest = -INFINITY;
        for (int64_t b = 0; b < own && fine; ++b) {
          double logit = 0;
          for (int64_t d = 0; d < s.D; ++d)
            logit += s.Get(s.q, s.At(start + t, h, s.p.query_heads) + d) *
                     mean[static_cast<size_t>(b)][static_cast<size_t>(d)];
          if (chosen[static_cast<size_t>(b)])
            lowest = std::min(lowest, logit);
          else
            highest = std::max(highest, logit);
        }
        if (!fine || highest - lowest > 1e-5) ++wrong;
      }
    }
  EXPECT(wrong == 0, "%d rows are selected wrongly", wrong);
}

// The index by its definition.
void CheckIndex(const Setup& s, const Array<int16_t>& selection, const Array<int64_t>& lists,
                const Array<int32_t>& rows) {
  std::vector<int64_t> bounds = {0};
  std::vector<int32_t> want;
  for (int64_t n = 0; n < s.p.sequences; ++n)
    for (int64_t kv = 0; kv < s.p.kv_heads; ++kv) {
      const int64_t start = s.cu[n], length = s.cu[n + 1] - start, B = s.p.block_size;
      const int64_t blocks = (length + B - 1) / B;
      bool dense = true;
      for (int64_t g = 0; g < s.group; ++g)
        dense = dense && s.budget[n * s.p.query_heads + kv * s.group + g] >= blocks;
      for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t t = 0; t < length && !dense; ++t)
          for (int64_t g = 0; g < s.group; ++g) {
            const int16_t* row =
                selection.get() + ((kv * s.group + g) * s.tokens + start + t) * s.width;
            if (std::find(row, row + s.width, static_cast<int16_t>(b)) != row + s.width)
              want.push_back(static_cast<int32_t>(t * s.group + g));
          }
        bounds.push_back(static_cast<int64_t>(want.size()));
      }
    }
  bounds.resize(static_cast<size_t>(lists.count()), static_cast<int64_t>(want.size()));
  want.resize(static_cast<size_t>(rows.count()), -1);
  EXPECT(std::equal(bounds.begin(), bounds.end(), lists.get()), "bounds of lists");
  EXPECT(std::equal(want.begin(), want.end(), rows.get()), "rows of lists");
}

struct Exact {
  std::vector<double> out, lse, dq, dk, dv;
};

Exact Naive(const Setup& s, const Array<int16_t>& selection) {
  const int64_t D = s.D, H = s.p.query_heads, Hkv = s.p.kv_heads, B = s.p.block_size;
  Exact x;
  x.out.resize(static_cast<size_t>(s.tokens * H * D));
  x.dq = x.out;
  x.dk.resize(static_cast<size_t>(s.tokens * Hkv * D));
  x.dv = x.dk;
  x.lse.resize(static_cast<size_t>(s.tokens * H));
  std::vector<double> weight, value(static_cast<size_t>(D));
  for (int64_t n = 0; n < s.p.sequences; ++n)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < s.cu[n + 1] - s.cu[n]; ++t) {
        const int64_t start = s.cu[n], own = t / B, token = start + t, kv = h / s.group;
        const int16_t* row = selection.get() + (h * s.tokens + token) * s.width;
        std::vector<int64_t> keys;
        for (int64_t j = 0; j < s.width && row[j] >= 0; ++j)
          for (int64_t i = 0; i < B; ++i) keys.push_back(start + row[j] * B + i);
        for (int64_t i = own * B; i <= t; ++i) keys.push_back(start + i);
        weight.assign(keys.size(), 0.0);
        double highest = -INFINITY, sum = 0;
        for (size_t i = 0; i < keys.size(); ++i) {
          for (int64_t d = 0; d < D; ++d)
            weight[i] += s.Get(s.q, s.At(token, h, H) + d) * s.Get(s.k, s.At(keys[i], kv, Hkv) + d);
          weight[i] *= static_cast<double>(s.p.scale);
          highest = std::max(highest, weight[i]);
        }
        for (double& w : weight) sum += w = std::exp(w - highest);
        const double lse = highest + std::log(sum);
        x.lse[static_cast<size_t>(h * s.tokens + token)] = lse;
        double* out = x.out.data() + (token * H + h) * D;
        for (size_t i = 0; i < keys.size(); ++i) {
          weight[i] /= sum;
          for (int64_t d = 0; d < D; ++d)
            out[d] += weight[i] * s.Get(s.v, s.At(keys[i], kv, Hkv) + d);
        }
        double delta = -static_cast<double>(s.dlse[h * s.tokens + token]);
        for (int64_t d = 0; d < D; ++d) delta += out[d] * s.Get(s.dout, s.At(token, h, H) + d);
        for (size_t i = 0; i < keys.size(); ++i) {
          double dp = 0;
          for (int64_t d = 0; d < D; ++d)
            dp += s.Get(s.dout, s.At(token, h, H) + d) * s.Get(s.v, s.At(keys[i], kv, Hkv) + d);
          const double ds = weight[i] * (dp - delta) * static_cast<double>(s.p.scale);
          double* dk = x.dk.data() + (keys[i] * Hkv + kv) * D;
          double* dv = x.dv.data() + (keys[i] * Hkv + kv) * D;
          double* dq = x.dq.data() + (token * H + h) * D;
          for (int64_t d = 0; d < D; ++d) {
            dq[d] += ds * s.Get(s.k, s.At(keys[i], kv, Hkv) + d);
            dk[d] += ds * s.Get(s.q, s.At(token, h, H) + d);
            dv[d] += weight[i] * s.Get(s.dout, s.At(token, h, H) + d);
          }
        }
      }
  return x;
}

std::vector<double> Values(const Setup& s, const Array<uint16_t>& x) {
  std::vector<double> values(static_cast<size_t>(x.count()));
  for (int64_t i = 0; i < x.count(); ++i) values[static_cast<size_t>(i)] = s.Get(x, i);
  return values;
}

void RunCase(const Case& c, unsigned seed) {
  const Setup s(c, seed);
  const Problem& p = s.p;
  const sb::cuda::Machine machine = sb::cuda::CurrentMachine(nullptr);
  const int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const View q = s.ViewOf(s.q, p.query_heads), k = s.ViewOf(s.k, p.kv_heads),
             v = s.ViewOf(s.v, p.kv_heads), dout = s.ViewOf(s.dout, p.query_heads);

  const Array<int16_t> selection(p.query_heads * s.tokens * s.width);
  const auto select = [&](void* workspace) {
    return sb::cuda::Select(p, longest, machine, q, k, selection.get(), workspace);
  };
  select(Workspace(select(nullptr)).get());
  CheckSelection(s, selection);

  const Array<int64_t> lists(p.kv_heads * (s.tokens / p.block_size + p.sequences) + 1);
  const Array<int32_t> rows(s.tokens * p.query_heads * s.width);
  const auto index = [&](void* workspace) {
    return sb::cuda::Index(p, machine, selection.get(), lists.get(), rows.get(), workspace);
  };
  index(Workspace(index(nullptr)).get());
  CheckIndex(s, selection, lists, rows);

  const Array<uint16_t> out(s.tokens * p.query_heads * s.D);
  const Array<float> lse(s.tokens * p.query_heads);
  const auto forward = [&](void* workspace) {
    return sb::cuda::Forward(p, longest, machine, q, k, v, lists.get(), rows.get(), out.get(),
                             lse.get(), workspace);
  };
  forward(Workspace(forward(nullptr)).get());

  const Exact exact = Naive(s, selection);
  const double unit = c.dtype == Dtype::kBfloat16 ? 0x1p-7 : 0x1p-10;
  Compare(s, "out", Values(s, out), exact.out, unit);
  Compare(s, "lse", {lse.get(), lse.get() + lse.count()}, exact.lse, 2e-6);

  const View out_view{out.get(), p.query_heads * s.D, s.D};
  std::vector<double> before;
  for (const bool deterministic : {true, false, true}) {
    const Array<uint16_t> dq(s.tokens * p.query_heads * s.D), dk(s.tokens * p.kv_heads * s.D),
        dv(s.tokens * p.kv_heads * s.D);
    const auto backward = [&](void* workspace) {
      return sb::cuda::Backward(p, longest, machine, dout, q, k, v, out_view, lse.get(),
                                s.dlse.get(), lists.get(), rows.get(),
                                {dq.get(), dk.get(), dv.get()}, deterministic, workspace);
    };
    backward(Workspace(backward(nullptr)).get());
    if (deterministic && !before.empty()) {
      EXPECT(Values(s, dq) == before, "a second run differs");
      continue;
    }
    Compare(s, deterministic ? "dq in fixed order" : "dq", Values(s, dq), exact.dq, 2 * unit);
    Compare(s, "dk", Values(s, dk), exact.dk, 2 * unit);
    Compare(s, "dv", Values(s, dv), exact.dv, 2 * unit);
    if (deterministic) before = Values(s, dq);
  }
}

// Budgets that the CPU refuses, and that nobody reads where bounds are given: nothing is written
// astray, and what is selected are earlier blocks in ascending order.
void RunBadBudgets() {
  const int32_t bad[] = {0, -1000, 5, 1, 7, INT32_MAX, -INT32_MAX, INT32_MIN};
  for (int shift = 0; shift < 8; ++shift) {
    Setup s({{300, 40}, 4, 2, 64, 16, Dtype::kBfloat16, {}}, 3);
    for (int64_t i = 0; i < s.budget.count(); ++i) s.budget[i] = bad[(i + shift) % 8];
    s.p.max_budget = 4;
    const int64_t width = 3;
    const sb::cuda::Machine machine = sb::cuda::CurrentMachine(nullptr);
    const View q = s.ViewOf(s.q, 4), k = s.ViewOf(s.k, 2);
    const Array<int16_t> selection(4 * s.tokens * width);
    const auto select = [&](void* w) {
      return sb::cuda::Select(s.p, 300, machine, q, k, selection.get(), w);
    };
    select(Workspace(select(nullptr)).get());
    int wrong = 0;
    for (int64_t row = 0; row < 4 * s.tokens; ++row) {
      const int64_t t = row % s.tokens, own = (t < 300 ? t : t - 300) / s.p.block_size;
      const int16_t* at = selection.get() + row * width;
      for (int64_t j = 0; j < width; ++j)
        if (at[j] < -1 || at[j] >= own || (j > 0 && at[j] >= 0 && at[j] <= at[j - 1])) ++wrong;
    }
    EXPECT(wrong == 0, "%d entries of a selection with bad budgets are wrong", wrong);
  }
}

std::vector<Case> Cases(const std::string& set) {
  const Dtype bf16 = Dtype::kBfloat16, fp16 = Dtype::kFloat16;
  if (set == "tiny") return {{{49, 20}, 2, 1, 64, 16, bf16, {2, 9}}};
  if (set == "long") return {{{560}, 1, 1, 32, 16, bf16, {5}}};  // more means than are read at once
  // Own blocks and earlier ones, whole and ragged; groups that divide no tile; dense and sparse
  // heads.
  std::vector<Case> few = {
      {{150, 1, 0, 70}, 4, 2, 64, 32, bf16, {3, 1, 1, 2}},
      {{203}, 7, 1, 64, 48, fp16, {}},
      {{131, 40}, 3, 1, 128, 64, bf16, {2, 5}},
  };
  if (set == "few") return few;
  std::vector<Case> all = {
      {{600}, 2, 1, 64, 16, bf16, {5}},          // many blocks per tile
      {{300}, 2, 2, 32, 128, fp16, {2}},         // short last block
      {{330, 65}, 10, 2, 128, 64, fp16, {}},     // groups of five
      {{200, 200}, 2, 1, 64, 80, bf16, {1, 3}},  // own block only; all blocks
      {{1, 2, 15, 16, 17, 31, 32, 33}, 2, 1, 64, 16, bf16, {}},
      {{150}, 4, 2, 64, 32, bf16, {3}, -0.3f},    // a scale that turns the order around
      {{150}, 2, 1, 64, 32, bf16, {2}, 0.0f, 9},  // a wider selection than needed
      {{64}, 1, 1, 128, 1024, fp16, {4}},         // a block longer than the sequence
      {{700}, 2, 1, 32, 16, bf16, {40}},          // lists of many rows, high budget
      {{0, 5, 0}, 2, 1, 64, 16, bf16, {}},
      {{260}, 12, 2, 64, 64, bf16, {2}},  // groups of six
  };
  all.insert(all.end(), few.begin(), few.end());
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  return RunSet(argc, argv, "tiny, long, few or all", [](const std::string& set) {
    unsigned seed = 1;
    for (const Case& c : Cases(set)) RunCase(c, seed++);
    if (set == "few") RunBadBudgets();
  });
}
