// What scheduler.cpp and collectives.cpp share: the threads of the block that runs.
//
// Code that runs on a fiber must neither call libc nor instantiate containers: ThreadSanitizer
// intercepts the former, and the linker may pick the kernel's instrumented copy of the latter.
#pragma once

#include "emulator/runtime.h"

namespace emulator {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxCopies = 256;  // that a thread may have under way

enum class State { kRunnable, kAtBarrier, kAtCollective, kDone };

struct Fiber {
  void* stack_pointer;
  Index index;
  unsigned linear, lane, warp;
  State state;
  Op op;  // of the collective it waits for
  uint32_t mask;
  void* arguments;
  const char* file;  // where it waits
  int line;
  uint32_t group;  // of the copies issued next
  Copy* copies;    // ring of kMaxCopies
  unsigned first_copy, last_copy;
  void* tsan;
  void* asan_fake_stack;
  char* stack;
};

extern Fiber fibers[kMaxThreads];
extern Fiber* current;
extern Settings settings;
extern Counters counters;

void MakeRunnable(Fiber* fiber);
void Block(Fiber* fiber, State why, const char* file, int line);
void SwitchToNext();
const char* NameOf(Op op);

// Lets the collective's lanes, all of which wait, have their results.
void RunCollective(Op op, uint32_t mask, Fiber* warp, const char* file, int line);

}  // namespace emulator
