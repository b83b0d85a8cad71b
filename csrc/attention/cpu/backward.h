// Gradients in one fused pass: scores and dP are computed once per tile, five products, no atomics
// on data.
//
// A task owns dQ of its rows. It adds its part of dK and dV to fp32 sums block by block, always
// after the previous chunk of the same head has done that block (`turn`): the order of every sum is
// fixed, whatever the number of threads.
#pragma once

#include "attention/cpu/work.h"

namespace sb {
namespace SB_ISA {
namespace {

struct BackwardScratch {
  BackwardScratch(char* base, const TaskList& list, int64_t G, int64_t D)
      : ldq(D + 16), lds(list.width + 16), carver(base) {
    q = carver.Take<float>(kTileRows * ldq);
    dout = carver.Take<float>(kTileRows * ldq);
    s = carver.Take<float>(kTileRows * lds);
    dp = carver.Take<float>(kTileRows * lds);
    kt = carver.Take<float>(RoundUp(list.width, kPanel) * D);
    vt = carver.Take<float>(RoundUp(list.width, kPanel) * D);
    k = carver.Take<float>(list.width * D);
    dq = carver.Take<float>(list.longest * G * D);
    delta = carver.Take<float>(list.longest * G);
    lse2 = carver.Take<float>(list.longest * G);
    rows = carver.Take<int32_t>(kTileRows);
  }
  int64_t ldq, lds;
  Carver carver;
  float *q, *dout, *s, *dp, *kt, *vt, *k, *dq, *delta, *lse2;
  int32_t* rows;
};

template <class E>
struct BackwardInputs {
  Tensor<E> dout, q, k, v, out;
  const float *lse, *dlse;
  const int64_t* lists;
  const int32_t* rows;
  E *dq, *dk, *dv;
  float *dk_sum, *dv_sum;  // [tokens, kv_heads, D]; dk and dv themselves when those are fp32
  int64_t* turns;          // per list: how many chunks have added to it
};

template <class E>
void BackwardTask(const Problem& p, const TaskList& list, const Task& task,
                  const BackwardInputs<E>& in, const BackwardScratch& x) {
  const Head hd(p, task.sequence, task.head);
  const int64_t G = hd.G, D = p.head_dim, B = hd.B, panel = HeadPanel(D), ldkv = p.kv_heads * D;
  const int d = static_cast<int>(D);
  const int64_t t0 = task.begin, t1 = Smaller(t0 + list.chunk, hd.len), row0 = t0 * G,
                row1 = t1 * G;
  for (int64_t r = row0; r < row1; ++r) {
    const int64_t t = hd.Token(r), h = hd.QueryHead(r, t), at = h * p.tokens + hd.start + t;
    if (r + kAhead < row1) {
      PrefetchRow(hd.Row(in.dout, r + kAhead), D);
      PrefetchRow(hd.Row(in.out, r + kAhead), D);
    }
    const float delta = Dot(in.dout.Row(hd.start + t, h), in.out.Row(hd.start + t, h), D);
    x.delta[r - row0] = p.scale * (in.dlse == nullptr ? delta : delta - in.dlse[at]);
    x.lse2[r - row0] = in.lse[at] * kLog2e;
  }
  std::memset(x.dq, 0, static_cast<size_t>((row1 - row0) * D) * 4);
  Visitors next(hd, task, 0, row0, row1, in.lists, in.rows);
  for (int64_t b = 0; b * B < t1; ++b) {
    const Visitors visitors = next;
    next = Visitors(hd, task, b + 1, row0, row1, in.lists, in.rows);
    const bool diagonal = b * B >= t0, last = t1 == hd.len;
    const int keys = static_cast<int>(hd.BlockKeys(b));
    const int64_t kv = ((hd.start + b * B) * p.kv_heads + hd.kv) * D;
    if (visitors.count > 0 || diagonal) {
      const E *k = in.k.Row(hd.start + b * B, hd.kv), *v = in.v.Row(hd.start + b * B, hd.kv);
      PackTransposed(k, in.k.token, keys, D, p.scale * kLog2e, x.kt);
      // With the scale in V (and in delta) it is in dS, and so in dQ and dK.
      PackTransposed(v, in.v.token, keys, D, p.scale, x.vt);
      PackRows(k, in.k.token, keys, D, x.k);
    }
    int64_t* turn = in.turns + task.list + b;
    const int64_t mine = t0 / list.chunk - b * B / list.chunk;
    WaitFor(turn, mine);
    if (diagonal)  // the block's first chunk
      for (int i = 0; i < keys; ++i) {
        std::memset(in.dk_sum + kv + i * ldkv, 0, static_cast<size_t>(D) * 4);
        std::memset(in.dv_sum + kv + i * ldkv, 0, static_cast<size_t>(D) * 4);
      }
    ForTiles(hd, b, visitors, next, diagonal, list.segment * G, [&](const Tile& tile) {
      const int M = tile.count;
      const auto valid = [&](int i) {  // keys that row i of the tile attends
        return tile.causal ? static_cast<int>(hd.Token(tile.rows[i]) - b * B + 1) : keys;
      };
      for (int i = 0; i < M; ++i) {
        const int64_t t = hd.Token(tile.rows[i]), h = hd.QueryHead(tile.rows[i], t);
        x.rows[i] = static_cast<int32_t>(tile.rows[i] - row0);
        LoadRow(in.q.Row(hd.start + t, h), x.q + i * x.ldq, D);
        LoadRow(in.dout.Row(hd.start + t, h), x.dout + i * x.ldq, D);
      }
      const int cols = valid(M - 1);
      Gemm<false, Update::kSet>(M, cols, d, x.q, x.ldq, x.kt, kPanel, D * kPanel, x.s, x.lds);
      Gemm<false, Update::kSet>(M, cols, d, x.dout, x.ldq, x.vt, kPanel, D * kPanel, x.dp, x.lds);
      for (int i = 0; i < tile.num_ahead; ++i) {
        const int64_t t = hd.Token(tile.ahead[i]), h = hd.QueryHead(tile.ahead[i], t);
        PrefetchRow(in.q.Row(hd.start + t, h), D);
        PrefetchRow(in.dout.Row(hd.start + t, h), D);
      }
      for (int i = 0; i < M; ++i) {
        PrefetchRow(x.dq + static_cast<int64_t>(x.rows[i]) * D, D);
        GradRow(x.s + i * x.lds, x.dp + i * x.lds, valid(i), cols, x.lse2[x.rows[i]],
                x.delta[x.rows[i]]);
      }
      Gemm<false, Update::kAddRows>(M, d, cols, x.dp, x.lds, x.k, panel, keys * panel, x.dq, D,
                                    x.rows);
      Gemm<true, Update::kAdd>(cols, d, M, x.s, x.lds, x.dout, x.ldq, panel, in.dv_sum + kv, ldkv);
      Gemm<true, Update::kAdd>(cols, d, M, x.dp, x.lds, x.q, x.ldq, panel, in.dk_sum + kv, ldkv);
    });
    if (last && sizeof(E) != sizeof(float))
      for (int i = 0; i < keys; ++i) {
        StoreRow(in.dk_sum + kv + i * ldkv, in.dk + kv + i * ldkv, D, 1.0f);
        StoreRow(in.dv_sum + kv + i * ldkv, in.dv + kv + i * ldkv, D, 1.0f);
      }
    __atomic_store_n(turn, mine + 1, __ATOMIC_RELEASE);
  }
  const auto result = [&](int64_t r) {
    const int64_t t = hd.Token(r);
    return in.dq + ((hd.start + t) * p.query_heads + hd.QueryHead(r, t)) * D;
  };
  for (int64_t r = row0; r < row1; ++r) {
    if (r + kAhead < row1) PrefetchForWrite(result(r + kAhead), D);
    StoreRow(x.dq + (r - row0) * D, result(r), D, 1.0f);
  }
}

template <class E>
int Backward(const Problem& p, const TaskList& list, View dout, View q, View k, View v, View out,
             const float* lse, const float* dlse, const int64_t* lists, const int32_t* rows,
             Gradients g) {
  const int threads = Threads(p, list.count);
  const int64_t G = p.query_heads / p.kv_heads, D = p.head_dim;
  const bool converts = sizeof(E) != sizeof(float);
  const int64_t sums = converts ? p.tokens * p.kv_heads * D : 0;
  const int64_t bytes = BackwardScratch(nullptr, list, G, D).carver.bytes();
  Carver shared(nullptr);
  shared.Take<float>(sums);
  shared.Take<float>(sums);
  shared.Take<int64_t>(list.lists);
  const Scratch scratch(shared.bytes() + bytes * threads, p.poison);
  if (!scratch.ok()) return kOutOfMemory;
  Carver carver(scratch.data());
  float* dk_sum = carver.Take<float>(sums);
  float* dv_sum = carver.Take<float>(sums);
  int64_t* turns = carver.Take<int64_t>(list.lists);
  std::memset(turns, 0, static_cast<size_t>(list.lists) * 8);
  if (!converts) {
    dk_sum = static_cast<float*>(g.dk);
    dv_sum = static_cast<float*>(g.dv);
  }
  const BackwardInputs<E> in{Tensor<E>(dout),
                             Tensor<E>(q),
                             Tensor<E>(k),
                             Tensor<E>(v),
                             Tensor<E>(out),
                             lse,
                             dlse,
                             lists,
                             rows,
                             static_cast<E*>(g.dq),
                             static_cast<E*>(g.dk),
                             static_cast<E*>(g.dv),
                             dk_sum,
                             dv_sum,
                             turns};
  ForEachTask(threads, list.count, [&](int thread, int64_t i) {
    const BackwardScratch x(scratch.data() + shared.bytes() + thread * bytes, list, G, D);
    BackwardTask<E>(p, list, list.tasks[i], in, x);
  });
  return kOk;
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
