// Forward: online softmax over the keys that a row attends, with an unnormalised output per row in
// a buffer of the block of threads, which stays in L2.
#pragma once

#include "attention/cuda/sweep.cuh"

namespace sb {
namespace cuda {

struct ForwardArguments {
  SweepArguments sweep;
  View q, k, v;
  uint16_t* out;   // [tokens, query_heads, D]
  float* lse;      // [query_heads, tokens]
  float* partial;  // [grid, tile_rows, D]
};

template <int D>
struct ForwardShape {
  static constexpr int kKeys = 64;
  static constexpr int kK = kSweepRows * D * 2 + kGap;
  static constexpr int kV = kK + kKeys * D * 2 + kGap;
  static constexpr int kSweep = kV + kKeys * D * 2 + kGap;
  static constexpr int kMax = kSweep + static_cast<int>(sizeof(SweepShared));
  static int64_t Shared(int64_t tile_rows) { return kMax + 2 * 4 * tile_rows; }
};

// What a thread holds of an item: rows warp * 32 + 16 m + 8 half + lane / 4.
template <int D>
struct ForwardState {
  float out[2][D / 8][4];
  float max[2][2], sum[2][2];
};

// Turns scores into weights and rescales what was summed up. `factor` times a score is its logit in
// base 2.
template <int D>
SB_DEVICE void Softmax(float (&s)[2][8][4], float factor, ForwardState<D>* state) {
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = NegativeInfinity();
#pragma unroll
      for (int n = 0; n < 8; ++n)
        highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      const float before = state->max[m][half], now = fmaxf(before, highest);
      // Where everything is minus infinity so far, the weights are zero.
      const float shift = now == NegativeInfinity() ? 0.0f : now * factor;
      const float alpha = Exp2(before * factor - shift);
      state->max[m][half] = now;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[m][n][i] = Exp2(s[m][n][i] * factor - shift);
          sum += s[m][n][i];
        }
      state->sum[m][half] = state->sum[m][half] * alpha + sum;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        state->out[m][n][2 * half] *= alpha;
        state->out[m][n][2 * half + 1] *= alpha;
      }
    }
}

// The sums of a warp's 32 rows: zero at the start, else what an earlier item of these rows left.
// Absent rows may get anything.
template <int D>
SB_DEVICE void LoadPartial(float (&sum)[2][D / 8][4], const SweepShared* shared,
                           const float* partial, bool starts) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
  if (starts) return;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = shared->locals[warp * 32 + m * 16 + half * 8 + lane / 4];
      if (local < 0) continue;
      const float* from = partial + local * D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const float2 two = *reinterpret_cast<const float2*>(from + n * 8);
        sum[m][n][2 * half] = two.x;
        sum[m][n][2 * half + 1] = two.y;
      }
    }
}

template <int D>
SB_DEVICE void StorePartial(const float (&sum)[2][D / 8][4], const SweepShared* shared,
                            float* partial) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = shared->locals[warp * 32 + m * 16 + half * 8 + lane / 4];
      if (local < 0) continue;
      float* to = partial + local * D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(to + n * 8) =
            make_float2(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
    }
}

// Maxima and denominators of a thread's rows, in the same way.
template <int D>
SB_DEVICE void LoadMaxima(ForwardState<D>* state, const SweepShared* shared, bool starts,
                          const float* max, const float* sum) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = shared->locals[warp * 32 + m * 16 + half * 8 + lane / 4];
      const bool more = !starts && local >= 0;
      state->max[m][half] = more ? max[local] : NegativeInfinity();
      // The four lanes of a row hold a sum each; it is their total that counts.
      state->sum[m][half] = more && lane % 4 == 0 ? sum[local] : 0.0f;
    }
}

template <int D>
SB_DEVICE void StoreMaxima(const ForwardState<D>& state, const SweepShared* shared, float* max,
                           float* sum) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = shared->locals[warp * 32 + m * 16 + half * 8 + lane / 4];
      float total = state.sum[m][half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      if (local < 0 || lane % 4 != 0) continue;
      max[local] = state.max[m][half];
      sum[local] = total;
    }
}

// Scores of a warp's 32 rows against the 64 keys of a tile.
template <class E, int D, int kKeys>
SB_DEVICE void Scores(float (&s)[2][kKeys / 8][4], const unsigned char* rows,
                      const unsigned char* keys) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = PhaseLane();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[2][4];
    LoadA<D>(a[0], rows, lane, warp * 32, step);
    LoadA<D>(a[1], rows, lane, warp * 32 + 16, step);
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t b[4];
      LoadB<D>(b, keys, lane, n * 8, step);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        MultiplyAdd<E>(s[m][n], a[m], b[0], b[1]);
        MultiplyAdd<E>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sum of a warp's 32 rows += weights of the keys times the keys' rows of a tile
template <class E, int D, int kKeys>
SB_DEVICE void AddKeys(float (&sum)[2][D / 8][4], const uint32_t (&weights)[kKeys / 16][2][4],
                       const unsigned char* tile) {
  const int lane = PhaseLane();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      LoadBRows<D>(b, tile, lane, step * 16, n);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        MultiplyAdd<E>(sum[m][n], weights[step][m], b[0], b[1]);
        MultiplyAdd<E>(sum[m][n + 1], weights[step][m], b[2], b[3]);
      }
    }
}

// Keys that a row must not see, after the end and after its token, get `value`.
template <int kKeys>
SB_DEVICE void Mask(float (&s)[2][kKeys / 8][4], const SweepShared* shared, int key0, int key_end,
                    bool causal, float value) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * 32 + m * 16 + half * 8 + lane / 4;
      const int last = LastKey(shared, i, key_end, causal) - key0 - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        if (n * 8 > last) s[m][n][2 * half] = value;
        if (n * 8 + 1 > last) s[m][n][2 * half + 1] = value;
      }
    }
}

template <class E, int D>
SB_DEVICE void ForwardItem(const ForwardArguments& a, const Item& item, unsigned char* shared) {
  using Shape = ForwardShape<D>;
  constexpr int kKeys = Shape::kKeys;
  const int warp = UniformWarp();
  SweepShared* sweep = reinterpret_cast<SweepShared*>(shared + Shape::kSweep);
  float* max = reinterpret_cast<float*>(shared + Shape::kMax);
  float* sum = max + a.sweep.layout.tile_rows;
  unsigned char *keys = shared + Shape::kK, *values = shared + Shape::kV;
  LoadKeys<D, kKeys, kSweepThreads>(keys, KeySource(a.k, sweep->head), item.key_begin,
                                    item.key_end);
  __syncthreads();  // the rows are in place
  LoadRows<D, kSweepRows, kSweepThreads>(shared, a.q, sweep->tokens);
  CommitCopies();
  ForwardState<D> state;
  LoadMaxima(&state, sweep, item.causal, max, sum);
  LoadPartial<D>(state.out, sweep, PartialOf(a.partial, a.sweep.layout, D), item.causal);
  // A negative or zero scale turns the order around, so such scores are scaled before the softmax.
  const float scale = a.sweep.p.scale * kLog2e;
  const float factor = scale > 0.0f ? scale : 1.0f;
  const bool active = warp * 32 < item.count;
  // The last key that all of the warp's rows see: after it keys are masked.
  const int seen = item.causal ? (item.first + warp * 32) / sweep->head.group : item.key_end - 1;

  for (int key0 = item.key_begin; key0 < item.key_end; key0 += kKeys) {
    WaitForCopies<0>();
    __syncthreads();  // the keys are there, and all are done with the values before
    LoadKeys<D, kKeys, kSweepThreads>(values, KeySource(a.v, sweep->head), key0, item.key_end);
    CommitCopies();
    float s[2][kKeys / 8][4] = {};
    if (active) {
      Scores<E, D, kKeys>(s, shared, keys);
      if (!(scale > 0.0f)) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= scale;
      }
      if (key0 + kKeys - 1 > seen)
        Mask<kKeys>(s, sweep, key0, item.key_end, item.causal, NegativeInfinity());
    }
    WaitForCopies<0>();
    __syncthreads();  // the values are there, and all are done with the keys
    if (key0 + kKeys < item.key_end) {
      LoadKeys<D, kKeys, kSweepThreads>(keys, KeySource(a.k, sweep->head), key0 + kKeys,
                                        item.key_end);
      CommitCopies();
    }
    uint32_t weights[kKeys / 16][2][4];
    {
      Softmax(s, factor, &state);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
        for (int m = 0; m < 2; ++m) PackA<E>(weights[step][m], s[m][2 * step], s[m][2 * step + 1]);
    }
    if (active) AddKeys<E, D, kKeys>(state.out, weights, values);
  }
  if (!active) return;
  StoreMaxima(state, sweep, max, sum);
  StorePartial<D>(state.out, sweep, PartialOf(a.partial, a.sweep.layout, D));
}

// Normalises the tile's rows and writes them.
template <class E, int D>
SB_DEVICE void FinishRows(const ForwardArguments& a, unsigned char* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const SweepShared* sweep = reinterpret_cast<const SweepShared*>(shared + ForwardShape<D>::kSweep);
  const float* max = reinterpret_cast<const float*>(shared + ForwardShape<D>::kMax);
  const float* sum = max + a.sweep.layout.tile_rows;
  const float* partial = PartialOf(a.partial, a.sweep.layout, D);
  const float scale = a.sweep.p.scale * kLog2e, factor = scale > 0.0f ? scale : 1.0f;
  const Head& head = sweep->head;
  for (int local = warp; local < sweep->row1 - sweep->row0; local += kSweepThreads / 32) {
    const int row = sweep->row0 + local, token = row / head.group, g = row - token * head.group;
    const int64_t h = head.kv * head.group + g, t = head.start + token;
    const float total = sum[local], inverse = total == 0.0f ? 0.0f : 1.0f / total;
    uint32_t* out = reinterpret_cast<uint32_t*>(a.out + (t * a.sweep.p.query_heads + h) * D);
    for (int column = lane; column < D / 2; column += 32) {
      const float2 two =
          *reinterpret_cast<const float2*>(partial + static_cast<int64_t>(local) * D + column * 2);
      out[column] = E::Pack(two.x * inverse, two.y * inverse);
    }
    if (lane == 0)
      a.lse[h * a.sweep.p.tokens + t] =
          total == 0.0f ? NegativeInfinity() : (max[local] * factor + Log2(total)) * kLn2;
  }
}

// Grid: as many blocks of threads as run at once.
template <class E, int D>
__global__ void __launch_bounds__(kSweepThreads, 2) ForwardKernel(ForwardArguments a) {
  using Shape = ForwardShape<D>;
  SB_SHARED(shared);
  if (kGap > 0 && threadIdx.x == 0) {
    PoisonGap(shared + Shape::kK - kGap);
    PoisonGap(shared + Shape::kV - kGap);
    PoisonGap(shared + Shape::kSweep - kGap);
  }
  SweepShared* sweep = reinterpret_cast<SweepShared*>(shared + Shape::kSweep);
  for (int64_t round = 0; round < NumRounds(a.sweep); ++round) {
    if (!BeginTile(a.sweep, round, sweep)) continue;
    for (Item item; NextItem(a.sweep, sweep, &item);) ForwardItem<E, D>(a, item, shared);
    __syncthreads();
    FinishRows<E, D>(a, shared);
    __syncthreads();  // all are done with the tile
  }
}

}  // namespace cuda
}  // namespace sb
