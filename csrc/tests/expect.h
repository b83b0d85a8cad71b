// The least that a unit test needs: EXPECT counts failures and says where.
#pragma once

#include <cstdio>

namespace sb {

inline int failures = 0;
constexpr int kSkipped = 77;  // CMakeLists.txt tells ctest

#define EXPECT(condition, ...)                                   \
  do {                                                           \
    if (!(condition)) {                                          \
      ++sb::failures;                                            \
      std::printf("%s:%d: %s:", __FILE__, __LINE__, #condition); \
      std::printf(" " __VA_ARGS__);                              \
      std::printf("\n");                                         \
    }                                                            \
  } while (false)

// A fixed sequence of numbers, the same on every machine.
class Random {
 public:
  explicit Random(unsigned seed) : state_(seed * 2654435761u + 1) {}
  unsigned Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }
  int Below(int n) { return static_cast<int>(Next() % static_cast<unsigned>(n)); }
  // Roughly normal, mean 0, variance 1.
  float Normal() {
    float sum = 0;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(Next() >> 8) * 0x1p-24f;
    return sum - 6.0f;
  }

 private:
  unsigned state_;
};

}  // namespace sb
