// Measured times made monotone: a longer sequence or a larger budget never costs less.
#pragma once

#include <cstdint>
#include <vector>

namespace sb {

// Least-squares non-decreasing fit (pool adjacent violators), in place; values in order stay as
// they are.
void Isotonic(std::vector<double>& values);

// The same for rows with their own columns (budgets, ascending): afterwards value(i, a) <= value(j,
// b) wherever i <= j and a <= b. Rows and columns in turn; what then remains (rows without common
// columns) is met half-way.
void IsotonicGrid(const std::vector<std::vector<int64_t>>& columns,
                  std::vector<std::vector<double>>& rows);

}  // namespace sb
