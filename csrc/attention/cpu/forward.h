// Attention over the own block and the selected ones, with an online softmax: block by block,
// ascending.
#pragma once

#include <cmath>

#include "attention/cpu/work.h"

namespace sb {
namespace SB_ISA {
namespace {

struct ForwardScratch {
  ForwardScratch(char* base, const TaskList& list, int64_t G, int64_t D)
      : ldq(D + 16), lds(list.width + 16), carver(base) {
    // Leading dimensions are no powers of two: those would use half of the L1 sets.
    q = carver.Take<float>(kTileRows * ldq);
    s = carver.Take<float>(kTileRows * lds);
    kt = carver.Take<float>(RoundUp(list.width, kPanel) * D);
    v = carver.Take<float>(list.width * D);
    o = carver.Take<float>(list.longest * G * D);
    max = carver.Take<float>(list.longest * G);
    sum = carver.Take<float>(list.longest * G);
    rows = carver.Take<int32_t>(kTileRows);
    alpha = carver.Take<float>(kTileRows);
  }
  int64_t ldq, lds;
  Carver carver;
  float *q, *s, *kt, *v, *o, *max, *sum, *alpha;
  int32_t* rows;
};

template <class E>
void ForwardTask(const Problem& p, const TaskList& list, const Task& task, Tensor<E> q, Tensor<E> k,
                 Tensor<E> v, const int64_t* lists, const int32_t* rows, E* out, float* lse,
                 const ForwardScratch& x) {
  const Head hd(p, task.sequence, task.head);
  const int64_t G = hd.G, D = p.head_dim, B = hd.B, panel = HeadPanel(D);
  const int d = static_cast<int>(D);
  const int64_t t0 = task.begin, t1 = Smaller(t0 + list.chunk, hd.len), row0 = t0 * G,
                row1 = t1 * G;
  std::memset(x.o, 0, static_cast<size_t>((row1 - row0) * D) * 4);
  for (int64_t r = 0; r < row1 - row0; ++r) x.max[r] = kLowest;
  std::memset(x.sum, 0, static_cast<size_t>(row1 - row0) * 4);
  Visitors next(hd, task, 0, row0, row1, lists, rows);
  for (int64_t b = 0; b * B < t1; ++b) {
    const Visitors visitors = next;
    next = Visitors(hd, task, b + 1, row0, row1, lists, rows);
    const bool diagonal = b * B >= t0;
    if (visitors.count == 0 && !diagonal) continue;
    const int keys = static_cast<int>(hd.BlockKeys(b));
    PackTransposed(k.Row(hd.start + b * B, hd.kv), k.token, keys, D, p.scale * kLog2e, x.kt);
    PackRows(v.Row(hd.start + b * B, hd.kv), v.token, keys, D, x.v);
    ForTiles(hd, b, visitors, next, diagonal, int64_t{1} << 31, [&](const Tile& tile) {
      const int M = tile.count;
      for (int i = 0; i < M; ++i) {
        x.rows[i] = static_cast<int32_t>(tile.rows[i] - row0);
        LoadRow(hd.Row(q, tile.rows[i]), x.q + i * x.ldq, D);
      }
      const auto valid = [&](int i) {  // keys that row i of a causal tile attends
        return static_cast<int>(hd.Token(tile.rows[i]) - b * B + 1);
      };
      const int cols = tile.causal ? valid(M - 1) : keys;
      Gemm<false, Update::kSet>(M, cols, d, x.q, x.ldq, x.kt, kPanel, D * kPanel, x.s, x.lds);
      const int cols16 = (cols + 15) & ~15;
      for (int i = 0; i < tile.num_ahead; ++i) PrefetchRow(hd.Row(q, tile.ahead[i]), D);
      for (int i0 = 0; i0 < M; i0 += 16) {
        const int n = Smaller(16, M - i0);
        for (int i = i0; i < i0 + n; ++i) {
          if (tile.causal) FillTail(x.s + i * x.lds, valid(i), cols16, kNegInf);
          PrefetchRow(x.o + static_cast<int64_t>(x.rows[i]) * D, D);
        }
        Softmax16(x.s + i0 * x.lds, x.lds, n, cols16, x.rows + i0, x.max, x.sum, x.alpha + i0);
      }
      Gemm<false, Update::kScaleAddRows>(M, d, cols, x.s, x.lds, x.v, panel, keys * panel, x.o, D,
                                         x.rows, x.alpha);
    });
  }
  const auto result = [&](int64_t r) {
    const int64_t t = hd.Token(r);
    return out + ((hd.start + t) * p.query_heads + hd.QueryHead(r, t)) * D;
  };
  for (int64_t r = row0; r < row1; ++r) {
    const int64_t t = hd.Token(r), h = hd.QueryHead(r, t), i = r - row0;
    if (r + kAhead < row1) PrefetchForWrite(result(r + kAhead), D);
    StoreRow(x.o + i * D, result(r), D, 1.0f / x.sum[i]);
    lse[h * p.tokens + hd.start + t] = (x.max[i] + log2f(x.sum[i])) * kLn2;
  }
}

template <class E>
int Forward(const Problem& p, const TaskList& list, View q, View k, View v, const int64_t* lists,
            const int32_t* rows, void* out, float* lse) {
  const int threads = Threads(p, list.count);
  const int64_t G = p.query_heads / p.kv_heads, D = p.head_dim;
  const int64_t bytes = ForwardScratch(nullptr, list, G, D).carver.bytes();
  const Scratch scratch(bytes * threads, p.poison);
  if (!scratch.ok()) return kOutOfMemory;
  ForEachTask(threads, list.count, [&](int thread, int64_t i) {
    const ForwardScratch x(scratch.data() + thread * bytes, list, G, D);
    ForwardTask<E>(p, list, list.tasks[i], Tensor<E>(q), Tensor<E>(k), Tensor<E>(v), lists, rows,
                   static_cast<E*>(out), lse, x);
  });
  return kOk;
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
