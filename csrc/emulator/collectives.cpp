// Shuffles, votes, ldmatrix and mma.sync: from the registers of all lanes to those of all lanes.
#include <cmath>
#include <cstring>

#include "emulator/state.h"

namespace emulator {
namespace {

float Float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct Bf16 {
  static float Widen(uint32_t half) { return Float(half << 16); }
};

struct Fp16 {
  static float Widen(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, digits = half & 1023;
    if (exponent == 31) return Float(sign | 0x7f800000u | digits << 13);
    if (exponent > 0) return Float(sign | (exponent + 112) << 23 | digits << 13);
    const float x = static_cast<float>(digits) * 0x1p-24f;
    return sign != 0 ? -x : x;
  }
};

float TowardZero(double x) {
  const float y = static_cast<float>(x);
  if (!std::isfinite(x)) return y;
  return std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

// m16n8k16: with g = lane / 4 and t = 2 (lane % 4), register i of A holds row g + 8 (i % 2),
// columns t and t + 1, plus 8 from i = 2 on; register i of B holds rows t + 8 i and t + 8 i + 1 of
// column g; the sums are those of rows g and g + 8, columns t and t + 1.
template <class Type>
void MultiplyAdd(Fiber* warp) {
  alignas(32) float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& m = *static_cast<const Mma*>(warp[lane].arguments);
    const int g = lane >> 2, t = (lane & 3) * 2;
    for (int i = 0; i < 4; ++i) {
      float* at = &a[g + (i & 1) * 8][t + (i >> 1) * 8];
      at[0] = Type::Widen(m.a[i] & 0xffff);
      at[1] = Type::Widen(m.a[i] >> 16);
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g] = Type::Widen(m.b[i] & 0xffff);
      b[t + 1 + i * 8][g] = Type::Widen(m.b[i] >> 16);
    }
    for (int i = 0; i < 4; ++i) c[g + (i >> 1) * 8][t + (i & 1)] = m.sum[i];
  }
  if (settings.truncating_mma) {
    for (int row = 0; row < 16; ++row)
      for (int k0 = 0; k0 < 16; k0 += 8)
        for (int n = 0; n < 8; ++n) {
          double sum = c[row][n];
          for (int k = k0; k < k0 + 8; ++k)
            sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][n]);
          c[row][n] = TowardZero(sum);
        }
  } else {
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) c[row][n] += a[row][k] * b[k][n];
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& m = *static_cast<const Mma*>(warp[lane].arguments);
    const int g = lane >> 2, t = (lane & 3) * 2;
    for (int i = 0; i < 4; ++i) m.sum[i] = c[g + (i >> 1) * 8][t + (i & 1)];
  }
}

// Four 8x8 matrices; lane l has read row l % 8 of matrix l / 8.
void LoadMatrices(Fiber* warp) {
  const auto of = [&](int lane) -> const LoadMatrix& {
    return *static_cast<const LoadMatrix*>(warp[lane].arguments);
  };
  const bool transposed = of(0).transposed;
  for (int i = 0; i < 4; ++i) {
    uint16_t matrix[8][8];
    unsigned wavefronts[32] = {}, most = 1;
    for (int row = 0; row < 8; ++row) {
      const LoadMatrix& load = of(i * 8 + row);
      std::memcpy(matrix[row], &load.row, 16);
      bool again = false;  // the same address twice is one access
      for (int before = 0; before < row; ++before)
        again = again || of(i * 8 + before).address == load.address;
      for (unsigned bank = 0; bank < 4 && !again; ++bank) {
        unsigned& n = wavefronts[(reinterpret_cast<uintptr_t>(load.address) / 4 + bank) % 32];
        if (++n > most) most = n;
      }
    }
    ++counters.ldmatrix_phases;
    counters.bank_conflicts += most - 1;
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = (lane & 3) * 2;
      const uint32_t low = transposed ? matrix[t][g] : matrix[g][t];
      const uint32_t high = transposed ? matrix[t + 1][g] : matrix[g][t + 1];
      of(lane).result[i] = low | high << 16;
    }
  }
}

void ShuffleLanes(uint32_t mask, Fiber* warp, const char* file, int line) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    Shuffle& mine = *static_cast<Shuffle*>(warp[__builtin_ctz(rest)].arguments);
    if ((mask >> mine.source & 1) == 0)
      Fail(file, line, "shuffle from lane %d, which is not in its mask %08x", mine.source, mask);
    mine.result = static_cast<const Shuffle*>(warp[mine.source].arguments)->value;
  }
}

void ReduceLanes(Op op, uint32_t mask, Fiber* warp) {
  uint32_t result = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const uint32_t value = static_cast<const Reduce*>(warp[lane].arguments)->value;
    if (op == Op::kSum)
      result += value;
    else
      result |= value << lane;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
    static_cast<Reduce*>(warp[__builtin_ctz(rest)].arguments)->result = result;
}

}  // namespace

const char* NameOf(Op op) {
  static const char* const names[] = {"nothing",           "__syncwarp", "a shuffle", "a vote",
                                      "__reduce_add_sync", "ldmatrix",   "mma.bf16",  "mma.fp16"};
  return names[static_cast<int>(op)];
}

void RunCollective(Op op, uint32_t mask, Fiber* warp, const char* file, int line) {
  switch (op) {
    case Op::kNone:
    case Op::kSyncWarp:
      break;
    case Op::kShuffle:
      ++counters.shuffles;
      ShuffleLanes(mask, warp, file, line);
      break;
    case Op::kBallot:
    case Op::kSum:
      ReduceLanes(op, mask, warp);
      break;
    case Op::kLoadMatrix:
      ++counters.ldmatrix;
      LoadMatrices(warp);
      break;
    case Op::kMmaBf16:
      ++counters.mma;
      MultiplyAdd<Bf16>(warp);
      break;
    case Op::kMmaFp16:
      ++counters.mma;
      MultiplyAdd<Fp16>(warp);
      break;
  }
}

}  // namespace emulator
