// Threads: tasks handed out in order, and the wait of one task for another.
//
// No standard container, and everything local to the file that includes it: the kernels of every
// instruction set include this too, and the linker must find nothing to merge.
#pragma once

#include <fenv.h>
#include <omp.h>
#include <sched.h>

#include <cstdint>

#include "attention/problem.h"

#if defined(__SANITIZE_THREAD__)
#define SB_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SB_THREAD_SANITIZER 1
#endif
#endif

#if defined(SB_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
// The OpenMP runtime is not instrumented: ThreadSanitizer sees neither that a team starts after its
// caller's writes nor that the caller goes on after the team's. Both are told to it below, by a
// function that is not instrumented itself, since a worker reads what it shall run before anything
// else. What tasks do to each other stays in sight.
#define SB_NOT_INSTRUMENTED __attribute__((no_sanitize("thread"), noinline))
#define SB_HAPPENS_BEFORE(address) __tsan_release(address)
#define SB_HAPPENS_AFTER(address) __tsan_acquire(address)
#else
#define SB_NOT_INSTRUMENTED
#define SB_HAPPENS_BEFORE(address)
#define SB_HAPPENS_AFTER(address)
#endif

namespace sb {
namespace {

// Threads worth asking for, and so the most scratch memories that can be in use at once.
inline int Threads(const Problem& p, int64_t tasks) {
  const int64_t most = p.threads < tasks ? p.threads : tasks;
  return most > 1 ? static_cast<int>(most) : 1;
}

// Calls f(thread) for thread < `threads`; OpenMP may give fewer, down to the caller alone. The team
// is no smaller than the caller's others (torch's too): OpenMP ends the threads that a smaller one
// leaves over, and starting them anew takes longer than to let them wait. Workers round, and treat
// denormals, as the caller does: which of them runs a task must not show.
template <class F>
SB_NOT_INSTRUMENTED void RunTeam(int threads, const F& f) {
  [[maybe_unused]] char start, end;  // only their addresses are used
  fenv_t environment;
  fegetenv(&environment);
  const int usual = omp_get_max_threads();
  SB_HAPPENS_BEFORE(&start);
#pragma omp parallel num_threads(usual > threads ? usual : threads)
  {
    SB_HAPPENS_AFTER(&start);
    const int thread = omp_get_thread_num();
    if (thread < threads) {
      fenv_t own;
      fegetenv(&own);
      fesetenv(&environment);
      f(thread);
      fesetenv(&own);
    }
    SB_HAPPENS_BEFORE(&end);
  }
  SB_HAPPENS_AFTER(&end);
}

// Calls f(thread, task) for all tasks. They are handed out in ascending order, so a task may wait
// for an earlier one however many threads OpenMP really gives.
template <class F>
void ForEachTask(int threads, int64_t tasks, F f) {
  int64_t next = 0;
  const auto work = [&](int thread) {
    while (true) {
      const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      f(thread, task);
    }
  };
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1)
    work(0);
  else
    RunTeam(threads, work);
}

inline void PauseSpinning() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Returns once the word at `turn` is `mine`, and sees what was written before it became that.
inline void WaitFor(const int64_t* turn, int64_t mine) {
  int spins = 0;
  while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine) {
    if (spins < 200) {
      ++spins;
      PauseSpinning();
    } else {
      sched_yield();  // more threads than cores: let the one we wait for run
    }
  }
}

}  // namespace
}  // namespace sb
