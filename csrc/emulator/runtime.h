// What kernel code, compiled by the host compiler, asks of the emulator: threads that run as
// fibers, barriers, warp collectives, asynchronous copies.
//
// scheduler.cpp and collectives.cpp implement it. They are compiled without ThreadSanitizer, so
// that only the kernel's own loads and stores are watched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulator {

// How the next launches run. Results of a correct kernel do not depend on any of these.
struct Settings {
  enum class Order { kForward, kReverse, kRandom };
  Order order = Order::kForward;
  uint64_t seed = 1;            // of the random order
  bool late_copies = true;      // cp.async delivers at the wait, not at once
  bool poison = true;           // shared memory and targets of copies under way are NaN
  bool truncating_mma = false;  // sum exact products of eight and cut, nearer to tensor cores
  bool between_blocks = false;  // ThreadSanitizer: nothing orders one block before another
  unsigned shared_limit = 227 * 1024;  // bytes a block may have: 227 KB on sm_90, 163 on sm_80
  unsigned multiprocessors = 3;        // what the launch code is told
  size_t stack_bytes = 64 * 1024;      // of a thread
};

// Exact numbers of what a launch did; they add up until they are reset.
struct Counters {
  uint64_t launches, blocks, barriers, mma, ldmatrix, ldmatrix_phases, bank_conflicts, shuffles,
      copies, copied_bytes, atomics, exponentials, switches;
};

// "order=random seed=3 copies=early poison=0 mma=truncate blocks=unordered shared_kb=99
// multiprocessors=2 stack_kb=32", any of them. The first launch reads SB_EMULATOR so.
// Throws std::invalid_argument.
void Configure(const char* text);
const Settings& CurrentSettings();
Counters& CurrentCounters();

// Runs the threads of all blocks. Throws std::runtime_error where the kernel cannot go on: a
// deadlock, a divergent collective, a misaligned or foreign address, a launch no GPU takes.
void Launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes,
            const std::function<void()>& thread);

// ---- what follows is called by running threads ----

struct Index {
  unsigned x, y, z;
};
const Index& ThreadIndex();
const Index& BlockIndex();
const Index& BlockSize();
const Index& GridSize();
unsigned Lane();
unsigned char* SharedMemory();

// Ends the launch; what it says becomes the error of Launch.
[[noreturn]] void Fail(const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

void Barrier(const char* file, int line);

enum class Op { kNone, kSyncWarp, kShuffle, kBallot, kSum, kLoadMatrix, kMmaBf16, kMmaFp16 };
void Collective(Op op, uint32_t mask, void* arguments, const char* file, int line);
struct Shuffle {
  uint64_t value;
  int source;
  uint64_t result;
};
struct Reduce {  // kBallot and kSum
  uint32_t value, result;
};
struct LoadMatrix {
  uint4 row;  // read by the lane that has its address
  const void* address;
  uint32_t* result;  // [4]
  bool transposed;
};
struct Mma {
  const uint32_t *a, *b;  // [4], [2]
  float* sum;             // [4]
};

// In random order, sometimes lets another thread run.
void MaybeYield();

bool IsShared(const void* address, size_t bytes);
void Poison(void* address, size_t bytes);  // AddressSanitizer: no access from now on

struct Copy {
  void* target;
  const void* source;
  int bytes;
  uint32_t group;
};
void QueueCopy(const Copy& copy, const char* file, int line);
void CommitCopies();
// The oldest queued copy, if wait_group `keep` must have seen it done.
bool TakeCopy(int keep, Copy* copy);

void CountCopy(int bytes);
void CountAtomic();
void CountExponential();

}  // namespace emulator
