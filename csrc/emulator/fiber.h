// Stack switching, and what the sanitizers must be told of it. Only scheduler.cpp includes this.
#pragma once

#include <cstdlib>

#include "emulator/state.h"

#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// The runtime itself is not instrumented, so __SANITIZE_THREAD__ does not tell.
#if defined(EMULATOR_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

#if defined(__x86_64__)
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
#else
#include <ucontext.h>
#endif

namespace emulator {

inline void Acquire([[maybe_unused]] void* address) {
#if defined(EMULATOR_TSAN)
  __tsan_acquire(address);
#endif
}
inline void Release([[maybe_unused]] void* address) {
#if defined(EMULATOR_TSAN)
  __tsan_release(address);
#endif
}

// Makes the fiber start at `entry` when it is first switched to.
inline void PrepareStack(Fiber* fiber, size_t bytes, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber->stack, bytes);
#endif
#if defined(__x86_64__)
  // At entry the stack pointer is 8 modulo 16, as after a call; six registers are popped before.
  void** top = reinterpret_cast<void**>(fiber->stack + bytes) - 2;
  top[1] = nullptr;
  top[0] = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  fiber->stack_pointer = top - 6;
#else
  static ucontext_t contexts[kMaxThreads];  // two system calls a switch: slow, but portable
  ucontext_t* context = &contexts[fiber->linear];
  getcontext(context);
  context->uc_stack.ss_sp = fiber->stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  fiber->stack_pointer = context;
#endif
}

inline void SwitchStack(Fiber* from, Fiber* to, [[maybe_unused]] size_t to_bytes) {
#if defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(to->tsan, 1);  // 1: a switch orders nothing
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(from->state == State::kDone ? nullptr : &from->asan_fake_stack,
                                 to->stack, to_bytes);
#endif
#if defined(__x86_64__)
  emulator_switch(&from->stack_pointer, to->stack_pointer);
#else
  ucontext_t here;
  from->stack_pointer = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to->stack_pointer));
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from->asan_fake_stack, nullptr, nullptr);
#endif
}

inline void FiberStarts() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace emulator
