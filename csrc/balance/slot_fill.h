// Cells filled slot by slot. Costs descend.
#pragma once

#include <optional>

#include "balance/problem.h"

namespace sb::balance {

// Gives each giant (an item above the mean load per cell of what is left) a slot, filled as far as
// the giant reaches, for the room below it costs nothing. If all but one small item per cell to
// come fits there, it is spread over the slot; else items go, largest first, where the least room
// remains, and again one is kept for each cell to come. Spreads the rest, largest first; with equal
// counts everything. Nothing if a slot cannot be filled under the cap.
std::optional<Parts> FillSlots(const Problem& problem);

// Gives the other slots one item per cell, the smallest, and spreads the rest over the cells of one
// slot. Not with equal counts.
Parts OneFullSlot(const Problem& problem);

}  // namespace sb::balance
