// Blocks one after another, their threads as fibers of the calling thread.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/state.h"

namespace emulator {

Fiber fibers[kMaxThreads];
Fiber* current = nullptr;
Settings settings;
Counters counters;

namespace {

struct BarrierState {
  unsigned arrived, phase;
  const char* file;
  int line;
  char order[2];  // what ThreadSanitizer orders by; alternates, so that a fast thread's next
                  // arrival does not reach a slow one's leaving
};

Fiber host;  // the stack that called Launch
size_t host_stack_bytes;
const std::function<void()>* body;
const char* kernel;
Index block_index, block_size, grid_size;
unsigned num_threads, alive;
uint32_t runnable[32], waiting[32];  // lanes per warp; waiting at a collective
uint32_t runnable_warps;
BarrierState barrier;
unsigned char* shared;
size_t shared_bytes;
std::vector<Copy> rings;
uint64_t random_state;
bool failed;
char failure[1024];
char block_begin, block_end, warp_order[32][32][2];  // for ThreadSanitizer
unsigned warp_phase[32][32];

uint64_t NextRandom() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// A random set bit.
unsigned AnyBit(uint32_t bits, uint64_t random) {
  const unsigned by = random & 31;
  const uint32_t turned = (bits >> by) | (bits << ((32 - by) & 31));
  return (static_cast<unsigned>(__builtin_ctz(turned)) + by) & 31;
}

// Forward and reverse stay in a warp until all its lanes wait, so that one warp runs on to the next
// barrier before its neighbours start.
Fiber* Next() {
  if (runnable_warps == 0) return &host;
  const bool stay = current != &host && runnable[current->warp] != 0;
  unsigned warp = current->warp, lane;
  if (settings.order == Settings::Order::kForward) {
    if (!stay) warp = static_cast<unsigned>(__builtin_ctz(runnable_warps));
    lane = static_cast<unsigned>(__builtin_ctz(runnable[warp]));
  } else if (settings.order == Settings::Order::kReverse) {
    if (!stay) warp = 31u - static_cast<unsigned>(__builtin_clz(runnable_warps));
    lane = 31u - static_cast<unsigned>(__builtin_clz(runnable[warp]));
  } else {
    const uint64_t random = NextRandom();
    if (!stay || random % 8 == 0) warp = AnyBit(runnable_warps, random >> 8);
    lane = AnyBit(runnable[warp], random >> 16);
  }
  return &fibers[warp * 32 + lane];
}

void SwitchTo(Fiber* to) {
  Fiber* from = current;
  if (to == from) return;
  ++counters.switches;
  current = to;
  SwitchStack(from, to, to == &host ? host_stack_bytes : settings.stack_bytes);
}

void RunThread() {
  FiberStarts();
  if (!settings.between_blocks) Acquire(&block_begin);
  (*body)();
  Release(&block_end);
  Block(current, State::kDone, nullptr, 0);
  --alive;
  SwitchToNext();
  abort();
}

class Stacks {
 public:
  ~Stacks() { Free(); }
  // `fresh`: new memory, so that a sanitizer has no history of it.
  void Make(unsigned count, size_t bytes, bool fresh) {
    if (memory_ != nullptr && count <= count_ && bytes == bytes_ && !fresh) return;
    Free();
    count_ = count;
    bytes_ = bytes;
    memory_ = static_cast<char*>(mmap(nullptr, Each() * count, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED) {
      memory_ = nullptr;
      throw std::runtime_error("emulator: no memory for the stacks of the threads");
    }
    for (unsigned i = 0; i < count; ++i) mprotect(memory_ + i * Each(), kGuard, PROT_NONE);
  }
  char* Of(unsigned i) const { return memory_ + i * Each() + kGuard; }

 private:
  static constexpr size_t kGuard = 4096;
  size_t Each() const { return bytes_ + kGuard; }
  void Free() {
    if (memory_ != nullptr) munmap(memory_, Each() * count_);
    memory_ = nullptr;
  }
  char* memory_ = nullptr;
  unsigned count_ = 0;
  size_t bytes_ = 0;
} stacks;

// A block's shared memory. Exactly its size, so that AddressSanitizer sees the first byte after it;
// under ThreadSanitizer a mapping of its own, whose shadow is new.
class SharedBlock {
 public:
  explicit SharedBlock(size_t bytes) {
    shared_bytes = bytes;
#if defined(EMULATOR_TSAN)
    memory_ = mmap(nullptr, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("emulator: no memory for shared memory");
#else
    if (posix_memalign(&memory_, 128, std::max<size_t>(bytes, 1)) != 0)
      throw std::runtime_error("emulator: no memory for shared memory");
#endif
    if (settings.poison) std::memset(memory_, 0xff, bytes);
    shared = static_cast<unsigned char*>(memory_);
  }
  ~SharedBlock() {
#if defined(EMULATOR_TSAN)
    munmap(memory_, shared_bytes + 1);
#else
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory_, shared_bytes);
#endif
    free(memory_);
#endif
  }
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

 private:
  void* memory_ = nullptr;
};

// ThreadSanitizer takes a new fiber for a dead one whose number it got, and then sees no race
// between the two: those of earlier blocks stay until there are many. (It can count some 8000.)
#if defined(EMULATOR_TSAN)
std::vector<void*> retired;
#endif
void ForgetFibers() {
#if defined(EMULATOR_TSAN)
  for (Fiber& fiber : fibers) {
    if (fiber.tsan != nullptr) retired.push_back(fiber.tsan);
    fiber.tsan = nullptr;
  }
  if (retired.size() < 4000) return;
  for (void* fiber : retired) __tsan_destroy_fiber(fiber);
  retired.clear();
#endif
}

// Where the threads wait, each place once with how many do.
void ReportDeadlock() {
  int length = std::snprintf(failure, sizeof failure,
                             "deadlock, the threads of the block wait at different places:");
  const auto name = [](const Fiber& f) {
    if (f.state == State::kDone) return "exited";
    return f.state == State::kAtBarrier ? "at __syncthreads" : NameOf(f.op);
  };
  const auto same = [](const Fiber& a, const Fiber& b) {
    return a.state == b.state && a.op == b.op && a.line == b.line && a.file == b.file;
  };
  for (unsigned i = 0; i < num_threads; ++i) {
    const Fiber& f = fibers[i];
    unsigned count = 0;
    bool first = true;
    for (unsigned j = 0; j < num_threads; ++j) {
      if (!same(f, fibers[j])) continue;
      first = first && j >= i;
      ++count;
    }
    if (!first || length > static_cast<int>(sizeof failure) - 200) continue;
    length +=
        std::snprintf(failure + length, sizeof failure - static_cast<size_t>(length),
                      " %u %s %s:%d;", count, name(f), f.file == nullptr ? "" : f.file, f.line);
  }
  failed = true;
}

void RunBlock(size_t bytes) {
  const SharedBlock memory(bytes);
  barrier = {};
  std::memset(runnable, 0, sizeof runnable);
  std::memset(waiting, 0, sizeof waiting);
  runnable_warps = 0;
  alive = num_threads;
  // Making a ThreadSanitizer fiber takes most of a millisecond, so they live on from block to
  // block, each block after the one before it, unless races between blocks are looked for.
  if (settings.between_blocks) ForgetFibers();
  stacks.Make(num_threads, settings.stack_bytes, settings.between_blocks);
  Release(&block_begin);
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& f = fibers[i];
    f.linear = i;
    f.lane = i % 32;
    f.warp = i / 32;
    f.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    f.op = Op::kNone;
    f.file = nullptr;
    f.group = f.first_copy = f.last_copy = 0;
    f.copies = rings.data() + static_cast<size_t>(i) * kMaxCopies;
    f.asan_fake_stack = nullptr;
    f.stack = stacks.Of(i);
    PrepareStack(&f, settings.stack_bytes, RunThread);
#if defined(EMULATOR_TSAN)
    if (f.tsan == nullptr) f.tsan = __tsan_create_fiber(0);
#endif
    MakeRunnable(&f);
  }
  current = &host;
  SwitchToNext();
  if (!failed && alive > 0) ReportDeadlock();
  if (!settings.between_blocks) Acquire(&block_end);
  ++counters.blocks;
}

void CheckLaunch(dim3 grid, dim3 block, size_t bytes) {
  const auto refuse = [](const std::string& what) {
    throw std::runtime_error(std::string("emulator: ") + kernel + ": launch refused: " + what);
  };
  const auto text = [](dim3 d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) refuse("block of " + text(block));
  if (threads % 32 != 0) refuse("block of " + text(block) + ", no whole warps");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535)
    refuse("grid of " + text(grid));
  if (bytes > settings.shared_limit)
    refuse(std::to_string(bytes) + " bytes of shared memory, " +
           std::to_string(settings.shared_limit) + " is the limit");
}

void PrepareHost() {
  host.warp = 0;
  host.state = State::kRunnable;
#if defined(__SANITIZE_ADDRESS__)
  pthread_attr_t attributes;
  void* base;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &base, &host_stack_bytes);
  pthread_attr_destroy(&attributes);
  host.stack = static_cast<char*>(base);
#endif
#if defined(EMULATOR_TSAN)
  host.tsan = __tsan_get_current_fiber();
#endif
}

std::vector<uint32_t> BlockOrder(uint64_t count) {
  std::vector<uint32_t> order(count);
  for (uint64_t i = 0; i < count; ++i)
    order[i] =
        static_cast<uint32_t>(settings.order == Settings::Order::kReverse ? count - 1 - i : i);
  if (settings.order == Settings::Order::kRandom)
    for (uint64_t i = count; i-- > 1;) std::swap(order[i], order[NextRandom() % (i + 1)]);
  return order;
}

}  // namespace

void MakeRunnable(Fiber* fiber) {
  fiber->state = State::kRunnable;
  runnable[fiber->warp] |= 1u << fiber->lane;
  runnable_warps |= 1u << fiber->warp;
}

void Block(Fiber* fiber, State why, const char* file, int line) {
  fiber->state = why;
  fiber->file = file;
  fiber->line = line;
  runnable[fiber->warp] &= ~(1u << fiber->lane);
  if (runnable[fiber->warp] == 0) runnable_warps &= ~(1u << fiber->warp);
}

void SwitchToNext() { SwitchTo(Next()); }

void MaybeYield() {
  if (settings.order == Settings::Order::kRandom && NextRandom() % 16 == 0) SwitchToNext();
}

void Fail(const char* file, int line, const char* format, ...) {
  char what[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  std::snprintf(failure, sizeof failure, "%s at %s:%d (thread %u, warp %u)", what, file, line,
                current->linear, current->warp);
  failed = true;
  Release(&block_end);
  SwitchTo(&host);
  abort();
}

void Barrier(const char* file, int line) {
  Fiber* me = current;
  if (barrier.arrived > 0 && (barrier.line != line || std::strcmp(barrier.file, file) != 0))
    Fail(file, line, "divergent __syncthreads, others wait at %s:%d", barrier.file, barrier.line);
  barrier.file = file;
  barrier.line = line;
  char* const order = &barrier.order[barrier.phase % 2];
  Release(order);
  Block(me, State::kAtBarrier, file, line);
  if (++barrier.arrived == num_threads) {
    ++counters.barriers;
    barrier.arrived = 0;
    ++barrier.phase;
    for (unsigned i = 0; i < num_threads; ++i) MakeRunnable(&fibers[i]);
  }
  SwitchToNext();
  Acquire(order);
}

// Shuffles, votes and matrix operations promise no order of memory: only __syncwarp does.
void Collective(Op op, uint32_t mask, void* arguments, const char* file, int line) {
  Fiber* me = current;
  const unsigned warp = me->warp, lane = me->lane;
  if ((mask >> lane & 1) == 0)
    Fail(file, line, "%s by lane %u, which is not in its mask %08x", NameOf(op), lane, mask);
  me->op = op;
  me->mask = mask;
  me->arguments = arguments;
  Block(me, State::kAtCollective, file, line);
  waiting[warp] |= 1u << lane;
  unsigned phase = 0;
  if (op == Op::kSyncWarp) {
    phase = warp_phase[warp][lane]++ % 2;
    Release(&warp_order[warp][lane][phase]);
  }
  if ((waiting[warp] & mask) == mask) {
    Fiber* all = &fibers[warp * 32];
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const Fiber& other = all[__builtin_ctz(rest)];
      if (other.op != op || other.mask != mask || other.line != line ||
          std::strcmp(other.file, file) != 0)
        Fail(file, line, "divergent warp collective: %s here, lane %u in %s at %s:%d", NameOf(op),
             other.lane, NameOf(other.op), other.file, other.line);
    }
    RunCollective(op, mask, all, file, line);
    waiting[warp] &= ~mask;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) MakeRunnable(&all[__builtin_ctz(rest)]);
  }
  SwitchToNext();
  if (op == Op::kSyncWarp)
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
      Acquire(&warp_order[warp][__builtin_ctz(rest)][phase]);
}

void QueueCopy(const Copy& copy, const char* file, int line) {
  Fiber* me = current;
  if (me->last_copy - me->first_copy == kMaxCopies)
    Fail(file, line, "cp.async: %u copies of one thread are under way", kMaxCopies);
  Copy& place = me->copies[me->last_copy++ % kMaxCopies];
  place.target = copy.target;
  place.source = copy.source;
  place.bytes = copy.bytes;
  place.group = me->group;
}

void CommitCopies() { ++current->group; }

bool TakeCopy(int keep, Copy* copy) {
  Fiber* me = current;
  if (me->first_copy == me->last_copy) return false;
  const Copy& oldest = me->copies[me->first_copy % kMaxCopies];
  if (oldest.group + static_cast<uint32_t>(keep) >= me->group) return false;
  copy->target = oldest.target;
  copy->source = oldest.source;
  copy->bytes = oldest.bytes;
  ++me->first_copy;
  return true;
}

void Launch(const char* name, dim3 grid, dim3 block, size_t bytes,
            const std::function<void()>& thread) {
  CurrentSettings();  // those of the environment, where nothing has set any
  kernel = name;
  CheckLaunch(grid, block, bytes);
  body = &thread;
  num_threads = block.x * block.y * block.z;
  block_size = {block.x, block.y, block.z};
  grid_size = {grid.x, grid.y, grid.z};
  random_state = 88172645463325252ull ^ (settings.seed * 0x9e3779b97f4a7c15ull);
  rings.resize(static_cast<size_t>(kMaxThreads) * kMaxCopies);
  failed = false;
  PrepareHost();
  ++counters.launches;
  for (const uint32_t i : BlockOrder(uint64_t{grid.x} * grid.y * grid.z)) {
    block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    RunBlock(bytes);
    if (failed) break;
  }
  Acquire(&block_end);
  current = nullptr;
  if (!failed) return;
  char text[1400];
  std::snprintf(text, sizeof text, "emulator: %s, block (%u, %u, %u): %s", name, block_index.x,
                block_index.y, block_index.z, failure);
#if defined(EMULATOR_TSAN)
  // The threads stopped halfway, in no order with this one: going on would be reported as races.
  std::printf("stopped: %s\n", text);
  std::fflush(stdout);
  _exit(86);
#endif
  throw std::runtime_error(text);
}

const Index& ThreadIndex() { return current->index; }
const Index& BlockIndex() { return block_index; }
const Index& BlockSize() { return block_size; }
const Index& GridSize() { return grid_size; }
unsigned Lane() { return current->lane; }
unsigned char* SharedMemory() { return shared; }

bool IsShared(const void* address, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(address);
  return p >= shared && p + bytes <= shared + shared_bytes;
}

void Poison([[maybe_unused]] void* address, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(address, bytes);
#endif
}

void CountCopy(int bytes) {
  ++counters.copies;
  counters.copied_bytes += static_cast<uint64_t>(bytes);
}
void CountAtomic() { ++counters.atomics; }
void CountExponential() { ++counters.exponentials; }

}  // namespace emulator
