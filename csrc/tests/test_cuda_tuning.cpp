// The CUDA kernels of coverage and budget, on the emulator: coverage against a naive implementation
// in double precision, budgets against what the CPU chooses.
//
//   test_cuda_tuning SET [SETTINGS...]     SET: ranks_tiny, ranks_few, ranks_all, budgets_few,
//   budgets
#include "tests/cuda_case.h"
#include "tuning/budget.h"
#include "tuning/sampling.h"

namespace {

struct RankCase {
  Case inputs;
  int row_stride = 64;
  int max_rank = -1;  // all
};

int64_t NumBlocks(const Setup& s, int64_t n) {
  return (s.cu[n + 1] - s.cu[n] + s.p.block_size - 1) / s.p.block_size;
}

// Mass by rank of one query head of one sequence, by the definition.
std::vector<double> NaiveMass(const Setup& s, int64_t n, int64_t h, int64_t row_stride) {
  const int64_t start = s.cu[n], length = s.cu[n + 1] - start, B = s.p.block_size;
  const int64_t blocks = NumBlocks(s, n);
  std::vector<double> mass(static_cast<size_t>(std::max<int64_t>(blocks - 1, 0)));
  int64_t rows = 0;
  for (int64_t t = B; t < length; ++t) {
    if (t % row_stride != 0 && (t + 1) % B != 0 && t != length - 1) continue;
    ++rows;
    std::vector<double> share(static_cast<size_t>(t / B));
    double highest = -INFINITY, sum = 0;
    for (int64_t b = 0; b < t / B; ++b) {
      double& x = share[static_cast<size_t>(b)];
      for (int64_t i = b * B; i < (b + 1) * B; ++i)
        for (int64_t d = 0; d < s.D; ++d)
          x += s.Get(s.q, s.At(start + t, h, s.p.query_heads) + d) *
               s.Get(s.k, s.At(start + i, h / s.group, s.p.kv_heads) + d);
      x /= static_cast<double>(B) * std::sqrt(static_cast<double>(s.D));
      highest = std::max(highest, x);
    }
    for (double& x : share) sum += x = std::exp(x - highest);
    std::sort(share.rbegin(), share.rend());
    for (size_t r = 0; r < share.size(); ++r) mass[r] += share[r] / sum;
  }
  for (double& x : mass) x /= static_cast<double>(rows);
  return mass;
}

void RunCase(const RankCase& c, unsigned seed) {
  Setup s(c.inputs, seed);
  // Sharper logits than those of random keys, so that ranks differ.
  for (int64_t i = 0; i < s.tokens; ++i)
    for (int64_t h = 0; h < s.p.kv_heads; ++h)
      for (int64_t d = 0; d < s.D; ++d) {
        const int64_t at = s.At(i, h, s.p.kv_heads) + d;
        s.Put(s.k, at, static_cast<float>(4 * s.Get(s.k, at)));
      }
  s.p.budget = nullptr;
  const Problem& p = s.p;
  const int64_t longest = *std::max_element(c.inputs.lengths.begin(), c.inputs.lengths.end());
  int64_t max_rank = c.max_rank;
  if (max_rank < 0)
    max_rank = std::max<int64_t>((longest + p.block_size - 1) / p.block_size - 1, 0);

  const auto coverage = [&](const sb::cuda::Machine& machine) {
    const Array<float> mass(p.sequences * p.query_heads * max_rank);
    const auto run = [&](void* workspace) {
      return sb::cuda::Coverage(p, longest, machine, s.ViewOf(s.q, p.query_heads),
                                s.ViewOf(s.k, p.kv_heads), c.row_stride, max_rank, mass.get(),
                                workspace);
    };
    run(Workspace(run(nullptr)).get());
    return std::vector<double>(mass.get(), mass.get() + mass.count());
  };
  sb::cuda::Machine machine = sb::cuda::CurrentMachine(nullptr);
  const std::vector<double> got = coverage(machine);

  std::vector<double> want;
  for (int64_t n = 0; n < p.sequences; ++n)
    for (int64_t h = 0; h < p.query_heads; ++h) {
      std::vector<double> mass = NaiveMass(s, n, h, c.row_stride);
      mass.resize(static_cast<size_t>(max_rank));
      want.insert(want.end(), mass.begin(), mass.end());
      double total = 0;
      for (int64_t r = 0; r < max_rank; ++r) {
        const size_t at = want.size() - static_cast<size_t>(max_rank - r);
        total += got[at];
        EXPECT(r == 0 || got[at] <= got[at - 1], "rank %d rises", static_cast<int>(r));
      }
      EXPECT(total <= 1, "a sum of %.9f", total);
    }
  Compare(s, "mass", got, want, 2e-6);

  // Another machine, and keys in memory in place of shared memory: the same bits.
  machine.multiprocessors = 1;
  machine.shared_bytes = 320 * s.D + 2048;
  EXPECT(coverage(machine) == got, "another machine gives other bits");
}

std::vector<RankCase> Cases(const std::string& set) {
  const Dtype bf16 = Dtype::kBfloat16, fp16 = Dtype::kFloat16;
  if (set == "ranks_tiny") return {{{{73, 20}, 2, 1, 32, 16, bf16, {}}, 8, 3}};
  // Ragged lengths, several heads per KV head, all ranks and few, tiles of empty places.
  std::vector<RankCase> few = {
      {{{150, 1, 0, 70}, 4, 2, 64, 32, bf16, {}}},
      {{{333}, 7, 1, 64, 16, fp16, {}}, 16},
      {{{260, 131}, 3, 1, 128, 64, bf16, {}}, 5, 2},
  };
  if (set == "ranks_few") return few;
  std::vector<RankCase> all = {
      {{{1300}, 1, 1, 32, 16, bf16, {}}, 4},      // more tiles than parts may be
      {{{700}, 2, 1, 32, 16, bf16, {}}, 1, 20},   // all rows; fewer ranks than blocks
      {{{300}, 2, 2, 32, 128, fp16, {}}, 64, 9},  // more ranks than blocks
      {{{70, 0, 64, 65}, 6, 2, 64, 32, fp16, {}}, 100000},
      {{{16, 15, 1}, 2, 1, 64, 16, bf16, {}}, 64, 3},  // no earlier block at all
      {{{0, 0}, 2, 1, 64, 16, bf16, {}}, 64, 2},
      {{{140}, 70, 1, 32, 32, bf16, {}}, 3},  // more heads than rows in a tile
  };
  all.insert(all.end(), few.begin(), few.end());
  return all;
}

// Random curves, costs with plateaus, budgets and lengths: what the CPU chooses from the same.
void RunBudgets(unsigned seed) {
  sb::Random random(seed);
  const bool is_huge = seed % 10 == 0;  // gains beyond 64 bits
  const int64_t count = is_huge ? 2 : 1 + random.Below(3 + 70 * random.Below(2));
  const int64_t heads = is_huge ? 1024 : 1 + random.Below(4);
  const int64_t width = is_huge ? 14 : 1 + random.Below(random.Below(5) == 0 ? 600 : 12);
  const int64_t ranks = width - 1 + random.Below(3);
  const int64_t block_size = is_huge ? int64_t{1} << 26 : 16 + 16 * random.Below(3);
  const bool has_lengths = is_huge || random.Below(3) > 0, one_k0 = random.Below(2) == 0;
  const Array<float> mass(count * heads * ranks), tolerance(1);
  const Array<int32_t> cost(count * width), k0(one_k0 ? 1 : count), cu(count + 1), budgets(count);
  const Array<int64_t> tau(1);
  for (int64_t i = 0; i < mass.count(); ++i)
    mass[i] = static_cast<float>(random.Below(4)) / static_cast<float>(is_huge ? 4 : 4 * width) +
              (random.Below(9) == 0 ? 0.1f : 0.0f);
  if (mass.count() > 0 && random.Below(8) == 0) mass[0] = NAN;
  int64_t most = 0;
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t k = 0; k < width; ++k)
      cost[n * width + k] = (k == 0 ? 0 : cost[n * width + k - 1]) + random.Below(4);
    most += cost[(n + 1) * width - 1];
  }
  for (int64_t i = 0; i < k0.count(); ++i) k0[i] = 1 + random.Below(static_cast<int>(width) + 2);
  cu[0] = 0;
  for (int64_t n = 0; n < count; ++n)
    cu[n + 1] = cu[n] + random.Below(static_cast<int>(width * block_size) + 40);
  tau[0] = random.Below(static_cast<int>(most) + 10) - 5;
  tolerance[0] = static_cast<float>(random.Below(11)) * 0.1f;
  const int64_t row_stride = is_huge ? 1 : random.Below(2) == 0 ? 64 : 7;
  const sb::cuda::BudgetProblem p{count,
                                  heads,
                                  ranks,
                                  width,
                                  1 + random.Below(3),
                                  mass.get(),
                                  cost.get(),
                                  tau.get(),
                                  tolerance.get(),
                                  k0.get(),
                                  one_k0,
                                  has_lengths ? cu.get() : nullptr,
                                  block_size,
                                  row_stride,
                                  random.Below(2) == 0};
  const sb::cuda::Machine machine = sb::cuda::CurrentMachine(nullptr);
  const auto run = [&](void* workspace) {
    return sb::cuda::Budget(p, machine, budgets.get(), workspace);
  };
  run(Workspace(run(nullptr)).get());

  std::vector<int64_t> coverage(static_cast<size_t>(count * width)), scratch(coverage.size());
  std::vector<sb::BudgetSequence> sequences;
  for (int64_t n = 0; n < count; ++n) {
    int64_t* curve = coverage.data() + n * width;
    sb::CoverageOfMass(mass.get() + n * heads * ranks, heads, ranks, width, curve);
    const int64_t length = cu[n + 1] - cu[n];
    sequences.push_back({curve, cost.get() + n * width, k0[one_k0 ? 0 : n],
                         has_lengths ? sb::SampledRows(length, block_size, row_stride) : 1,
                         has_lengths ? (length + block_size - 1) / block_size : sb::kManyBlocks});
  }
  const sb::BudgetRule rule{tau[0], sb::FixedPoint(tolerance[0]) * heads, p.min_budget, width,
                            p.tune_short};
  std::vector<int32_t> want(static_cast<size_t>(count));
  sb::ChooseBudgets(rule, sequences.data(), count, want.data(), scratch.data());
  EXPECT(std::equal(want.begin(), want.end(), budgets.get()), "seed %u: the CPU chooses otherwise",
         seed);
}

}  // namespace

int main(int argc, char** argv) {
  return RunSet(argc, argv, "ranks_tiny, ranks_few, ranks_all, budgets_few or budgets",
                [](const std::string& set) {
                  unsigned seed = 1;
                  if (set.rfind("budgets", 0) != 0)
                    for (const RankCase& c : Cases(set)) RunCase(c, seed++);
                  else
                    for (; seed <= (set == "budgets" ? 100 : 3); ++seed) RunBudgets(seed);
                });
}
