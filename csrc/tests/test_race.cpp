// Programs for ThreadSanitizer: two with a race between tasks, which it must report, and one whose
// turns leave none.
#include <sched.h>

#include <cstdio>
#include <cstring>

#include "attention/cpu/parallel.h"

namespace {

// Two tasks write one word. Each waits until the other runs too, in a way that orders nothing.
void SameWord() {
  int running = 0, word = 0;
  sb::ForEachTask(2, 2, [&](int, int64_t) {
    __atomic_fetch_add(&running, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(&running, __ATOMIC_RELAXED) < 2) sched_yield();
    ++word;
  });
  std::printf("%d\n", word);
}

// The same, one after the other; `wait` says whether the second waits for its turn.
void Turns(bool wait) {
  int running = 0, word = 0;
  int64_t turn = 0;
  sb::ForEachTask(2, 2, [&](int, int64_t task) {
    __atomic_fetch_add(&running, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(&running, __ATOMIC_RELAXED) < 2) sched_yield();
    if (wait) sb::WaitFor(&turn, task);
    ++word;
    __atomic_store_n(&turn, task + 1, __ATOMIC_RELEASE);
  });
  std::printf("%d\n", word);
}

}  // namespace

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  if (std::strcmp(what, "same_word") == 0)
    SameWord();
  else if (std::strcmp(what, "no_wait") == 0)
    Turns(false);
  else if (std::strcmp(what, "turns") == 0)
    Turns(true);
  else
    return 2;
  return 0;
}
