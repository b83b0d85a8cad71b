// Gradient of the queries in a fixed order of additions: the walk of the forward, with two products
// more than the atomic additions of KeyGradientKernel need.
#pragma once

#include "attention/cuda/forward.cuh"

namespace sb {
namespace cuda {

struct QueryGradientArguments {
  SweepArguments sweep;
  View dout, q, k, v;
  const float *lse, *delta;
  uint16_t* dq;    // [tokens, query_heads, D]
  float* partial;  // [grid, tile_rows, D]
};

template <int D>
struct QueryGradientShape {
  static constexpr int kKeys = 32;
  static constexpr int kTile = kKeys * D * 2 + kGap;
  static constexpr int kDout = kSweepRows * D * 2 + kGap;
  static constexpr int kK = 2 * kDout, kV = kK + 2 * kTile, kSweep = kV + kTile;
  // logsumexp in base 2 and delta of an item's rows
  static constexpr int kSums = kSweep + static_cast<int>(sizeof(SweepShared));
  static constexpr int kShared = kSums + kSweepRows * 8;
};

template <class E, int D>
SB_DEVICE void QueryGradientItem(const QueryGradientArguments& a, const Item& item,
                                 unsigned char* shared) {
  using Shape = QueryGradientShape<D>;
  constexpr int kKeys = Shape::kKeys;
  const int warp = UniformWarp(), lane = static_cast<int>(threadIdx.x) % 32;
  SweepShared* sweep = reinterpret_cast<SweepShared*>(shared + Shape::kSweep);
  unsigned char *dout = shared + Shape::kDout, *values = shared + Shape::kV;
  const auto keys = [&](int i) { return shared + Shape::kK + i % 2 * Shape::kTile; };
  LoadKeys<D, kKeys, kSweepThreads>(keys(0), KeySource(a.k, sweep->head), item.key_begin,
                                    item.key_end);
  LoadKeys<D, kKeys, kSweepThreads>(values, KeySource(a.v, sweep->head), item.key_begin,
                                    item.key_end);
  __syncthreads();  // the rows are in place
  LoadRows<D, kSweepRows, kSweepThreads>(shared, a.q, sweep->tokens);
  LoadRows<D, kSweepRows, kSweepThreads>(dout, a.dout, sweep->tokens);
  CommitCopies();

  float2* sums = reinterpret_cast<float2*>(shared + Shape::kSums);
  {
    const int2 at = sweep->tokens[threadIdx.x];
    const int64_t place = at.y * a.sweep.p.tokens + at.x;
    const float lse = at.x >= 0 ? a.lse[place] : 0.0f;
    sums[threadIdx.x] = make_float2(lse == NegativeInfinity() ? 0.0f : lse * kLog2e,
                                    at.x >= 0 ? a.delta[place] : 0.0f);
  }
  float dq[2][D / 8][4];
  LoadPartial<D>(dq, sweep, PartialOf(a.partial, a.sweep.layout, D), item.causal);
  const bool active = warp * 32 < item.count;
  const int seen = item.causal ? (item.first + warp * 32) / sweep->head.group : item.key_end - 1;

  int step = 0;
  for (int key0 = item.key_begin; key0 < item.key_end; key0 += kKeys, ++step) {
    const bool more = key0 + kKeys < item.key_end;
    WaitForCopies<0>();
    __syncthreads();  // keys and values are there, and all are done with the step before
    if (more) {
      LoadKeys<D, kKeys, kSweepThreads>(keys(step + 1), KeySource(a.k, sweep->head), key0 + kKeys,
                                        item.key_end);
      CommitCopies();
    }
    float s[2][kKeys / 8][4] = {}, dp[2][kKeys / 8][4] = {};
    if (active) {
      Scores<E, D, kKeys>(dp, dout, values);
      Scores<E, D, kKeys>(s, shared, keys(step));
    }
    __syncthreads();  // all are done with the values
    if (more) {
      LoadKeys<D, kKeys, kSweepThreads>(values, KeySource(a.v, sweep->head), key0 + kKeys,
                                        item.key_end);
      CommitCopies();
    }
    const float scale = a.sweep.p.scale * kLog2e;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 sum = sums[warp * 32 + m * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            dp[m][n][i] = Exp2(s[m][n][i] * scale - sum.x) * (dp[m][n][i] - sum.y);
      }
    if (key0 + kKeys - 1 > seen) Mask<kKeys>(dp, sweep, key0, item.key_end, item.causal, 0.0f);
    uint32_t operand[kKeys / 16][2][4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
#pragma unroll
      for (int m = 0; m < 2; ++m) PackA<E>(operand[i][m], dp[m][2 * i], dp[m][2 * i + 1]);
    if (active) AddKeys<E, D, kKeys>(dq, operand, keys(step));
  }
  StorePartial<D>(dq, sweep, PartialOf(a.partial, a.sweep.layout, D));
}

// Scales the tile's rows and writes them.
template <class E, int D>
SB_DEVICE void FinishGradients(const QueryGradientArguments& a, const SweepShared* sweep) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* partial = PartialOf(a.partial, a.sweep.layout, D);
  const Head& head = sweep->head;
  for (int local = warp; local < sweep->row1 - sweep->row0; local += kSweepThreads / 32) {
    const int row = sweep->row0 + local, token = row / head.group, g = row - token * head.group;
    const int64_t t = head.start + token, h = head.kv * head.group + g;
    uint32_t* out = reinterpret_cast<uint32_t*>(a.dq + (t * a.sweep.p.query_heads + h) * D);
    for (int column = lane; column < D / 2; column += 32) {
      const float2 two =
          *reinterpret_cast<const float2*>(partial + static_cast<int64_t>(local) * D + column * 2);
      out[column] = E::Pack(two.x * a.sweep.p.scale, two.y * a.sweep.p.scale);
    }
  }
}

// Grid: as many blocks of threads as run at once.
template <class E, int D>
__global__ void __launch_bounds__(kSweepThreads, 2) QueryGradientKernel(QueryGradientArguments a) {
  using Shape = QueryGradientShape<D>;
  SB_SHARED(shared);
  if (kGap > 0 && threadIdx.x == 0) {
    PoisonGap(shared + Shape::kDout - kGap);
    PoisonGap(shared + Shape::kK - kGap);
    for (int i = 1; i <= 3; ++i) PoisonGap(shared + Shape::kK + i * Shape::kTile - kGap);
  }
  SweepShared* sweep = reinterpret_cast<SweepShared*>(shared + Shape::kSweep);
  for (int64_t round = 0; round < NumRounds(a.sweep); ++round) {
    if (!BeginTile(a.sweep, round, sweep)) continue;
    for (Item item; NextItem(a.sweep, sweep, &item);) QueryGradientItem<E, D>(a, item, shared);
    __syncthreads();
    FinishGradients<E, D>(a, sweep);
    __syncthreads();  // all are done with the tile
  }
}

}  // namespace cuda
}  // namespace sb
