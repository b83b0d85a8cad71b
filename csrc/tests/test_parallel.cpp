// Tasks, turns and teams, with more threads than tasks and than cores, in a nest, and from several
// threads; under whatever OpenMP settings CMakeLists.txt runs it with.
#include <omp.h>

#include <cfenv>
#include <functional>
#include <thread>
#include <vector>

#include "attention/cpu/parallel.h"
#include "tests/expect.h"

namespace {

void TestEveryTaskRunsOnce() {
  const int cases[][2] = {{1, 0}, {8, 0}, {1, 5}, {8, 1}, {8, 3}, {2, 5}, {16, 1000}, {0, 3}};
  for (const auto& [threads, tasks] : cases) {
    std::vector<int> runs(static_cast<size_t>(tasks));
    std::vector<int> last(static_cast<size_t>(threads) + 1, -1);
    int strangers = 0, descents = 0;
    sb::ForEachTask(threads, tasks, [&](int thread, int64_t task) {
      ++runs[static_cast<size_t>(task)];
      if (thread < 0 || thread >= (threads > 1 ? threads : 1)) {
        __atomic_fetch_add(&strangers, 1, __ATOMIC_RELAXED);
        return;
      }
      int& before = last[static_cast<size_t>(thread)];
      if (task <= before) __atomic_fetch_add(&descents, 1, __ATOMIC_RELAXED);
      before = static_cast<int>(task);
    });
    for (const int n : runs)
      EXPECT(n == 1, "%d threads, %d tasks: ran %d times", threads, tasks, n);
    EXPECT(strangers == 0 && descents == 0, "%d threads, %d tasks", threads, tasks);
  }
}

void TestThreads() {
  sb::Problem p{};
  p.threads = 4;
  EXPECT(sb::Threads(p, 0) == 1 && sb::Threads(p, 3) == 3 && sb::Threads(p, 1000) == 4);
  p.threads = 0;
  EXPECT(sb::Threads(p, 9) == 1);
}

// A sum whose value depends on the order, every task waiting for the one before.
double Chain(int threads, int64_t tasks) {
  double sum = 1;
  int64_t turn = 0;
  sb::ForEachTask(threads, tasks, [&](int, int64_t task) {
    sched_yield();  // lets others come first, if they do not wait
    sb::WaitFor(&turn, task);
    sum = sum * 1.0000001 + 1.0 / static_cast<double>(task + 3);
    __atomic_store_n(&turn, task + 1, __ATOMIC_RELEASE);
  });
  return sum;
}

void TestTurns() {
  for (const int64_t tasks : {1, 2, 500})
    for (const int threads : {2, 3, 8, 16})
      EXPECT(Chain(threads, tasks) == Chain(1, tasks), "%d threads", threads);
}

void TestNests() {
  const double want = Chain(1, 300);
  const int before = omp_get_max_active_levels();
  for (const int levels : {before, 1, 2}) {
    omp_set_max_active_levels(levels);
    bool same[4] = {};
    sb::ForEachTask(2, 4, [&](int, int64_t i) { same[i] = Chain(3, 300) == want; });
    EXPECT(same[0] && same[1] && same[2] && same[3], "%d levels", levels);
  }
  omp_set_max_active_levels(before);
}

void TestCallersAtOnce() {
  const double want = Chain(1, 300);
  bool same[3] = {};
  std::vector<std::thread> callers;
  for (bool& one : same)
    callers.emplace_back([&one, want] {
      one = true;
      for (int i = 0; i < 5; ++i) one = one && Chain(2, 300) == want;
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT(same[0] && same[1] && same[2]);
}

// Calls f on every thread of a team that is as large as it gets, and counts where it is false.
int CountFalse(const std::function<bool()>& f) {
  int wrong = 0;
  sb::RunTeam(4, [&](int) {
    if (!f()) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
  });
  return wrong;
}

// The same threads serve everyone in the process who uses OpenMP.
SB_NOT_INSTRUMENTED int CountOfTeamNotRoundingToNearest() {
  int wrong = 0;
#pragma omp parallel num_threads(4) reduction(+ : wrong)
  wrong += std::fegetround() == FE_TONEAREST ? 0 : 1;
  return wrong;
}

void TestWorkersComputeAsTheirCaller() {
  const auto rounds_to_nearest = [] { return std::fegetround() == FE_TONEAREST; };
  EXPECT(CountFalse(rounds_to_nearest) == 0);
  std::fesetround(FE_TOWARDZERO);
  EXPECT(CountFalse([] { return std::fegetround() == FE_TOWARDZERO; }) == 0);
  std::fesetround(FE_TONEAREST);
  EXPECT(CountOfTeamNotRoundingToNearest() == 0, "a worker kept what one caller wanted");
#if defined(__x86_64__)
  const auto flushes = [] {
    volatile float smallest = 0x1p-126f;
    return smallest * 0.5f == 0.0f;
  };
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);  // flush to zero, and denormals are zero
  EXPECT(CountFalse(flushes) == 0, "a worker has denormals");
  __builtin_ia32_ldmxcsr(before);
  EXPECT(CountFalse([&] { return !flushes(); }) == 0, "a worker still has none");
#endif
}

}  // namespace

int main() {
  TestEveryTaskRunsOnce();
  const int usual = omp_get_max_threads();
  omp_set_num_threads(6);  // teams are larger than what some calls ask for
  TestEveryTaskRunsOnce();
  TestTurns();
  omp_set_num_threads(usual);
  TestThreads();
  TestTurns();
  TestNests();
  TestCallersAtOnce();
  TestWorkersComputeAsTheirCaller();
  return sb::failures == 0 ? 0 : 1;
}
