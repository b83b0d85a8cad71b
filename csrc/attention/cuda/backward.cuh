// Gradients of keys and values: a block of threads owns 64 keys of a block and goes over the rows
// that attend them, 64 at a time. Everything is computed transposed, so that weights and their
// gradients are operands straight from the accumulators; the heads of a group and all rows are
// summed up in registers, in the order of the list. The gradient of the queries goes by atomic
// additions (five products), or by QueryGradientKernel.
#pragma once

#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

constexpr int kDeltaThreads = 256;
constexpr int kBackwardThreads = 128;
constexpr int kBackwardKeys = 64;  // 16 per warp
constexpr int kBackwardRows = 64;  // rows of a step

// Rows of a step whose weights are in registers at a time.
template <int D>
constexpr int kWeightRows = D == 128 ? 32 : 64;

struct DeltaArguments {
  Problem p;
  View dout, out;
  const float* dlse;  // or nullptr
  float* delta;       // [query_heads, tokens]
};

// delta = dout . out - dlse, a row per warp.
template <class E, int D>
__global__ void __launch_bounds__(kDeltaThreads) DeltaKernel(DeltaArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kDeltaThreads / 32) + threadIdx.x / 32;
  if (row >= a.p.tokens * a.p.query_heads) return;
  // A division of 64 bits would take longer than the row.
  const int64_t t = row <= UINT32_MAX
                        ? static_cast<uint32_t>(row) / static_cast<uint32_t>(a.p.query_heads)
                        : row / a.p.query_heads;
  const int64_t h = row - t * a.p.query_heads;
  const uint16_t *x = RowOf(a.dout, t, h), *y = RowOf(a.out, t, h);
  float sum = 0.0f;
  for (int i = lane; i < D / 2; i += 32) {
    const uint32_t two = *reinterpret_cast<const uint32_t*>(x + 2 * i);
    const uint32_t other = *reinterpret_cast<const uint32_t*>(y + 2 * i);
    sum += E::Low(two) * E::Low(other) + E::High(two) * E::High(other);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(kAllLanes, sum, by);
  const int64_t at = h * a.p.tokens + t;
  if (lane == 0) a.delta[at] = a.dlse == nullptr ? sum : sum - a.dlse[at];
}

struct KeyGradientArguments {
  Problem p;
  Layout layout;
  const int64_t* lists;
  const int32_t* rows;
  View dout, q, k, v;
  const float *lse, *delta;
  float* dq;               // [tokens, query_heads, D], zero; without the scale
  uint16_t *dk, *dv;       // [tokens, kv_heads, D]
  float *dk_sum, *dv_sum;  // [parts, tokens, kv_heads, D], where a list is cut into several parts
  int parts, tiles_per_block;
};

// The 64 keys of a block of threads, and the rows that attend them: `own` from row `first` on, then
// those of a list. It takes those numbered from `begin` to `end`.
struct BackwardTile {
  Head head;
  int key0, key_end;
  int first, own, begin, end;
  const int32_t* list;
};

template <int D>
struct BackwardShape {
  static constexpr int kTile = 64 * D * 2 + kGap;
  static constexpr int kK = 0, kV = kTile, kQ = 2 * kTile, kDout = 4 * kTile, kDs = 5 * kTile;
  static constexpr int kRows = kDs + kBackwardKeys * kBackwardRows * 2 + kGap;
  // Rows of three steps, logsumexp and delta of two.
  static constexpr int kSums = kRows + 3 * kBackwardRows * 8;
  static constexpr int kTileData = kSums + 2 * 2 * kBackwardRows * 4;
  static constexpr int kShared = kTileData + static_cast<int>(sizeof(BackwardTile));

  SB_DEVICE static unsigned char* Q(unsigned char* shared, int step) {
    return shared + kQ + step % 2 * kTile;
  }
  // {token, query head} of a step's rows, -1: none
  SB_DEVICE static int2* Rows(unsigned char* shared, int step) {
    return reinterpret_cast<int2*>(shared + kRows) + step % 3 * kBackwardRows;
  }
  // logsumexp in base 2, then delta
  SB_DEVICE static float* Sums(unsigned char* shared, int step) {
    return reinterpret_cast<float*>(shared + kSums) + step % 2 * 2 * kBackwardRows;
  }
  SB_DEVICE static BackwardTile* Tile(unsigned char* shared) {
    return reinterpret_cast<BackwardTile*>(shared + kTileData);
  }
};

// One thread per row.
template <int D>
SB_DEVICE void PlaceStepRows(unsigned char* shared, int step) {
  const BackwardTile& tile = *BackwardShape<D>::Tile(shared);
  const int i = static_cast<int>(threadIdx.x), at = tile.begin + step * kBackwardRows + i;
  if (i >= kBackwardRows) return;
  int row = -1;
  if (at < tile.end) row = at < tile.own ? tile.first + at : tile.list[at - tile.own];
  // An index from elsewhere cannot make the kernel write astray.
  const bool some = row >= 0 && row < tile.head.Rows();
  const int group = tile.head.group, token = some ? row / group : 0;
  BackwardShape<D>::Rows(shared, step)[i] =
      some ? make_int2(static_cast<int>(tile.head.start) + token,
                       tile.head.kv * group + (row - token * group))
           : make_int2(-1, 0);
}

// By the threads that placed the step's rows.
template <int D>
SB_DEVICE void PlaceSums(const KeyGradientArguments& a, unsigned char* shared, int step) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kBackwardRows) return;
  const int2 at = BackwardShape<D>::Rows(shared, step)[i];
  float* sums = BackwardShape<D>::Sums(shared, step);
  float lse = 0.0f, delta = 0.0f;
  if (at.x >= 0) {
    lse = a.lse[at.y * a.p.tokens + at.x];
    delta = a.delta[at.y * a.p.tokens + at.x];
  }
  sums[i] = lse == NegativeInfinity() ? 0.0f : lse * kLog2e;
  sums[kBackwardRows + i] = delta;
}

// product [16 rows of `left` from `row` on, kRows rows of `right` from `first` on] = left right^T
template <class E, int D, int kRows>
SB_DEVICE void MultiplyRows(float (&product)[kRows / 8][4], const unsigned char* left, int row,
                            const unsigned char* right, int first) {
  const int lane = PhaseLane();
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) product[n][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    LoadA<D>(a, left, lane, row, step);
#pragma unroll
    for (int n = 0; n < kRows / 8; n += 2) {
      uint32_t b[4];
      LoadB<D>(b, right, lane, first + n * 8, step);
      MultiplyAdd<E>(product[n], a, b[0], b[1]);
      MultiplyAdd<E>(product[n + 1], a, b[2], b[3]);
    }
  }
}

// sum [16, D] += weights [16, kRows] rows [kRows, D], from row `first` on
template <class E, int D, int kRows>
SB_DEVICE void AddRows(float (&sum)[D / 8][4], const uint32_t (&weights)[kRows / 16][4],
                       const unsigned char* rows, int first) {
  const int lane = PhaseLane();
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step)
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      LoadBRows<D>(b, rows, lane, first + step * 16, n);
      MultiplyAdd<E>(sum[n], weights[step], b[0], b[1]);
      MultiplyAdd<E>(sum[n + 1], weights[step], b[2], b[3]);
    }
}

// dq of this step's rows += dS K, without the scale; 16 rows per warp, up to 64 columns at a time.
template <class E, int D>
SB_DEVICE void AddQueryGradient(const KeyGradientArguments& a, unsigned char* shared, int step) {
  using Shape = BackwardShape<D>;
  constexpr int kColumns = D < 64 ? D : 64;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int column = 0; column < D; column += kColumns) {
    const int lane = PhaseLane();
    float dq[kColumns / 8][4] = {};
#pragma unroll
    for (int keys = 0; keys < kBackwardKeys / 16; ++keys) {
      uint32_t x[4];
      LoadMatrices<true>(
          x, shared + Shape::kDs +
                 Swizzled<8>(keys * 16 + (lane >> 4) * 8 + (lane & 7), warp * 2 + (lane >> 3 & 1)));
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        uint32_t b[4];
        LoadBRows<D>(b, shared + Shape::kK, lane, keys * 16, column / 8 + n);
        MultiplyAdd<E>(dq[n], x, b[0], b[1]);
        MultiplyAdd<E>(dq[n + 1], x, b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 at = Shape::Rows(shared, step)[warp * 16 + half * 8 + lane / 4];
      if (at.x < 0) continue;
      float* out = a.dq + (at.x * a.p.query_heads + at.y) * D + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        AtomicAdd2(out + n * 8, dq[n][2 * half], dq[n][2 * half + 1]);
    }
  }
}

// Weights in `s` and, in `dp`, the gradient of the logits; both for 16 keys by kRows rows of the
// step from `first` on.
template <int D, int kRows>
SB_DEVICE void WeightGradients(float (&s)[kRows / 8][4], float (&dp)[kRows / 8][4],
                               unsigned char* shared, int step, int first, float scale) {
  using Shape = BackwardShape<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
  const float* sums = Shape::Sums(shared, step) + first + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(sums + n * 8);
    const float2 delta = *reinterpret_cast<const float2*>(sums + kBackwardRows + n * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = Exp2(s[n][i] * scale - (i % 2 == 0 ? lse.x : lse.y));
      dp[n][i] = s[n][i] * (dp[n][i] - (i % 2 == 0 ? delta.x : delta.y));
    }
  }
  // Only the own block's rows stop before its end, and only the last step has absent ones.
  const BackwardTile& tile = *Shape::Tile(shared);
  const int begin = tile.begin + step * kBackwardRows;
  if (tile.key0 + kBackwardKeys <= tile.key_end && begin >= tile.own &&
      begin + kBackwardRows <= tile.end)
    return;
  const int2* rows = Shape::Rows(shared, step) + first + lane % 4 * 2;
  const int key = tile.key0 + warp * 16 + lane / 4, start = static_cast<int>(tile.head.start);
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Absent rows: below zero.
      const int last = min(rows[n * 8 + i % 2].x - start, tile.key_end - 1);
      if (key + i / 2 * 8 > last) s[n][i] = dp[n][i] = 0.0f;
    }
}

// dv += weights^T dout for a step; the gradients of the logits go to shared memory.
template <class E, int D>
SB_DEVICE void AddValueGradient(float (&dv)[D / 8][4], unsigned char* shared, int step,
                                float scale) {
  using Shape = BackwardShape<D>;
  constexpr int kRows = kWeightRows<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int first = 0; first < kBackwardRows; first += kRows) {
    float s[kRows / 8][4], dp[kRows / 8][4];
    MultiplyRows<E, D, kRows>(s, shared + Shape::kK, warp * 16, Shape::Q(shared, step), first);
    MultiplyRows<E, D, kRows>(dp, shared + Shape::kV, warp * 16, shared + Shape::kDout, first);
    WeightGradients<D, kRows>(s, dp, shared, step, first, scale);
    const int lane = PhaseLane();
    uint32_t weights[kRows / 16][4];
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      PackA<E>(weights[i], s[2 * i], s[2 * i + 1]);
      uint32_t ds[4];
      PackA<E>(ds, dp[2 * i], dp[2 * i + 1]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint32_t*>(
            shared + Shape::kDs +
            Swizzled<8>(warp * 16 + j % 2 * 8 + lane / 4, first / 8 + 2 * i + j / 2) +
            lane % 4 * 4) = ds[j];
    }
    AddRows<E, D, kRows>(dv, weights, shared + Shape::kDout, first);
  }
}

// dk += dS^T q for a step, by the warp that wrote this part of dS.
template <class E, int D>
SB_DEVICE void AddKeyGradient(float (&dk)[D / 8][4], unsigned char* shared, int step) {
  using Shape = BackwardShape<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
  uint32_t ds[kBackwardRows / 16][4];
#pragma unroll
  for (int i = 0; i < kBackwardRows / 16; ++i)
    LoadA<kBackwardRows>(ds[i], shared + Shape::kDs, lane, warp * 16, i);
  AddRows<E, D, kBackwardRows>(dk, ds, Shape::Q(shared, step), 0);
}

template <class E, int D>
SB_DEVICE void StoreKeyGradients(const KeyGradientArguments& a, unsigned char* shared,
                                 const float (&dk)[D / 8][4], const float (&dv)[D / 8][4]) {
  const BackwardTile& tile = *BackwardShape<D>::Tile(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = tile.key0 + warp * 16 + half * 8 + lane / 4;
    if (key >= tile.key_end) continue;
    const int64_t at = ((tile.head.start + key) * a.p.kv_heads + tile.head.kv) * D + lane % 4 * 2;
    const int64_t part = blockIdx.z * a.p.tokens * a.p.kv_heads * D;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float k0 = dk[n][2 * half] * a.p.scale, k1 = dk[n][2 * half + 1] * a.p.scale;
      const float v0 = dv[n][2 * half], v1 = dv[n][2 * half + 1];
      if (a.parts == 1) {
        *reinterpret_cast<uint32_t*>(a.dk + at + n * 8) = E::Pack(k0, k1);
        *reinterpret_cast<uint32_t*>(a.dv + at + n * 8) = E::Pack(v0, v1);
      } else {
        *reinterpret_cast<float2*>(a.dk_sum + part + at + n * 8) = make_float2(k0, k1);
        *reinterpret_cast<float2*>(a.dv_sum + part + at + n * 8) = make_float2(v0, v1);
      }
    }
  }
}

// Finds the tile of a block of threads; all see it afterwards. Early blocks have the longest lists
// and come first. False: there is none.
SB_DEVICE bool BeginBackward(const KeyGradientArguments& a, BackwardTile* shared) {
  const int at = static_cast<int>(blockIdx.x) / a.tiles_per_block;
  if (at >= a.layout.blocks[a.p.sequences]) return false;
  const int n = FindSequence(a.layout.blocks, a.p.sequences, at);
  BackwardTile tile;
  tile.head = HeadOf(a.p, a.layout, n, static_cast<int>(blockIdx.y));
  const Head& head = tile.head;
  const int block = at - a.layout.blocks[n], size = static_cast<int>(a.p.block_size);
  tile.key0 = block * size + static_cast<int>(blockIdx.x) % a.tiles_per_block * kBackwardKeys;
  // Not block * size + size: that may pass 2^31.
  tile.key_end = head.length - block * size > size ? block * size + size : head.length;
  if (tile.key0 >= tile.key_end) return false;
  if (threadIdx.x == 0) {
    tile.first = tile.key0 * head.group;
    tile.own = (tile.key_end - tile.key0) * head.group;
    tile.list = nullptr;
    int count = tile.own;
    if (IsDense(a.p, head)) {
      tile.own = count = head.Rows() - tile.first;
    } else {
      const int64_t* bounds = a.lists + head.list + block;
      tile.list = a.rows + bounds[0];
      count += static_cast<int>(bounds[1] - bounds[0]);
    }
    const int steps = (count + kBackwardRows - 1) / kBackwardRows;
    const int64_t per_part = int64_t{(steps + a.parts - 1) / a.parts} * kBackwardRows;
    tile.begin = static_cast<int>(min(blockIdx.z * per_part, static_cast<int64_t>(count)));
    tile.end = static_cast<int>(min(tile.begin + per_part, static_cast<int64_t>(count)));
    *shared = tile;
  }
  __syncthreads();
  return true;
}

// Grid: blocks by tiles of keys, KV heads, parts of a list.
template <class E, int D, bool kQueries>
__global__ void __launch_bounds__(kBackwardThreads, 2) KeyGradientKernel(KeyGradientArguments a) {
  using Shape = BackwardShape<D>;
  SB_SHARED(shared);
  if (!BeginBackward(a, Shape::Tile(shared))) return;
  if (kGap > 0 && threadIdx.x == 0) {
    for (int i = 1; i <= 5; ++i) PoisonGap(shared + i * Shape::kTile - kGap);
    PoisonGap(shared + Shape::kRows - kGap);
  }
  unsigned char* dout = shared + Shape::kDout;
  float dk[D / 8][4], dv[D / 8][4];
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0.0f;

  const BackwardTile* tile = Shape::Tile(shared);
  if (tile->begin < tile->end) {
    LoadKeys<D, kBackwardKeys, kBackwardThreads>(shared + Shape::kK, KeySource(a.k, tile->head),
                                                 tile->key0, tile->key_end);
    LoadKeys<D, kBackwardKeys, kBackwardThreads>(shared + Shape::kV, KeySource(a.v, tile->head),
                                                 tile->key0, tile->key_end);
    PlaceStepRows<D>(shared, 0);
    PlaceStepRows<D>(shared, 1);
    __syncthreads();
    LoadRows<D, kBackwardRows, kBackwardThreads>(Shape::Q(shared, 0), a.q, Shape::Rows(shared, 0));
    LoadRows<D, kBackwardRows, kBackwardThreads>(dout, a.dout, Shape::Rows(shared, 0));
    CommitCopies();
    PlaceSums<D>(a, shared, 0);
  }
  for (int step = 0; tile->begin + step * kBackwardRows < tile->end; ++step) {
    const bool more = tile->begin + (step + 1) * kBackwardRows < tile->end;
    WaitForCopies<0>();
    __syncthreads();  // this step's rows are there, and all are done with the step before
    if (more) {
      LoadRows<D, kBackwardRows, kBackwardThreads>(Shape::Q(shared, step + 1), a.q,
                                                   Shape::Rows(shared, step + 1));
      CommitCopies();
      PlaceSums<D>(a, shared, step + 1);
      PlaceStepRows<D>(shared, step + 2);
    }
    AddValueGradient<E, D>(dv, shared, step, a.p.scale * kLog2e);
    __syncthreads();  // all have written their part of dS and are done with dout
    if (more) {
      LoadRows<D, kBackwardRows, kBackwardThreads>(dout, a.dout, Shape::Rows(shared, step + 1));
      CommitCopies();
    }
    AddKeyGradient<E, D>(dk, shared, step);
    if (kQueries) AddQueryGradient<E, D>(a, shared, step);
  }
  StoreKeyGradients<E, D>(a, shared, dk, dv);
}

struct SumArguments {
  const float* parts;  // [num_parts, count]
  uint16_t* out;
  int64_t count;  // even
  int num_parts;
  float scale;
};

// out = scale times the sum over the parts, in their order.
template <class E>
__global__ void __launch_bounds__(256) SumKernel(SumArguments a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; 2 * i < a.count;
       i += step) {
    float x = 0.0f, y = 0.0f;
    for (int part = 0; part < a.num_parts; ++part) {
      const float2 two = *reinterpret_cast<const float2*>(a.parts + part * a.count + 2 * i);
      x += two.x;
      y += two.y;
    }
    *reinterpret_cast<uint32_t*>(a.out + 2 * i) = E::Pack(x * a.scale, y * a.scale);
  }
}

}  // namespace cuda
}  // namespace sb
