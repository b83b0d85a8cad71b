// Which rows of a sequence its coverage is taken from: every row_stride-th and each block's last,
// where there is an earlier block to choose.
#pragma once

#include <cstdint>

#include "tuning/both.h"

namespace sb {

constexpr int64_t kRowStride = 64;

// Those of block `block` >= 1, which the sequence must have.
SB_BOTH inline int64_t SampledRowsOfBlock(int64_t block, int64_t length, int64_t block_size,
                                          int64_t row_stride) {
  const int64_t begin = block * block_size;
  const int64_t last = (length - begin < block_size ? length : begin + block_size) - 1;
  return last / row_stride - (begin - 1) / row_stride + (last % row_stride != 0 ? 1 : 0);
}

inline int64_t SampledRows(int64_t length, int64_t block_size, int64_t row_stride) {
  int64_t rows = 0;
  for (int64_t block = 1; block * block_size < length; ++block)
    rows += SampledRowsOfBlock(block, length, block_size, row_stride);
  return rows;
}

}  // namespace sb
