// What select, forward and backward share: addressing of one head's rows, scratch memory, threads,
// tiles of a block.
#pragma once

#include <omp.h>
#include <sched.h>

#include <cstdlib>

#include "attention/cpu/softmax.h"
#include "attention/problem.h"

namespace sb {
namespace SB_ISA {
namespace {

constexpr int kTileRows = 96;  // gathered query rows per tile
constexpr int kOwnRows =
    48;  // the same in the causal own block: smaller tiles waste less above the diagonal

template <class E>
struct Tensor {  // [tokens, heads, D], last dimension contiguous
  explicit Tensor(View v)
      : data(static_cast<const E*>(v.data)), token(v.token_stride), head(v.head_stride) {}
  const E* Row(int64_t t, int64_t h) const { return data + t * token + h * head; }
  const E* data;
  int64_t token, head;
};

// One KV head of one sequence. Gathered rows are numbered token * G + g; tokens count from the
// sequence's start.
struct Head {
  Head(const Problem& p, int64_t n, int64_t h)
      : G(p.query_heads / p.kv_heads),
        B(p.block_size),
        kv(h),
        start(p.cu_seqlens[n]),
        len(p.cu_seqlens[n + 1] - start) {
    while ((int64_t{2} << (shift - 32)) <= G) ++shift;
    inverse = (uint64_t{1} << shift) / static_cast<uint64_t>(G) + 1;
  }
  // row / G by multiplication: exact for every row below 2^31.
  int64_t Token(int64_t row) const {
    return static_cast<int64_t>(static_cast<uint64_t>(row) * inverse >> shift);
  }
  int64_t QueryHead(int64_t row, int64_t token) const { return kv * G + row - token * G; }
  template <class E>
  const E* Row(const Tensor<E>& x, int64_t row) const {
    const int64_t t = Token(row);
    return x.Row(start + t, QueryHead(row, t));
  }
  int64_t BlockKeys(int64_t block) const { return Smaller(B, len - block * B); }

  int64_t G, B, kv, start, len;
  uint64_t inverse;
  int shift = 32;
};

// One allocation for all threads, made before they start: nothing can fail inside the parallel
// region.
class Scratch {
 public:
  Scratch(int64_t bytes, bool poison) {
    const int64_t size = RoundUp(Larger<int64_t>(bytes, 64), 64);
    data_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size)));
    if (data_ != nullptr && poison) std::memset(data_, 0xff, static_cast<size_t>(size));
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool ok() const { return data_ != nullptr; }
  char* data() const { return data_; }

 private:
  char* data_;
};

// Cuts 64-byte aligned arrays from a piece of memory; from nullptr it only counts the bytes.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* Take(int64_t n) {
    char* p = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += RoundUp(n * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(p);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

inline int Threads(const Problem& p, int64_t tasks) {
  return static_cast<int>(Larger<int64_t>(1, Smaller<int64_t>(p.threads, tasks)));
}

// Calls f(thread, task) for all tasks. They are handed out in ascending order, so a task may wait
// for an earlier one however many threads OpenMP really gives.
template <class F>
void ForEachTask(int threads, int64_t tasks, F f) {
  int64_t next = 0;
  const auto work = [&](int thread) {
    while (true) {
      const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      f(thread, task);
    }
  };
  if (threads <= 1) return work(0);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
}

inline void WaitFor(const int64_t* turn, int64_t mine) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; ++spins) {
    if (spins < 2000)
      Pause();
    else
      sched_yield();  // more threads than cores: let the one we wait for run
  }
}

inline const int32_t* FirstAtLeast(const int32_t* begin, const int32_t* end, int64_t row) {
  while (begin < end) {
    const int32_t* mid = begin + (end - begin) / 2;
    if (*mid < row)
      begin = mid + 1;
    else
      end = mid;
  }
  return begin;
}

// The rows of [row0, row1) that attend one block from outside it: a list, or without one all rows
// after the block.
struct Visitors {
  Visitors(const Head& hd, const Task& task, int64_t block, int64_t row0, int64_t row1,
           const int64_t* lists, const int32_t* rows) {
    if (task.dense) {
      first = Larger(row0, (block + 1) * hd.B * hd.G);
      count = Larger<int64_t>(0, row1 - first);
    } else {
      const int32_t* end = rows + lists[task.list + block + 1];
      list = FirstAtLeast(rows + lists[task.list + block], end, row0);
      count = FirstAtLeast(list, end, row1) - list;
    }
  }
  const int32_t* list = nullptr;
  int64_t first = 0, count = 0;
};

// Calls f(rows, M, ahead, causal) for the tiles of a block: first its visitors, then, with
// `diagonal`, its own rows. ahead[i] with i < M are rows worth prefetching, or ahead is nullptr.
template <class F>
void ForTiles(const Head& hd, int64_t block, const Visitors& v, bool diagonal, F f) {
  int32_t tile[kTileRows];
  for (int64_t i = 0; i < v.count; i += kTileRows) {
    const int M = static_cast<int>(Smaller<int64_t>(kTileRows, v.count - i));
    if (v.list != nullptr) {
      const int64_t after = v.count - i - kTileRows;
      f(v.list + i, M, after > 0 ? v.list + i + kTileRows : nullptr,
        static_cast<int>(Smaller<int64_t>(after, M)), false);
    } else {
      for (int j = 0; j < M; ++j) tile[j] = static_cast<int32_t>(v.first + i + j);
      f(static_cast<const int32_t*>(tile), M, static_cast<const int32_t*>(nullptr), 0, false);
    }
  }
  if (!diagonal) return;
  const int64_t end = (block * hd.B + hd.BlockKeys(block)) * hd.G;
  for (int64_t r = block * hd.B * hd.G; r < end; r += kOwnRows) {
    const int M = static_cast<int>(Smaller<int64_t>(kOwnRows, end - r));
    for (int j = 0; j < M; ++j) tile[j] = static_cast<int32_t>(r + j);
    f(static_cast<const int32_t*>(tile), M, static_cast<const int32_t*>(nullptr), 0, true);
  }
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
