// Which rows of a sequence its coverage is taken from: every row_stride-th and each block's last,
// where there is an earlier block to choose.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sb {

constexpr int64_t kRowStride = 64;

inline int64_t SampledRows(int64_t length, int64_t block_size, int64_t row_stride) {
  int64_t rows = 0;
  for (int64_t begin = block_size; begin < length; begin += block_size) {
    const int64_t end = std::min(begin + block_size, length);
    rows += (end - 1) / row_stride - (begin - 1) / row_stride;
    if ((end - 1) % row_stride != 0) ++rows;
  }
  return rows;
}

}  // namespace sb
