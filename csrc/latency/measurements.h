// What a latency table is made of: measured times, all in milliseconds and positive.
#pragma once

#include <cstdint>
#include <vector>

namespace sb {

constexpr int64_t kMaxLength = (int64_t{1} << 31) - 1;
constexpr int64_t kMaxBlock = int64_t{1} << 20;
constexpr double kLeastMs = 1e-9, kMostMs = 1e12;

struct Curve {
  std::vector<double> forward, backward;
  bool operator==(const Curve& other) const {
    return forward == other.forward && backward == other.backward;
  }
};

struct Measurements {
  int64_t block_size = 0;
  int64_t layers = 0;        // with a budget
  int64_t dense_layers = 0;  // with full attention
  double micro_batch_ms = 0;
  std::vector<int64_t> lengths;               // ascending
  std::vector<std::vector<int64_t>> budgets;  // by length; ascending, budget * block_size < length
  std::vector<Curve> sparse;                  // by length, then by budget: attention of one layer
  Curve dense;                                // by length: attention of one layer over all blocks
  Curve rest;                                 // by length: one decoder layer without its attention
  Curve outside;                              // by length: embedding, head and loss
};

// Throws std::invalid_argument with a text that starts with the field's name.
void Check(const Measurements& m);

}  // namespace sb
