#include "latency/numeric.h"

#include <cmath>

namespace sb {

const NumericTables kNumeric;

NumericTables::NumericTables() {
  double roots[kPowerBits];  // 2^(1/2), 2^(1/4), ...
  double root = 2.0;
  for (double& r : roots) r = root = std::sqrt(root);
  for (int i = 0; i < 1 << kPowerBits; ++i) {
    power[i] = 1.0;
    for (int bit = 0; bit < kPowerBits; ++bit)
      if (i >> (kPowerBits - 1 - bit) & 1) power[i] *= roots[bit];
  }
  for (int i = 0; i < 1 << kLogBits; ++i) {
    centre[i] = 1.0 + (i + 0.5) / (1 << kLogBits);
    inverse[i] = 1.0 / centre[i];
    const double z = (centre[i] - 1.0) / (centre[i] + 1.0);
    double sum = 0.0;
    for (int n = 41; n >= 1; n -= 2) sum = sum * (z * z) + 1.0 / n;
    log[i] = 2.0 * z * sum;
  }
}

int64_t ToFixed(double log2) {
  const double limited = log2 < -60.0 ? -60.0 : log2 > 60.0 ? 60.0 : log2;
  return static_cast<int64_t>(std::floor(limited * 0x1p36 + 0.5));
}

}  // namespace sb
