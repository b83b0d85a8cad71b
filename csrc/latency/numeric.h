// Logarithm and power of two that give the same bits on every machine, and times as fixed-point
// logarithms.
//
// The C library's exp and log differ between versions and processors in the last bit, and ranks
// that plan apart must plan alike. These use only +, -, *, / and sqrt, which IEEE 754 rounds in one
// way; the files that include this are built without contraction. The Python twin does the same
// steps in the same order.
#pragma once

#include <cstdint>
#include <cstring>

namespace sb {

// A time T in ms is kept as log2(T) in units of 2^-36 (a relative step of 1e-11). Whole numbers
// make the interpolation exactly monotone: there is no rounding that could turn two neighbours
// around.
constexpr int kFractionBits = 36;
// Positions between two neighbours of the lattice are in units of 2^-20 of their distance.
constexpr int kWeightBits = 20;
constexpr int64_t kWeightOne = int64_t{1} << kWeightBits;

constexpr int kPowerBits = 10, kLogBits = 9;

struct NumericTables {
  NumericTables();
  double power[1 << kPowerBits];  // 2^(i / 1024)
  double centre[1 << kLogBits];   // middle of the i-th 512th of [1, 2)
  double inverse[1 << kLogBits];  // 1 / centre
  double log[1 << kLogBits];      // ln(centre)
};
extern const NumericTables kNumeric;

// log2 of a positive normal number, with an error below 1e-13.
inline double Log2(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  const int i = static_cast<int>(bits >> (52 - kLogBits)) & ((1 << kLogBits) - 1);
  bits = (bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  const double r = (mantissa - kNumeric.centre[i]) * kNumeric.inverse[i];
  const double log1p = r * (1.0 + r * (-1.0 / 2.0 + r * (1.0 / 3.0 + r * (-1.0 / 4.0))));
  return static_cast<double>(exponent) + (kNumeric.log[i] + log1p) * 1.4426950408889634;
}

// 2^(y / 2^36): strictly increasing, since neighbours are 1e-11 apart and the error is below 1e-14.
inline double Exp2(int64_t y) {
  const int64_t whole = y >> kFractionBits;
  const int64_t fraction = y & ((int64_t{1} << kFractionBits) - 1);
  constexpr int kRestBits = kFractionBits - kPowerBits;
  const int i = static_cast<int>(fraction >> kRestBits);
  const double r = static_cast<double>(fraction & ((int64_t{1} << kRestBits) - 1)) *
                   (0.6931471805599453 * 0x1p-36);
  const double p = 1.0 + r * (1.0 + r * (1.0 / 2.0 + r * (1.0 / 6.0)));
  const uint64_t bits = static_cast<uint64_t>(whole + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return kNumeric.power[i] * p * scale;
}

// The nearest fixed-point number, kept within +-60 (times from 1e-18 to 1e18 ms).
int64_t ToFixed(double log2);
constexpr int64_t kMostFixed = int64_t{60} << kFractionBits;
inline int64_t Limit(int64_t y) {
  return y < -kMostFixed ? -kMostFixed : y > kMostFixed ? kMostFixed : y;
}
inline double FromFixed(int64_t y) { return static_cast<double>(y) * 0x1p-36; }

// Between a (weight 0) and b (weight 2^20); not decreasing in a, in b and, where a <= b, in the
// weight.
inline int64_t Blend(int64_t a, int64_t b, int64_t weight) {
  return (a * (kWeightOne - weight) + b * weight) >> kWeightBits;
}

// A position as a weight: 0 at x = start, 2^20 where (x - start) * scale says so.
inline int64_t Weight(double x, double start, double scale) {
  const auto weight = static_cast<int64_t>((x - start) * scale);
  return weight < 0 ? 0 : weight > kWeightOne ? kWeightOne : weight;
}

}  // namespace sb
