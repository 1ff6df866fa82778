// The oldest processor a build supports: vectors of four that the compiler lowers to whatever it may assume.
#include <cstdint>
#include <cstring>

#include "drivers/dtype.hpp"
#include "kernels/kernels.hpp"

namespace mdmi::scalar {
namespace {

constexpr int kLanes = 4;
constexpr int kPairRows = 6;  // 16 registers: 2 * 6 sums and what feeds them
using Vec = float __attribute__((vector_size(16)));
using IVec = int32_t __attribute__((vector_size(16)));

inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline bool any_lane(IVec mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }
inline Vec load_bf16(const uint16_t* x) {
  return Vec{float_from_bf16(x[0]), float_from_bf16(x[1]), float_from_bf16(x[2]), float_from_bf16(x[3])};
}
inline Vec load_f16(const uint16_t* x) {
  return Vec{float_from_f16(x[0]), float_from_f16(x[1]), float_from_f16(x[2]), float_from_f16(x[3])};
}

inline void transpose(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const float moved = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = moved;
    }
}
}  // namespace
}  // namespace mdmi::scalar

#define MDMI_ISA scalar
#include "kernels/kernels.inc"
