#include "balance/slots.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balance/exchanges.h"

namespace sb::balance {

namespace {

// Exchanges that are tried times cells that are looked at; not a time, so that all ranks stop
// alike.
constexpr int64_t kPolishWork = 1 << 18;

void SortByLoad(const Numbers& loads, Items& cells) {
  std::sort(cells.begin(), cells.end(), [&](int32_t a, int32_t b) {
    return loads[a] != loads[b] ? loads[a] > loads[b] : a < b;
  });
}

Items Range(int size) {
  Items numbers(size);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

int64_t SlotSum(const Numbers& loads, const Parts& rows) {
  int64_t sum = 0;
  for (size_t slot = 0; slot < rows[0].size(); ++slot) {
    int64_t most = 0;
    for (const Items& row : rows) most = std::max(most, loads[row[slot]]);
    sum += most;
  }
  return sum;
}

// The rank with the largest cell of a slot; ties by number.
int Largest(const Numbers& loads, const Parts& rows, int slot) {
  int largest = 0;
  for (int r = 1; r < static_cast<int>(rows.size()); ++r)
    if (loads[rows[r][slot]] > loads[rows[largest][slot]]) largest = r;
  return largest;
}

Items With(const Numbers& loads, Items row, int32_t old_cell, int32_t new_cell) {
  std::replace(row.begin(), row.end(), old_cell, new_cell);
  SortByLoad(loads, row);
  return row;
}

// Exchanges whole cells within slots between the fullest rank and others.
void SwapWithinSlots(const Numbers& loads, Parts& slots, Numbers& sums) {
  const auto num_slots = static_cast<int64_t>(slots.size());
  int64_t work = 32 * num_slots * static_cast<int64_t>(sums.size()) + 1024;
  while (work > 0) {
    const int full = Fullest(sums);
    Items* chosen = nullptr;
    Emptiest others(sums);
    const int first = others.Next();
    int other = first;
    for (; other >= 0; other = others.Next()) {
      const int64_t difference = sums[full] - sums[other];
      if (difference <= 1 || work <= 0) return;
      work -= num_slots;
      int64_t best = difference;
      for (Items& cells : slots) {
        const int64_t delta = loads[cells[full]] - loads[cells[other]];
        if (delta <= 0 || delta >= difference || Apart(delta, difference) >= best) continue;
        best = Apart(delta, difference);
        chosen = &cells;
      }
      if (chosen != nullptr) break;
      // The others have to be sorted.
      if (other == first) work -= static_cast<int64_t>(sums.size());
    }
    if (other < 0) return;
    const int64_t delta = loads[(*chosen)[full]] - loads[(*chosen)[other]];
    std::swap((*chosen)[full], (*chosen)[other]);
    sums[full] -= delta;
    sums[other] += delta;
  }
}

}  // namespace

Items ByLoad(const Numbers& loads) {
  Items cells = Range(static_cast<int>(loads.size()));
  SortByLoad(loads, cells);
  return cells;
}

void EvenRanks(const Numbers& loads, Parts& slots) {
  const int ranks = static_cast<int>(slots[0].size());
  Numbers spread;
  for (Items& cells : slots) {
    SortByLoad(loads, cells);
    spread.push_back(loads[cells.front()] - loads[cells.back()]);
  }
  Numbers sums(ranks);
  Items by_sum = Range(ranks);
  for (const int32_t slot : ByLoad(spread)) {
    std::sort(by_sum.begin(), by_sum.end(),
              [&](int32_t a, int32_t b) { return sums[a] != sums[b] ? sums[a] < sums[b] : a < b; });
    const Items cells = slots[slot];
    for (int n = 0; n < ranks; ++n) slots[slot][by_sum[n]] = cells[n];
    for (int r = 0; r < ranks; ++r) sums[r] += loads[slots[slot][r]];
  }
  SwapWithinSlots(loads, slots, sums);
}

void LineUp(const Numbers& loads, Parts& rows) {
  for (Items& row : rows) SortByLoad(loads, row);
}

void Polish(const Numbers& loads, Parts& rows) {
  const int ranks = static_cast<int>(rows.size()), slots = static_cast<int>(rows[0].size());
  Numbers sums;
  for (const Items& row : rows) {
    sums.push_back(0);
    for (const int32_t cell : row) sums.back() += loads[cell];
  }
  const int64_t most = sums[Fullest(sums)];
  int64_t work = kPolishWork, value = SlotSum(loads, rows);
  for (bool improved = true; improved;) {
    improved = false;
    for (int slot = 0; slot < slots; ++slot) {
      int given = Largest(loads, rows, slot);
      for (int taken = 0; taken < ranks; ++taken)
        for (int place = 0; place < slots; ++place) {
          const int32_t x = rows[given][slot], y = rows[taken][place];
          const int64_t delta = loads[x] - loads[y];
          if (--work < 0) return;
          if (taken == given || delta <= 0 || delta > most - sums[taken]) continue;
          work -= static_cast<int64_t>(ranks) * slots;
          if (work < 0) return;
          Items given_row = With(loads, rows[given], x, y);
          Items taken_row = With(loads, rows[taken], y, x);
          rows[given].swap(given_row);
          rows[taken].swap(taken_row);
          const int64_t after = SlotSum(loads, rows);
          if (after >= value) {
            rows[given].swap(given_row);
            rows[taken].swap(taken_row);
            continue;
          }
          value = after;
          improved = true;
          sums[given] -= delta;
          sums[taken] += delta;
          given = Largest(loads, rows, slot);
        }
    }
  }
}

}  // namespace sb::balance
