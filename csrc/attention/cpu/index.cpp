// The index: from "which blocks does a row attend" to "which rows attend a block", by a counting
// sort.
//
// The rows of one (sequence, KV head) are cut into chunks that are counted apart. Where a chunk
// starts to write in a list follows from the counts of the chunks before it, so lists come out the
// same for any cut and any number of threads.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/parallel.h"
#include "attention/cpu/plan.h"

namespace sb {
namespace {

constexpr int64_t kRowsPerThread = 4096;  // fewer are done before a second thread has woken

// One (sequence, KV head) that has lists.
struct Pair {
  int64_t sequence, head;
  int64_t length, blocks;
  int64_t list;  // number of its first block's list
};

struct Pairs {
  std::vector<Pair> pairs;
  int64_t lists = 0;  // those of dense pairs too, which stay empty
  int64_t tokens = 0;
};

Pairs PairsOf(const Problem& p) {
  Pairs all;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = p.cu_seqlens[n + 1] - p.cu_seqlens[n], blocks = NumBlocks(p, n);
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      if (!IsDense(p, n, head)) {
        all.pairs.push_back({n, head, length, blocks, all.lists});
        all.tokens += length;
      }
      all.lists += blocks;
    }
  }
  return all;
}

int ThreadsFor(const Problem& p, const Pairs& all) {
  return Threads(p, all.tokens * (p.query_heads / p.kv_heads) / kRowsPerThread);
}

// Tokens [begin, end) of one pair.
struct Chunk {
  const Pair* pair;
  int64_t begin, end;
  int64_t cursors;  // where its cursors start: one per block
};

struct Chunks {
  std::vector<Chunk> chunks;
  int64_t cursors = 0;
};

// Some two per thread, and neighbours in different pairs: two threads in one list at once would
// pull its cache lines to and fro. None is shorter than its sequence has blocks, so that cursors
// take no more memory than the tokens.
Chunks ChunksOf(const Pairs& all, int threads) {
  Chunks cut;
  const int64_t most = threads > 1 ? all.tokens / (2 * threads) + 1 : all.tokens;
  for (const Pair& pair : all.pairs) {
    const int64_t step = std::max(most, pair.blocks);
    for (int64_t begin = 0; begin < pair.length; begin += step) {
      cut.chunks.push_back({&pair, begin, std::min(begin + step, pair.length), cut.cursors});
      cut.cursors += pair.blocks;
    }
  }
  std::stable_sort(cut.chunks.begin(), cut.chunks.end(),
                   [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
  return cut;
}

// The selection of the tokens of one chunk, block by block: within a block all rows of a query head
// select the same number of blocks.
struct Reader {
  Reader(const Problem& p, const int16_t* selection, const Chunk& chunk)
      : group(p.query_heads / p.kv_heads),
        width(p.max_budget - 1),
        head(chunk.pair->head * group),
        stride(p.tokens * width),
        budget(p.budget + chunk.pair->sequence * p.query_heads + head),
        first(selection + head * stride + p.cu_seqlens[chunk.pair->sequence] * width) {}
  int64_t Used(int64_t past, int64_t g) const { return std::min<int64_t>(past, budget[g] - 1); }
  const int16_t* Row(int64_t t, int64_t g) const { return first + g * stride + t * width; }

  int64_t group, width, head, stride;
  const int32_t* budget;
  const int16_t* first;
};

// Counts the rows of each block. False: the selection is none that Select would make for these
// lengths and budgets.
bool Count(const Problem& p, const int16_t* selection, const Chunk& chunk, int64_t* count) {
  const Reader in(p, selection, chunk);
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    const int64_t past = begin / p.block_size;
    const int64_t end = std::min(chunk.end, (past + 1) * p.block_size);
    for (int64_t g = 0; g < in.group; ++g) {
      const int64_t used = in.Used(past, g);
      if (used == 0) continue;
      for (int64_t t = begin; t < end; ++t) {
        const int16_t* blocks = in.Row(t, g);
        int64_t last = -1;
        for (int64_t j = 0; j < used; ++j) {
          if (blocks[j] <= last || blocks[j] >= past) return false;
          last = blocks[j];
          ++count[last];
        }
      }
    }
    begin = end;
  }
  return true;
}

// Bounds the lists, and turns every count into where its chunk starts within the list.
void AddUp(const Chunks& cut, int64_t num_lists, std::vector<int64_t>& cursors, int64_t* lists) {
  std::fill_n(lists, num_lists + 1, 0);
  for (const Chunk& chunk : cut.chunks) {
    int64_t* cursor = cursors.data() + chunk.cursors;
    int64_t* sum = lists + chunk.pair->list + 1;
    for (int64_t b = 0; b < chunk.pair->blocks; ++b) {
      const int64_t count = cursor[b];
      cursor[b] = sum[b];
      sum[b] += count;
    }
  }
  for (int64_t i = 0; i < num_lists; ++i) lists[i + 1] += lists[i];
}

// Writes the rows of a chunk. `lists` are those of its pair.
void Place(const Problem& p, const int16_t* selection, const Chunk& chunk, int64_t* cursor,
           const int64_t* lists, int32_t* rows) {
  for (int64_t b = 0; b < chunk.pair->blocks; ++b) cursor[b] += lists[b];
  const Reader in(p, selection, chunk);
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    const int64_t past = begin / p.block_size;
    const int64_t end = std::min(chunk.end, (past + 1) * p.block_size);
    for (int64_t t = begin; t < end; ++t)
      for (int64_t g = 0; g < in.group; ++g) {
        const int16_t* blocks = in.Row(t, g);
        const int64_t used = in.Used(past, g);
        const int32_t row = static_cast<int32_t>(t * in.group + g);
        for (int64_t j = 0; j < used; ++j) rows[cursor[blocks[j]]++] = row;
      }
    begin = end;
  }
}

// Blocks [begin, end) of one pair.
struct Range {
  const Pair* pair;
  int64_t begin, end;
};

// Some eight per thread: the lists of early blocks are long.
std::vector<Range> RangesOf(const Pairs& all, int threads) {
  std::vector<Range> ranges;
  const int64_t step = threads > 1 ? all.lists / (8 * threads) + 1 : all.lists;
  for (const Pair& pair : all.pairs)
    for (int64_t begin = 0; begin < pair.blocks; begin += step)
      ranges.push_back({&pair, begin, std::min(begin + step, pair.blocks)});
  return ranges;
}

// Whether every list holds ascending rows of later blocks.
bool IsIndex(const Problem& p, const Range& range, const int64_t* lists, const int32_t* rows) {
  const int64_t group = p.query_heads / p.kv_heads, end = range.pair->length * group;
  for (int64_t block = range.begin; block < range.end; ++block) {
    const int64_t* bounds = lists + range.pair->list + block;
    const int32_t *row = rows + bounds[0], *last = rows + bounds[1];
    if (row == last) continue;
    // No branch per row, so that the loop runs at memory speed.
    bool fine = *row >= (block + 1) * p.block_size * group && last[-1] < end;
    for (; row + 1 < last; ++row) fine &= row[0] < row[1];
    if (!fine) return false;
  }
  return true;
}

}  // namespace

int64_t ListCapacity(int64_t tokens, int64_t sequences, int64_t kv_heads, int64_t block_size) {
  return kv_heads * (tokens / block_size + sequences);
}

void Index(const Problem& p, const int16_t* selection, int64_t* lists, int32_t* rows) {
  const Pairs all = PairsOf(p);
  const int threads = ThreadsFor(p, all);
  const Chunks cut = ChunksOf(all, threads);
  const int64_t num_chunks = static_cast<int64_t>(cut.chunks.size());
  std::vector<int64_t> cursors(static_cast<size_t>(cut.cursors));
  std::atomic<bool> valid{true};
  ForEachTask(threads, num_chunks, [&](int, int64_t i) {
    const Chunk& chunk = cut.chunks[static_cast<size_t>(i)];
    if (!Count(p, selection, chunk, cursors.data() + chunk.cursors)) valid = false;
  });
  if (!valid)
    throw std::invalid_argument(
        "selection has entries that are not ascending earlier blocks of their row: it was not made "
        "for these cu_seqlens, budget and block_size. To fix it, pass what moba_select returns for "
        "the same arguments.");
  AddUp(cut, ListCapacity(p.tokens, p.sequences, p.kv_heads, p.block_size), cursors, lists);
  ForEachTask(threads, num_chunks, [&](int, int64_t i) {
    const Chunk& chunk = cut.chunks[static_cast<size_t>(i)];
    Place(p, selection, chunk, cursors.data() + chunk.cursors, lists + chunk.pair->list, rows);
  });
}

void CheckIndex(const Problem& p, const int64_t* lists, const int32_t* rows) {
  const Pairs all = PairsOf(p);  // the lists of others are not read
  const int threads = ThreadsFor(p, all);
  const std::vector<Range> ranges = RangesOf(all, threads);
  std::atomic<bool> valid{true};
  ForEachTask(threads, static_cast<int64_t>(ranges.size()), [&](int, int64_t i) {
    if (!IsIndex(p, ranges[static_cast<size_t>(i)], lists, rows)) valid = false;
  });
  if (!valid)
    throw std::invalid_argument(
        "list_rows holds a list that is not ascending or names rows that cannot attend its block: "
        "the kernels read and write at these rows. To fix it, pass what moba_index returns for the "
        "same arguments.");
}

}  // namespace sb
