// What select, forward and backward share: addressing of one head's rows, scratch memory, tiles of
// a block.
#pragma once

#include <sys/mman.h>

#include <cstdlib>

#include "attention/cpu/parallel.h"
#include "attention/cpu/softmax.h"
#include "attention/problem.h"

namespace sb {
namespace SB_ISA {
namespace {

constexpr int kTileRows = 96;  // gathered query rows per tile
constexpr int kOwnRows =
    48;  // the same in the causal own block: smaller tiles waste less above the diagonal
// Rows in order are prefetched this far ahead: memory is some hundred nanoseconds away, and the
// hardware does not follow heads that are interleaved.
constexpr int kAhead = 12;

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
    const auto size = static_cast<size_t>(RoundUp(Larger<int64_t>(bytes, 64), 64));
#if defined(MADV_HUGEPAGE)
    // Rows are gathered from all over it: with small pages every one would miss the TLB. Mapped
    // apart, so that the advice ends with it.
    constexpr size_t kPage = size_t{2} << 20;
    if (size >= 2 * kPage) {
      map_size_ = size + kPage;
      map_ = mmap(nullptr, map_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (map_ == MAP_FAILED) return;
      data_ =
          reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(map_) + kPage - 1) & ~(kPage - 1));
      madvise(data_, size, MADV_HUGEPAGE);
    }
#endif
    if (data_ == nullptr) data_ = static_cast<char*>(std::aligned_alloc(64, size));
    if (data_ != nullptr && poison) std::memset(data_, 0xff, size);
  }
  ~Scratch() {
    if (map_ == nullptr)
      std::free(data_);
    else if (map_ != MAP_FAILED)
      munmap(map_, map_size_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool ok() const { return data_ != nullptr; }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  void* map_ = nullptr;
  size_t map_size_ = 0;
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
    if (block * hd.B * hd.G >= row1) return;
    if (task.dense) {
      first = Larger(row0, (block + 1) * hd.B * hd.G);
      count = Larger<int64_t>(0, row1 - first);
    } else {
      const int32_t* end = rows + lists[task.list + block + 1];
      list = FirstAtLeast(rows + lists[task.list + block], end, row0);
      count = FirstAtLeast(list, end, row1) - list;
    }
  }
  int32_t Row(int64_t i) const {
    return list != nullptr ? list[i] : static_cast<int32_t>(first + i);
  }
  // Where a tile from visitor i on ends, which must stay below the row `limit`.
  int64_t Cut(int64_t i, int64_t limit) const {
    const int64_t stop = Smaller(i + kTileRows, count);
    if (list == nullptr) return Smaller(stop, limit - first);
    return Row(stop - 1) < limit ? stop : FirstAtLeast(list + i, list + stop, limit) - list;
  }
  const int32_t* list = nullptr;
  int64_t first = 0, count = 0;
};

// Rows that meet a block together, ascending; ahead are those of the tile after it, worth
// prefetching.
struct Tile {
  int32_t rows[kTileRows], ahead[kTileRows];
  int count, num_ahead;
  bool causal;
};

// Calls f(tile) for all rows that attend a block, ascending: with `diagonal` its own rows, then its
// visitors. `next` are those of the block after it. No tile crosses a multiple of `segment` rows,
// so with chunks that are whole segments the tiles do not depend on the chunk.
template <class F>
void ForTiles(const Head& hd, int64_t block, const Visitors& now, const Visitors& next,
              bool diagonal, int64_t segment, F f) {
  Tile tile;
  tile.causal = true;
  const int64_t end = diagonal ? (block * hd.B + hd.BlockKeys(block)) * hd.G : 0;
  for (int64_t r = block * hd.B * hd.G; r < end; r += kOwnRows) {
    tile.count = static_cast<int>(Smaller<int64_t>(kOwnRows, end - r));
    const bool last = r + kOwnRows >= end;
    tile.num_ahead =
        static_cast<int>(Smaller<int64_t>(kTileRows, last ? now.count : end - r - kOwnRows));
    for (int i = 0; i < tile.count; ++i) tile.rows[i] = static_cast<int32_t>(r + i);
    for (int i = 0; i < tile.num_ahead; ++i)
      tile.ahead[i] = last ? now.Row(i) : static_cast<int32_t>(r + kOwnRows + i);
    f(tile);
  }
  tile.causal = false;
  for (int64_t i = 0; i < now.count;) {
    const int64_t stop = now.Cut(i, (now.Row(i) / segment + 1) * segment);
    tile.count = static_cast<int>(stop - i);
    const bool last = stop == now.count;
    tile.num_ahead =
        static_cast<int>(Smaller<int64_t>(kTileRows, last ? next.count : now.count - stop));
    for (int j = 0; j < tile.count; ++j) tile.rows[j] = now.Row(i + j);
    for (int j = 0; j < tile.num_ahead; ++j) tile.ahead[j] = last ? next.Row(j) : now.Row(stop + j);
    f(tile);
    i = stop;
  }
}

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
