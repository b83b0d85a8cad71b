// The CUDA emulator: a small kernel that is right, and the same with one bug planted at a time.
//
//   test_emulator BUG SETTINGS...   prints "right", "wrong: ..." or "stopped: ..."
//
// A build with AddressSanitizer or ThreadSanitizer may end in their reports instead.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "attention/cuda/device.cuh"

namespace {

using namespace sb::cuda;

enum Bug {
  kNone,
  kNoWait,          // reads what cp.async has not delivered
  kLaxWait,         // waits for one group too few
  kNoBarrier,       // reads what another warp writes
  kNoSyncWarp,      // reads what another lane writes
  kUninitialised,   // reads shared memory that nobody wrote
  kSharedOverflow,  // copies beyond shared memory
  kGlobalOverflow,  // reads beyond an array
  kIntoGap,         // writes past a buffer of shared memory
  kDivergentWarp,   // some lanes leave out a shuffle
  kDivergentBlock,  // a warp leaves out a barrier
  kMisaligned,      // ldmatrix from an odd address
  kPlainAdd,        // blocks add to one number without atomics
  kBankConflicts,   // right, but rows of one bank
  kTooMuchShared,   // launch
  kWrongLayout,     // .trans where it does not belong
  kNumBugs
};
const char* const kNames[kNumBugs] = {
    "none",         "no_wait",        "lax_wait",        "no_barrier",
    "no_sync_warp", "uninitialised",  "shared_overflow", "global_overflow",
    "into_gap",     "divergent_warp", "divergent_block", "misaligned",
    "plain_add",    "bank_conflicts", "too_much_shared", "wrong_layout"};

constexpr int kThreads = 64, kWarps = 2;
constexpr int kTile = 16 * 16 * 2;  // bytes of a 16x16 tile
// A tile per warp and stage, a gap after each; then one float per thread.
constexpr int Place(int warp, int stage) { return (warp * 2 + stage) * (kTile + kGap); }
constexpr int kSums = Place(kWarps, 0);
constexpr int kShared = kSums + kThreads * 4;

struct Arguments {
  const uint16_t* a;  // [blocks, kWarps, 2, 16, 16] bf16, all of it multiplied with itself
  float* total;       // sum of all products' elements
  float* out;         // [blocks]
  int bug;
};

// Where 8 numbers of a row lie: conflict-free, or all rows in the same banks.
int Chunk(int row, int chunk, int bug) {
  return bug == kBankConflicts ? row * 32 + chunk * 16 : row * 32 + ((chunk ^ (row >> 2 & 1)) * 16);
}

void Kernel(Arguments x) {
  SB_SHARED(shared);
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, bug = x.bug;
  const uint16_t* a = x.a + (static_cast<int>(blockIdx.x) * kWarps + warp) * 512;
  float* sums = reinterpret_cast<float*>(shared + kSums);
  if (tid == 0)
    for (int i = 0; i < 2 * kWarps; ++i) PoisonGap(shared + Place(0, i) + kTile);
  __syncthreads();
  for (int stage = 0; stage < 2; ++stage) {
    const int row = lane / 2, chunk = lane % 2;
    unsigned char* to = shared + Place(warp, stage) + Chunk(row, chunk, bug);
    if (bug == kSharedOverflow && stage == 1) to += kShared;
    if (bug == kIntoGap && stage == 1 && lane == 31) *(shared + Place(warp, 1) + kTile) = 0;
    const int past = bug == kGlobalOverflow && stage == 1 ? 512 * kWarps * 2 : 0;
    CopyAsync(to, a + stage * 256 + past + row * 16 + chunk * 8, 16);
    CommitCopies();
  }
  float sum[2][4] = {};
  for (int stage = 0; stage < 2; ++stage) {
    if (bug != kNoWait) {
      if (stage == 0 && bug != kLaxWait) WaitForCopies<1>();
      if (stage == 0 && bug == kLaxWait) WaitForCopies<2>();
      if (stage == 1) WaitForCopies<0>();
    }
    if (bug != kNoSyncWarp) __syncwarp();
    const unsigned char* tile = shared + Place(warp, stage);
    uint32_t rows[4], columns[4];
    const int odd = bug == kMisaligned ? 2 : 0;
    LoadMatrices<false>(rows, tile + Chunk(lane & 15, lane >> 4, bug) + odd);
    const unsigned char* from = tile + Chunk((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1, bug);
    if (bug == kWrongLayout)
      LoadMatrices<true>(columns, from);
    else
      LoadMatrices<false>(columns, from);
    MultiplyAdd<Bf16>(sum[0], rows, columns[0], columns[1]);
    MultiplyAdd<Bf16>(sum[1], rows, columns[2], columns[3]);
  }
  float mine = 0;
  for (int i = 0; i < 4; ++i) mine += sum[0][i] + 3 * sum[1][i];
  if (bug != kDivergentWarp || lane != 5) mine += __shfl_xor_sync(kAllLanes, mine, 1);
  if (bug != kUninitialised || tid != 7) sums[tid] = mine;
  if (bug == kDivergentBlock) {
    if (warp == 0) __syncthreads();
  } else if (bug != kNoBarrier) {
    __syncthreads();
  }
  if (warp == 0) {
    const float both = sums[lane] + sums[32 + lane];
    float all = both;
    for (int by = 16; by > 0; by /= 2) all += __shfl_xor_sync(kAllLanes, all, by);
    if (lane == 0) {
      x.out[blockIdx.x] = all;
      if (bug == kPlainAdd)
        *x.total += all;
      else
        atomicAdd(x.total, all);
    }
  }
}

float Element(int i) { return static_cast<float>((i * 37 + i / 7) % 13 - 6); }

// What the kernel adds up for a block: twice (the shuffle) the weighted elements of A A^T.
double Expected(const float* a) {
  double all = 0;
  for (int tile = 0; tile < kWarps * 2; ++tile)
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j)
        for (int k = 0; k < 16; ++k)
          all += static_cast<double>(a[tile * 256 + i * 16 + k]) * a[tile * 256 + j * 16 + k] *
                 (j < 8 ? 1 : 3);
  return 2 * all;
}

int Run(int bug) {
  constexpr int kBlocks = 3, kCount = kBlocks * kWarps * 2 * 256;
  // Exactly as long as they are, so that AddressSanitizer sees the first element past the end.
  const std::unique_ptr<float[]> values(new float[kCount]);
  const std::unique_ptr<uint16_t[]> a(new uint16_t[kCount]);
  for (int i = 0; i < kCount; ++i) {
    values[i] = Element(i);
    a[i] = static_cast<uint16_t>(NarrowBf16(values[i]));
  }
  const std::unique_ptr<float[]> out(new float[kBlocks]), total(new float[1]);
  total[0] = 0;
  const Arguments x{a.get(), total.get(), out.get(), bug};
  const size_t shared = bug == kTooMuchShared ? 300 * 1024 : kShared;
  try {
    emulator::Launch("Kernel", dim3(kBlocks), dim3(kThreads), shared, [&] { Kernel(x); });
  } catch (const std::runtime_error& error) {
    std::printf("stopped: %s\n", error.what());
    return 0;
  }
  double sum = 0;
  for (int b = 0; b < kBlocks; ++b) {
    const double want = Expected(values.get() + b * kWarps * 512);
    sum += want;
    if (!(std::fabs(out[b] - want) <= 1e-6 * std::fabs(want))) {
      std::printf("wrong: block %d gives %g, not %g\n", b, out[b], want);
      return 0;
    }
  }
  if (!(std::fabs(total[0] - sum) <= 1e-6 * std::fabs(sum))) {
    std::printf("wrong: the total is %g, not %g\n", total[0], sum);
    return 0;
  }
  const emulator::Counters& n = emulator::CurrentCounters();
  std::printf("right, %llu mma, %llu bank conflicts, %llu bytes copied\n",
              static_cast<unsigned long long>(n.mma),
              static_cast<unsigned long long>(n.bank_conflicts),
              static_cast<unsigned long long>(n.copied_bytes));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string settings;
  for (int i = 2; i < argc; ++i) settings += std::string(i > 2 ? " " : "") + argv[i];
  try {
    emulator::Configure(settings.c_str());
  } catch (const std::invalid_argument& error) {
    std::printf("refused: %s\n", error.what());
    return 0;
  }
  for (int bug = 0; argc > 1 && bug < kNumBugs; ++bug)
    if (std::strcmp(argv[1], kNames[bug]) == 0) return Run(bug);
  std::fprintf(stderr, "name a bug: none, no_wait, ...\n");
  return 2;
}
