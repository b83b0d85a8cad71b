#include "latency/measurements.h"

#include <stdexcept>
#include <string>

namespace sb {

namespace {

[[noreturn]] void Refuse(const std::string& field, const std::string& why) {
  throw std::invalid_argument(
      field + " " + why + ": a latency table cannot be built from it. To fix it, measure again.");
}

void CheckTimes(const std::string& field, const std::vector<double>& times, size_t count) {
  if (times.size() != count)
    Refuse(field, "has " + std::to_string(times.size()) + " values where " + std::to_string(count) +
                      " are needed");
  for (const double ms : times)
    // Written so that NaN is refused.
    if (!(ms >= kLeastMs && ms <= kMostMs))
      Refuse(field, "holds " + std::to_string(ms) + ", which is not within 1e-9 and 1e12 ms");
}

void CheckCurve(const std::string& field, const Curve& curve, size_t count) {
  CheckTimes(field + ".forward_ms", curve.forward, count);
  CheckTimes(field + ".backward_ms", curve.backward, count);
}

void CheckAxis(const std::string& field, const std::vector<int64_t>& axis, int64_t most) {
  int64_t last = 0;
  for (const int64_t value : axis) {
    if (value <= last || value > most)
      Refuse(field, "holds " + std::to_string(value) + " after " + std::to_string(last) +
                        " (values ascend from 1 to at most " + std::to_string(most) + ")");
    last = value;
  }
}

}  // namespace

void Check(const Measurements& m) {
  if (m.block_size < 1 || m.block_size > kMaxBlock)
    Refuse("block_size", "is " + std::to_string(m.block_size));
  const bool few = m.layers >= 0 && m.dense_layers >= 0 && m.layers <= 1000000 &&
                   m.dense_layers <= 1000000 && m.layers + m.dense_layers > 0;
  if (!few)
    Refuse("layers", "is " + std::to_string(m.layers) + " beside " +
                         std::to_string(m.dense_layers) + " dense layers");
  if (!(m.micro_batch_ms >= 0 && m.micro_batch_ms <= kMostMs))
    Refuse("micro_batch_ms", "is " + std::to_string(m.micro_batch_ms));
  if (m.lengths.empty()) Refuse("lengths", "is empty");
  CheckAxis("lengths", m.lengths, kMaxLength);
  const size_t count = m.lengths.size();
  if (m.budgets.size() != count || m.sparse.size() != count)
    Refuse("attention", "has not one row for each length");
  for (size_t i = 0; i < count; ++i) {
    CheckAxis("attention[" + std::to_string(i) + "].budgets", m.budgets[i],
              (m.lengths[i] - 1) / m.block_size);
    CheckCurve("attention[" + std::to_string(i) + "]", m.sparse[i], m.budgets[i].size());
  }
  CheckCurve("dense", m.dense, count);
  CheckCurve("rest", m.rest, count);
  CheckCurve("outside", m.outside, count);
}

}  // namespace sb
