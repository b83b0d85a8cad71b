// The latency table: its numbers, its order, its edges.
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "latency/isotonic.h"
#include "latency/numeric.h"
#include "latency/pairs.h"
#include "latency/table.h"
#include "tests/expect.h"

namespace {

using sb::Curve;
using sb::LatencyTable;
using sb::Measurements;

constexpr int64_t kBlock = 64;

// Times by a formula, each multiplied by 2^noise at most.
Measurements Measured(const std::vector<int64_t>& lengths, const std::vector<int64_t>& budgets,
                      double noise, unsigned seed) {
  sb::Random random(seed);
  const auto around = [&](double ms) {
    return ms * std::exp2(noise * (random.Below(2001) - 1000) / 1000.0);
  };
  const auto add = [&](Curve& curve, double ms) {
    curve.forward.push_back(around(ms));
    curve.backward.push_back(around(2.0 * ms));
  };
  const auto attention = [](int64_t pairs, int64_t length) {
    return 0.02 + 1e-7 * static_cast<double>(pairs) + 1e-5 * static_cast<double>(length);
  };
  Measurements m;
  m.block_size = kBlock;
  m.layers = 3;
  m.dense_layers = 1;
  m.micro_batch_ms = 0.25;
  m.lengths = lengths;
  for (const int64_t length : lengths) {
    m.budgets.emplace_back();
    m.sparse.emplace_back();
    for (const int64_t k : budgets)
      if (k * kBlock < length) {
        m.budgets.back().push_back(k);
        add(m.sparse.back(), attention(sb::AttendedPairs(length, k, kBlock), length));
      }
    add(m.dense, attention(length * (length + 1) / 2, length));
    add(m.rest, 0.01 + 1e-4 * static_cast<double>(length));
    add(m.outside, 0.02 + 1e-3 * static_cast<double>(length));
  }
  return m;
}

Measurements Smooth() {
  return Measured({100, 256, 512, 1024, 3000, 8192}, {1, 2, 4, 8, 16, 32, 64, 100}, 0.0, 1);
}

bool Near(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * std::fabs(b);
}

void TestNumbers() {
  for (int64_t x = 1; x < int64_t{1} << 31; x += 1 + x / 97) {
    const double y = sb::Log2(static_cast<double>(x));
    EXPECT(std::fabs(y - std::log2(static_cast<double>(x))) < 1e-13, "log2(%lld)",
           static_cast<long long>(x));
    EXPECT(sb::Log2(static_cast<double>(x + 1)) > y, "log2 at %lld", static_cast<long long>(x));
    EXPECT(Near(sb::Exp2(sb::ToFixed(y)), static_cast<double>(x), 1e-11));
  }
  const int64_t one = int64_t{1} << sb::kFractionBits;
  for (int64_t y = -60 * one; y < 60 * one; y += one / 1024)
    for (int64_t step = -2; step < 2; ++step)
      EXPECT(sb::Exp2(y + step) < sb::Exp2(y + step + 1), "exp2 at %lld",
             static_cast<long long>(y));
  EXPECT(sb::Exp2(0) == 1.0 && sb::Exp2(5 * one) == 32.0 && sb::Exp2(-one) == 0.5);
  EXPECT(sb::ToFixed(1e300) == 60 * one && sb::ToFixed(-1e300) == -60 * one);
  EXPECT(sb::WholeMicroseconds(0.0125) == 13 && sb::WholeMicroseconds(0.0124) == 12);
}

void TestPairs() {
  for (int64_t length = 0; length < 40; ++length)
    for (int64_t k = 1; k < 12; ++k) {
      int64_t pairs = 0;
      for (int64_t t = 0; t < length; ++t) pairs += t % 4 + 1 + 4 * std::min(k - 1, t / 4);
      EXPECT(sb::AttendedPairs(length, k, 4) == pairs);
    }
}

void TestIsotonic() {
  std::vector<double> values = {1, 3, 2, 5, 4, 3, 9};
  sb::Isotonic(values);
  EXPECT(values == (std::vector<double>{1, 2.5, 2.5, 4, 4, 4, 9}));
  // Rows without common columns.
  std::vector<std::vector<double>> rows = {{5, 6}, {1, 7}};
  sb::IsotonicGrid({{1, 4}, {2, 8}}, rows);
  EXPECT(rows == (std::vector<std::vector<double>>{{3, 6}, {3, 7}}));
}

// Every measured point is met, and nothing was corrected.
void TestExactAtMeasurements() {
  const Measurements m = Smooth();
  const LatencyTable table(m);
  EXPECT(table.correction() == 0 && table.mean_correction() == 0);
  for (size_t i = 0; i < m.lengths.size(); ++i) {
    const int64_t length = m.lengths[i], all = length / kBlock + 1;
    const double dense = m.dense.forward[i] + m.dense.backward[i];
    const double fixed = 4 * (m.rest.forward[i] + m.rest.backward[i]) + m.outside.forward[i] +
                         m.outside.backward[i] + dense;
    EXPECT(Near(table.AttentionMs(length, all), dense, 1e-10));
    EXPECT(Near(table.Predict(length, all), 3 * dense + fixed, 1e-10));
    for (size_t j = 0; j < m.budgets[i].size(); ++j) {
      const int64_t k = m.budgets[i][j];
      const double f = m.sparse[i].forward[j], b = m.sparse[i].backward[j];
      EXPECT(Near(table.AttentionMs(length, k), f + b, 1e-10), "L %d k %d",
             static_cast<int>(length), static_cast<int>(k));
      EXPECT(Near(table.AttentionPasses(length, k).first, f, 1e-10));
      EXPECT(Near(table.Predict(length, k), 3 * (f + b) + fixed, 1e-10));
      const auto passes = table.PredictPasses(length, k);
      EXPECT(Near(passes.first + passes.second, table.Predict(length, k), 1e-12));
      EXPECT(Near(passes.first * 2, passes.second, 1e-9));
    }
  }
  EXPECT(table.extrapolated() == 0, "%d", static_cast<int>(table.extrapolated()));
}

// On fresh points of the formula: the interpolation's own error.
void TestBetweenMeasurements() {
  std::vector<int64_t> lengths, budgets;
  for (int64_t x = 128; x <= 16384; x += x / 2) lengths.push_back(x);
  for (int64_t k = 1; k < 256; k += (k + 2) / 3) budgets.push_back(k);
  const LatencyTable table(Measured(lengths, budgets, 0.0, 1));
  sb::Random random(3);
  double worst = 0;
  for (int n = 0; n < 3000; ++n) {
    const int64_t length = 128 + random.Below(lengths.back() - 128);
    const int64_t k = 1 + random.Below(static_cast<int>(length / kBlock + 1));
    const double pairs = static_cast<double>(sb::AttendedPairs(length, k, kBlock));
    const double truth = 3 * (0.02 + 1e-7 * pairs + 1e-5 * static_cast<double>(length));
    worst = std::max(worst, std::fabs(table.AttentionMs(length, k) / truth - 1));
  }
  EXPECT(worst < 0.03, "%f", worst);
}

// No time is above one for a longer sequence or a larger budget.
void ExpectOrder(const LatencyTable& t, int seed) {
  for (int64_t length = 1; length < 20000; length += 1 + length / 41)
    for (int64_t k = 1; k <= length / kBlock + 2; ++k) {
      EXPECT(t.AttentionMs(length, k) <= t.AttentionMs(length, k + 1), "seed %d L %d k %d", seed,
             static_cast<int>(length), static_cast<int>(k));
      EXPECT(t.Predict(length, k) <= t.Predict(length, k + 1));
    }
  for (int64_t k = 1; k < 300; k += 1 + k / 7)
    for (int64_t length = 1; length < 20000; length += 1 + (length % kBlock != 0) * length / 53) {
      EXPECT(t.AttentionMs(length, k) <= t.AttentionMs(length + 1, k), "seed %d L %d k %d", seed,
             static_cast<int>(length), static_cast<int>(k));
      EXPECT(t.Predict(length, k) <= t.Predict(length + 1, k));
    }
}

void TestOrder() {
  for (int seed = 1; seed <= 16; ++seed) {
    // Noise that turns neighbours around, and in every other table rows with budgets of their own.
    const double noise = seed % 4 < 2 ? 0.1 : 3.0;
    Measurements m = Measured({64, 65, 200, 700, 1500, 1600, 9000}, {1, 2, 3, 4, 9, 11, 20, 30, 90},
                              noise, static_cast<unsigned>(seed));
    for (size_t i = 3; seed % 2 == 0 && i < m.lengths.size(); ++i) {
      const auto drop = static_cast<int64_t>(i % m.budgets[i].size());
      m.budgets[i].erase(m.budgets[i].begin() + drop);
      m.sparse[i].forward.erase(m.sparse[i].forward.begin() + drop);
      m.sparse[i].backward.erase(m.sparse[i].backward.begin() + drop);
    }
    const LatencyTable table(m);
    ExpectOrder(table, seed);
    ExpectOrder(table.Scaled({5.0, 10.0, 12.5}, {1.0, -2.0, 0.3}), seed);
    // No point moved further than is told.
    for (size_t i = 0; i < m.lengths.size(); ++i)
      for (size_t j = 0; j < m.budgets[i].size(); ++j) {
        const double measured = m.sparse[i].forward[j] + m.sparse[i].backward[j];
        const double size =
            std::fabs(table.AttentionMs(m.lengths[i], m.budgets[i][j]) / measured - 1);
        EXPECT(size <= table.correction() + 1e-9);
        EXPECT(size <= (noise > 1 ? 100 : 0.15), "%f", size);
      }
  }
}

void TestBudgetWithin() {
  const LatencyTable table(Measured({256, 1024, 4096}, {1, 2, 8, 20}, 0.3, 5));
  for (const int64_t length : {1, 64, 65, 300, 1023, 4096, 10000}) {
    const int64_t blocks = (length - 1) / kBlock + 1;
    for (int64_t k = 1; k <= blocks; ++k) {
      const double ms = table.Predict(length, k);
      int64_t want = k;
      while (want < blocks && table.Predict(length, want + 1) <= ms) ++want;
      EXPECT(table.BudgetWithin(length, ms) == want);
      int64_t below = k - 1;
      while (below > 0 && table.Predict(length, below) >= ms) --below;
      EXPECT(table.BudgetWithin(length, std::nextafter(ms, 0.0)) == below);
    }
    EXPECT(table.BudgetWithin(length, 0) == 0 && table.BudgetWithin(length, -1) == 0);
    EXPECT(table.BudgetWithin(length, std::numeric_limits<double>::infinity()) == blocks);
  }
}

void TestSums() {
  const LatencyTable table(Smooth());
  const std::vector<int64_t> lengths = {700, 0, 90, 8000}, budgets = {3, 1, 9, 40};
  std::vector<double> many(4);
  table.PredictMany(lengths.data(), budgets.data(), 4, many.data());
  double sum = 0.25;
  for (size_t i = 0; i < 4; ++i) {
    EXPECT(many[i] == table.Predict(lengths[i], budgets[i]));
    sum += many[i];
  }
  EXPECT(many[1] == 0.0);
  const std::vector<int64_t> far = {90, 8000, 9000};
  const int64_t before = table.extrapolated();
  table.PredictMany(far.data(), budgets.data(), 3, many.data());
  EXPECT(table.extrapolated() == before + 2);
  EXPECT(table.MicroBatchMs(lengths.data(), budgets.data(), 4) == sum);
  std::vector<int32_t> costs(20);
  table.CostUs(700, 20, costs.data());
  for (int64_t k = 1; k <= 20; ++k) EXPECT(costs[k - 1] == table.PredictUs(700, k));
}

void TestOutside() {
  const LatencyTable table(Smooth());
  // By pairs, from the longest measured length at the same budget; rows are close enough for 1 %.
  const double by_pairs = static_cast<double>(sb::AttendedPairs(50000, 8, kBlock)) /
                          static_cast<double>(sb::AttendedPairs(8192, 8, kBlock));
  EXPECT(Near(table.AttentionMs(50000, 8), table.AttentionMs(8192, 8) * by_pairs, 0.01));
  EXPECT(Near(table.AttentionMs(50, 8), table.AttentionMs(100, 8) * (50 * 51) / (100 * 101), 0.01));
  EXPECT(table.extrapolated() == 2);
  table.Predict(1, 1);
  table.Predict(sb::kMaxLength, 1);
  table.Predict(sb::kMaxLength, std::numeric_limits<int64_t>::max());
  EXPECT(table.extrapolated() == 5);
  // The smallest budget that was measured is not 1.
  Measurements m = Measured({1024, 4096}, {4, 8}, 0.0, 1);
  const LatencyTable high(m);
  EXPECT(high.AttentionMs(2000, 2) < high.AttentionMs(2000, 4) && high.extrapolated() == 1);
}

template <typename Call>
std::string Refusal(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void TestRefusals() {
  const auto refusal = [](auto&& change) {
    Measurements m = Smooth();
    change(m);
    return Refusal([&] { LatencyTable table(m); });
  };
  EXPECT(refusal([](Measurements&) {}).empty());
  EXPECT(refusal([](Measurements& m) { m.lengths.clear(); }).find("lengths") == 0);
  EXPECT(refusal([](Measurements& m) { m.lengths[2] = 256; }).find("lengths holds 256") == 0);
  EXPECT(refusal([](Measurements& m) { m.block_size = 0; }).find("block_size") == 0);
  EXPECT(refusal([](Measurements& m) { m.budgets[1] = {1, 4}; }).find("attention[1]") == 0);
  EXPECT(refusal([](Measurements& m) { m.dense.forward[0] = 0; }).find("dense.forward_ms") == 0);
  EXPECT(refusal([](Measurements& m) {
           m.rest.backward[3] = std::nan("");
         }).find("rest.backward") == 0);
  EXPECT(refusal([](Measurements& m) { m.outside.forward.pop_back(); }).find("outside") == 0);
  EXPECT(refusal([](Measurements& m) { m.micro_batch_ms = -1; }).find("micro_batch_ms") == 0);
  EXPECT(refusal([](Measurements& m) { m.layers = -1; }).find("layers") == 0);
  const LatencyTable table(Smooth());
  EXPECT(Refusal([&] { table.Predict(-1, 1); }).find("length is -1") == 0);
  EXPECT(Refusal([&] { table.Predict(sb::kMaxLength + 1, 1); }).find("length") == 0);
  EXPECT(Refusal([&] { table.Predict(5, 0); }).find("budget is 0") == 0);
  EXPECT(Refusal([&] { table.BudgetWithin(5, std::nan("")); }).find("ms is nan") == 0);
  EXPECT(Refusal([&] { table.Scaled({1.0, 1.0}, {0.0, 0.0}); }).find("the factors") == 0);
  EXPECT(Refusal([&] { table.Scaled({1.0}, {9.0}); }).find("the factors") == 0);
}

void TestThreads() {
  const LatencyTable table(Smooth());
  std::vector<double> want;
  for (int64_t length = 1; length < 9000; length += 7)
    want.push_back(table.Predict(length, 1 + length % 50));
  const int64_t before = table.extrapolated();
  std::vector<std::thread> threads;
  std::vector<int> wrong(8, 0);
  for (int n = 0; n < 8; ++n)
    threads.emplace_back([&, n] {
      for (int round = 0; round < 5; ++round) {
        size_t i = 0;
        for (int64_t length = 1; length < 9000; length += 7)
          wrong[n] += table.Predict(length, 1 + length % 50) != want[i++];
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) EXPECT(count == 0);
  EXPECT(table.extrapolated() == 41 * before, "counts were lost");
}

}  // namespace

int main() {
  TestNumbers();
  TestPairs();
  TestIsotonic();
  TestExactAtMeasurements();
  TestBetweenMeasurements();
  TestOrder();
  TestBudgetWithin();
  TestSums();
  TestOutside();
  TestRefusals();
  TestThreads();
  return sb::failures == 0 ? 0 : 1;
}
