#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "attention/cpu/attention.h"
#include "attention/cpu/plan.h"

namespace sb {
namespace {

// Calls f(block, row) for every selected block of one (sequence, KV head), rows ascending. False:
// the selection is none that Select would make for these lengths and budgets.
template <class F>
bool ForEachSelected(const Problem& p, const int16_t* selection, int64_t n, int64_t kv, F f) {
  const int64_t group = p.query_heads / p.kv_heads, width = p.max_budget - 1, B = p.block_size;
  const int64_t start = p.cu_seqlens[n], length = p.cu_seqlens[n + 1] - start;
  for (int64_t t = B; t < length; ++t) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = kv * group + g;
      const int64_t used = std::min<int64_t>(t / B, p.budget[n * p.query_heads + h] - 1);
      const int16_t* blocks = selection + (h * p.tokens + start + t) * width;
      int64_t last = -1;
      for (int64_t j = 0; j < used; ++j) {
        if (blocks[j] <= last || blocks[j] >= t / B) return false;
        last = blocks[j];
        f(last, t * group + g);
      }
    }
  }
  return true;
}

}  // namespace

int64_t ListCapacity(int64_t tokens, int64_t sequences, int64_t kv_heads, int64_t block_size) {
  return kv_heads * (tokens / block_size + sequences);
}

void Index(const Problem& p, const int16_t* selection, int64_t* lists, int32_t* rows) {
  const int64_t capacity = ListCapacity(p.tokens, p.sequences, p.kv_heads, p.block_size);
  std::vector<int64_t> first(
      static_cast<size_t>(p.sequences));  // list of the sequence's first block
  int64_t num_lists = 0;
  for (int64_t n = 0; n < p.sequences; ++n) {
    first[static_cast<size_t>(n)] = num_lists;
    num_lists += p.kv_heads * NumBlocks(p, n);
  }
  std::fill_n(lists, capacity + 1, 0);
  std::vector<int64_t> next(static_cast<size_t>(num_lists));
  std::atomic<bool> valid{true};
  const int64_t pairs = p.sequences * p.kv_heads;
  const auto list_of = [&](int64_t n, int64_t kv) {
    return first[static_cast<size_t>(n)] + kv * NumBlocks(p, n);
  };
  // A counting sort: count, add up, place.
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1 && pairs > 1)
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t n = pair / p.kv_heads, kv = pair % p.kv_heads;
    if (IsDense(p, n, kv)) continue;
    int64_t* count = lists + list_of(n, kv) + 1;
    if (!ForEachSelected(p, selection, n, kv, [=](int64_t block, int64_t) { ++count[block]; }))
      valid = false;
  }
  if (!valid)
    throw std::invalid_argument(
        "selection has entries that are not ascending earlier blocks of their row: it was not made "
        "for these "
        "cu_seqlens, budget and block_size. To fix it, pass what moba_select returns for the same "
        "arguments.");
  for (int64_t i = 0; i < capacity; ++i) lists[i + 1] += lists[i];
  std::copy_n(lists, num_lists, next.begin());
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1 && pairs > 1)
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t n = pair / p.kv_heads, kv = pair % p.kv_heads;
    if (IsDense(p, n, kv)) continue;
    int64_t* at = next.data() + list_of(n, kv);
    ForEachSelected(p, selection, n, kv, [=](int64_t block, int64_t row) {
      rows[at[block]++] = static_cast<int32_t>(row);
    });
  }
}

void CheckIndex(const Problem& p, const int64_t* lists, const int32_t* rows) {
  const int64_t group = p.query_heads / p.kv_heads, pairs = p.sequences * p.kv_heads;
  std::vector<int64_t> first(static_cast<size_t>(p.sequences));
  int64_t num_lists = 0;
  for (int64_t n = 0; n < p.sequences; ++n) {
    first[static_cast<size_t>(n)] = num_lists;
    num_lists += p.kv_heads * NumBlocks(p, n);
  }
  std::atomic<bool> valid{true};
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads) if (p.threads > 1 && pairs > 1)
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t n = pair / p.kv_heads, kv = pair % p.kv_heads, blocks = NumBlocks(p, n);
    if (IsDense(p, n, kv)) continue;  // its lists are not read
    const int64_t end = (p.cu_seqlens[n + 1] - p.cu_seqlens[n]) * group;
    const int64_t* bounds = lists + first[static_cast<size_t>(n)] + kv * blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      const int32_t *row = rows + bounds[block], *last = rows + bounds[block + 1];
      if (row == last) continue;
      // Rows of later blocks only. No branch per row, so that the loop runs at memory speed.
      bool fine = *row >= (block + 1) * p.block_size * group && last[-1] < end;
      for (; row + 1 < last; ++row) fine &= row[0] < row[1];
      if (!fine) valid = false;
    }
  }
  if (!valid)
    throw std::invalid_argument(
        "list_rows holds a list that is not ascending or names rows that cannot attend its block: "
        "the kernels read and write at these rows. To fix it, pass what moba_index returns for the "
        "same arguments.");
}

}  // namespace sb
