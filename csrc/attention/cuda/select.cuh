// Selection: gate logits of 64 rows against all earlier blocks' means, then the highest per row.
// The logits of a tile are the only ones that ever exist: in shared memory, or where they are too
// many in a buffer of the block of threads, which walks over tiles.
#pragma once

#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

constexpr int kSelectThreads = 128;
constexpr int kSelectRows = 64;    // 16 per warp
constexpr int kSelectBlocks = 32;  // means that are multiplied at a time

struct GateArguments {
  Problem p;
  Layout layout;
  View q;
  const uint16_t* means;
  uint32_t* keys;  // [grid, kSelectRows, key_stride], or nullptr: in shared memory
  int key_stride;
};

struct SelectArguments : GateArguments {
  int16_t* selection;  // [query_heads, tokens, max_budget - 1]
};

template <class E, int D>
struct SelectShape {
  static constexpr int kMeans = kSelectRows * D * 2 + kGap;
  static constexpr int kKeys = kMeans + E::kTerms * kSelectBlocks * D * 2 + kGap;
  static int64_t Shared(int64_t key_stride, bool keys_in_shared) {
    return kKeys + (keys_in_shared ? kSelectRows * key_stride * 4 : 0);
  }
};

// Orders as the logits do, as unsigned integers; NaN counts as minus infinity.
SB_DEVICE uint32_t KeyOf(float logit) {
  if (!(logit == logit)) logit = NegativeInfinity();
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // no negative zero
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Where the highest keys end: `above` of them are above high, `above_low` above low. If fewer than
// wanted are above high, all others that are above low are equal to high.
struct Cut {
  uint32_t low, high;
  int above, above_low;
};

// Finds the end of the `want` highest of keys[0, have). 0 < want < have. A warp together, by
// bisection on the key.
SB_DEVICE Cut FindCut(const uint32_t* keys, int have, int want) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t low = ~0u, high = 0;
  for (int b = lane; b < have; b += 32) {
    low = min(low, keys[b]);
    high = max(high, keys[b]);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    low = min(low, __shfl_xor_sync(kAllLanes, low, by));
    high = max(high, __shfl_xor_sync(kAllLanes, high, by));
  }
  low -= 1;  // no key is 0
  // `above` <= want keys are above high, more than want above low.
  int above = 0, above_low = have;
  while (above != want && high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    uint32_t mine = 0;
    for (int b = lane; b < have; b += 32) mine += keys[b] > middle;
    const int count = static_cast<int>(__reduce_add_sync(kAllLanes, mine));
    if (count > want) {
      low = middle;
      above_low = count;
    } else {
      high = middle;
      above = count;
    }
  }
  return {low, high, above, above_low};
}

// Writes the blocks with the `want` highest of keys[0, have), ascending; of equal ones the later.
// 0 < want < have. A warp together.
SB_DEVICE void WriteHighest(const uint32_t* keys, int have, int want, int16_t* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Cut cut = FindCut(keys, have, want);
  // Where some are missing: the last of the equal ones.
  const int skip = cut.above == want ? 0x7fffffff : cut.above_low - want;
  const uint32_t before = (1u << lane) - 1;
  int written = 0, seen = 0;
  for (int first = 0; first < have; first += 32) {
    const int b = first + lane;
    const uint32_t key = b < have ? keys[b] : 0;
    const bool tied = b < have && key > cut.low && key <= cut.high;
    const uint32_t ties = __ballot_sync(kAllLanes, tied);
    const bool chosen =
        b < have && (key > cut.high || (tied && seen + __popc(ties & before) >= skip));
    const uint32_t all = __ballot_sync(kAllLanes, chosen);
    if (chosen) out[written + __popc(all & before)] = static_cast<int16_t>(b);
    written += __popc(all);
    seen += __popc(ties);
  }
}

// This block of threads' place for keys.
template <class E, int D>
SB_DEVICE uint32_t* PlaceOfKeys(const GateArguments& a, unsigned char* shared) {
  if (threadIdx.x == 0) {
    PoisonGap(shared + SelectShape<E, D>::kMeans - kGap);
    PoisonGap(shared + SelectShape<E, D>::kKeys - kGap);
  }
  return a.keys == nullptr ? reinterpret_cast<uint32_t*>(shared + SelectShape<E, D>::kKeys)
                           : a.keys + static_cast<int64_t>(blockIdx.x) * kSelectRows * a.key_stride;
}

// Logits of a tile's rows against blocks [0, past), as keys. query(r) is the address of row r's
// query, nullptr: none.
template <class E, int D, class Query>
SB_DEVICE void ComputeKeys(const GateArguments& a, const Head& head, int past,
                           unsigned char* shared, uint32_t* keys, const Query& query) {
  constexpr int kChunks = D / 8, kStep = kSelectThreads / kChunks;
  using Shape = SelectShape<E, D>;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
#pragma unroll
  for (int i = 0; i < kSelectRows / kStep; ++i) {
    const int r = tid / kChunks + i * kStep, chunk = tid % kChunks;
    const uint16_t* source = query(r);
    const bool some = source != nullptr;
    CopyAsync(shared + Swizzled<kChunks>(r, chunk),
              (some ? source : static_cast<const uint16_t*>(a.q.data)) + chunk * 8, some ? 16 : 0);
  }
  CommitCopies();
  uint32_t rows[D / 16][4];
  for (int first = 0; first < past; first += kSelectBlocks) {
    if (first > 0) __syncthreads();  // all have read the means before
#pragma unroll
    for (int i = 0; i < E::kTerms * kSelectBlocks / kStep; ++i) {
      const int r = tid / kChunks + i * kStep, chunk = tid % kChunks;
      const int block = first + r % kSelectBlocks, term = r / kSelectBlocks;
      const bool some = block < past;
      const uint16_t* source =
          a.means + ((head.list + (some ? block : 0)) * E::kTerms + term) * D + chunk * 8;
      CopyAsync(shared + Shape::kMeans + Swizzled<kChunks>(r, chunk), source, some ? 16 : 0);
    }
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    if (first == 0) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) LoadA<D>(rows[step], shared, lane, warp * 16, step);
    }
    float sum[kSelectBlocks / 8][4] = {};
#pragma unroll
    for (int term = E::kTerms - 1; term >= 0; --term)
#pragma unroll
      for (int step = 0; step < D / 16; ++step)
#pragma unroll
        for (int n = 0; n < kSelectBlocks / 8; n += 2) {
          uint32_t b[4];
          LoadB<D>(b, shared + Shape::kMeans, lane, term * kSelectBlocks + n * 8, step);
          MultiplyAdd<E>(sum[n], rows[step], b[0], b[1]);
          MultiplyAdd<E>(sum[n + 1], rows[step], b[2], b[3]);
        }
#pragma unroll
    for (int n = 0; n < kSelectBlocks / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint2 pair;
        pair.x = KeyOf(sum[n][2 * half]);
        pair.y = KeyOf(sum[n][2 * half + 1]);
        const int row = warp * 16 + half * 8 + lane / 4;
        *reinterpret_cast<uint2*>(keys + static_cast<int64_t>(row) * a.key_stride + first + n * 8 +
                                  lane % 4 * 2) = pair;
      }
  }
  __syncwarp();  // a warp reads the keys of the rows that it wrote
}

// Grid: as many blocks of threads as run at once.
template <class E, int D>
__global__ void __launch_bounds__(kSelectThreads, D == 128 ? 2 : 4)
    SelectKernel(SelectArguments a) {
  SB_SHARED(shared);
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int kv_heads = static_cast<int>(a.p.kv_heads), width = static_cast<int>(a.p.max_budget) - 1;
  uint32_t* keys = PlaceOfKeys<E, D>(a, shared);
  const int num_tiles = a.layout.tiles[a.p.sequences];
  const int64_t total = static_cast<int64_t>(num_tiles) * kv_heads;
  for (int64_t i = blockIdx.x; i < total; i += gridDim.x) {
    const int tile = num_tiles - 1 - static_cast<int>(i / kv_heads);
    const int n = FindSequence(a.layout.tiles, a.p.sequences, tile);
    const Head head = HeadOf(a.p, a.layout, n, static_cast<int>(i % kv_heads));
    const int row0 = (tile - a.layout.tiles[n]) * kSelectRows;
    const int row1 = min(row0 + kSelectRows, head.Rows());
    const int size = static_cast<int>(a.p.block_size);
    // key_stride bounds it already where max_seqlen bounds the lengths.
    const int past = min((row1 - 1) / head.group / size, a.key_stride - 8);
    // A budget that the CPU refuses cannot make the kernel write astray.
    const auto budget_of = [&](int g) { return min(max(BudgetOf(a.p, head, g), 1), width + 1); };
    int least = budget_of(0), most = least;
    for (int g = 1; g < head.group; ++g) {
      least = min(least, budget_of(g));
      most = max(most, budget_of(g));
    }
    if (least - 1 < past && most > 1) {
      __syncthreads();  // all are done with the tile before
      ComputeKeys<E, D>(a, head, past, shared, keys, [&](int r) -> const uint16_t* {
        const int row = row0 + r, token = row / head.group;
        if (row >= row1) return nullptr;
        return RowOf(a.q, head.start + token, head.kv * head.group + (row - token * head.group));
      });
    }
    for (int r = warp * 16; r < warp * 16 + 16 && row0 + r < row1; ++r) {
      const int row = row0 + r, token = row / head.group, g = row - token * head.group;
      const int have = min(token / size, past), want = min(have, budget_of(g) - 1);
      int16_t* out =
          a.selection + ((head.kv * head.group + g) * a.p.tokens + head.start + token) * width;
      if (want == have) {
        for (int b = lane; b < have; b += 32) out[b] = static_cast<int16_t>(b);
      } else if (want > 0) {
        WriteHighest(keys + static_cast<int64_t>(r) * a.key_stride, have, want, out);
      }
      for (int j = want + lane; j < width; j += 32) out[j] = -1;
    }
  }
}

}  // namespace cuda
}  // namespace sb
