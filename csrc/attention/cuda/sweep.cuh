// How the query-owned kernels walk: a block of threads owns tiles of rows of one KV head and
// visits, block of keys by block of keys, the rows of its tile that attend it. Rows are gathered
// 128 at a time (an item), 32 per warp; what is summed up per row waits in global memory from item
// to item.
//
// Where the walk stands is kept in shared memory: the loops over keys need all registers.
#pragma once

#include "attention/cuda/common.cuh"

namespace sb {
namespace cuda {

constexpr int kSweepThreads = 128;
constexpr int kSweepRows = 128;   // of an item
constexpr int kSweepWindow = 64;  // blocks whose visitors are looked up at a time

struct SweepArguments {
  Problem p;
  Layout layout;
  const int64_t* lists;
  const int32_t* rows;
};

// Up to kSweepRows rows that attend the same keys.
struct Item {
  const int32_t* list;  // the rows, or nullptr: those from `first` on
  int first, count;
  int key_begin, key_end;  // within the sequence
  bool causal;             // a row attends no key after its token, and nothing is summed up yet
};

// How far a tile is done.
struct SweepCursor {
  int row;         // first whose own block is not done
  int block;       // earlier block under way
  int visitors;    // of it
  int done;        // of these
  int last_block;  // the blocks before it are to be visited
  bool dense;
};

// Shared memory that a sweep needs for itself.
struct SweepShared {
  int64_t begin[kSweepWindow];
  int count[kSweepWindow];
  int2 tokens[kSweepRows];  // {token among all, query head} of an item's rows; -1: none
  int locals[kSweepRows];   // row within the tile, -1: none
  Head head;                // the tile: rows [row0, row1) of it
  int row0, row1;
  SweepCursor cursor;
};

// Makes a tile the current one. Late tiles have most to do and come first; the direction
// alternates, so that nobody always gets the longest of a round. False: there is none in this
// round.
SB_DEVICE bool BeginTile(const SweepArguments& a, int64_t round, SweepShared* shared) {
  const int kv_heads = static_cast<int>(a.p.kv_heads);
  const int num_tiles = a.layout.tiles[a.p.sequences];
  const int64_t grid = gridDim.x, within = blockIdx.x;
  const int64_t i = round * grid + (round % 2 == 0 ? within : grid - 1 - within);
  if (i >= static_cast<int64_t>(num_tiles) * kv_heads) return false;
  if (threadIdx.x == 0) {
    const int number = num_tiles - 1 - static_cast<int>(i / kv_heads);
    const int n = FindSequence(a.layout.tiles, a.p.sequences, number);
    const Head head = HeadOf(a.p, a.layout, n, static_cast<int>(i % kv_heads));
    const int row0 = (number - a.layout.tiles[n]) * a.layout.tile_rows;
    const int row1 = min(row0 + a.layout.tile_rows, head.Rows());
    const bool dense = IsDense(a.p, head);
    const int last = dense ? 0 : (row1 - 1) / head.group / static_cast<int>(a.p.block_size);
    shared->head = head;
    shared->row0 = row0;
    shared->row1 = row1;
    shared->cursor = SweepCursor{row0, -1, 0, 0, last, dense};
  }
  __syncthreads();
  return true;
}

SB_DEVICE int64_t NumRounds(const SweepArguments& a) {
  const int64_t total = a.layout.tiles[a.p.sequences] * a.p.kv_heads;
  return (total + gridDim.x - 1) / gridDim.x;
}

// Looks up where the visitors of blocks [block, block + kSweepWindow) are in their lists: half of
// the threads where they begin, half where they end.
SB_DEVICE void LookUp(const SweepArguments& a, int block, int last_block, SweepShared* shared) {
  const int tid = static_cast<int>(threadIdx.x), which = tid % kSweepWindow;
  const bool inside = block + which < last_block;
  int64_t place = 0;
  if (inside) {
    const int64_t* bounds = a.lists + shared->head.list + block + which;
    place =
        LowerBound(a.rows, bounds[0], bounds[1], tid < kSweepWindow ? shared->row0 : shared->row1);
  }
  __syncthreads();  // all are done with the window before
  if (tid < kSweepWindow) shared->begin[which] = place;
  __syncthreads();
  if (tid >= kSweepWindow && inside)
    shared->count[which] = static_cast<int>(place - shared->begin[which]);
  __syncthreads();
}

// Rows that attend from their block's first key, or from the sequence's, up to their own token.
SB_DEVICE Item CausalItem(const SweepArguments& a, const SweepCursor& cursor,
                          const SweepShared* shared) {
  const int group = shared->head.group, size = static_cast<int>(a.p.block_size);
  int begin = 0, last = shared->row1;
  if (!cursor.dense) {
    const int block = cursor.row / group / size;
    begin = block * size;
    last = static_cast<int>(min(static_cast<int64_t>(last),
                                (static_cast<int64_t>(block) + 1) * a.p.block_size * group));
  }
  const int count = min(kSweepRows, last - cursor.row);
  return Item{nullptr, cursor.row, count, begin, (cursor.row + count - 1) / group + 1, true};
}

// Writes an item's rows to shared memory. The caller synchronises before and after.
SB_DEVICE void PlaceRows(const Item& item, SweepShared* shared) {
  const int i = static_cast<int>(threadIdx.x), group = shared->head.group;
  int row = -1;
  if (i < item.count) row = item.list == nullptr ? item.first + i : item.list[i];
  // An index from elsewhere cannot make the kernel write astray.
  const bool some = row >= shared->row0 && row < shared->row1;
  const int token = some ? row / group : 0;
  shared->locals[i] = some ? row - shared->row0 : -1;
  shared->tokens[i] = some ? make_int2(static_cast<int>(shared->head.start) + token,
                                       shared->head.kv * group + (row - token * group))
                           : make_int2(-1, 0);
}

// The next item: first the rows' own blocks, then the earlier ones, ascending, so that sums come
// out the same whatever the tiles. All threads together; all may write to shared memory afterwards.
// The rows are in place after the caller's next __syncthreads.
SB_DEVICE bool NextItem(const SweepArguments& a, SweepShared* shared, Item* item) {
  SweepCursor cursor = shared->cursor;
  if (cursor.row < shared->row1) {
    *item = CausalItem(a, cursor, shared);
    cursor.row += item->count;
  } else {
    while (cursor.done >= cursor.visitors) {
      if (++cursor.block >= cursor.last_block) return false;
      if (cursor.block % kSweepWindow == 0) LookUp(a, cursor.block, cursor.last_block, shared);
      cursor.visitors = shared->count[cursor.block % kSweepWindow];
      cursor.done = 0;
    }
    const int size = static_cast<int>(a.p.block_size), key = cursor.block * size;
    const int32_t* list = a.rows + shared->begin[cursor.block % kSweepWindow] + cursor.done;
    *item = Item{list, 0, min(kSweepRows, cursor.visitors - cursor.done), key, key + size, false};
    cursor.done += kSweepRows;
  }
  __syncthreads();  // all have read the cursor and are done with the item before
  if (threadIdx.x == 0) shared->cursor = cursor;
  PlaceRows(*item, shared);
  return true;
}

// Where the sums of this block of threads' tile are.
SB_DEVICE float* PartialOf(float* all, const Layout& layout, int width) {
  return all +
         static_cast<int64_t>(Opaque(static_cast<int>(blockIdx.x))) * layout.tile_rows * width;
}

// The last key that a thread's row sees: row i of the item.
SB_DEVICE int LastKey(const SweepShared* shared, int i, int key_end, bool causal) {
  const int token = shared->tokens[i].x - static_cast<int>(shared->head.start);
  return causal ? min(token, key_end - 1) : key_end - 1;
}

}  // namespace cuda
}  // namespace sb
