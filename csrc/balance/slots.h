// Cells into slots and ranks. A slot is the same micro-batch of all ranks.
#pragma once

#include "balance/problem.h"

namespace sb::balance {

// The cells by descending load; ties by number.
Items ByLoad(const Numbers& loads);

// Permutes the cells of each slot (slots[slot][rank]) so that the sums of the ranks come close;
// slot maxima stay.
void EvenRanks(const Numbers& loads, Parts& slots);

// Orders the cells of each rank by descending load, which makes the sum of the slot maxima least.
void LineUp(const Numbers& loads, Parts& rows);

// Swaps cells between ranks, lined up, while the sum of the slot maxima falls and no rank exceeds
// the fullest.
void Polish(const Numbers& loads, Parts& rows);

}  // namespace sb::balance
