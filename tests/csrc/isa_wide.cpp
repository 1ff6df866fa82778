// The kernels with sixteen lanes and twelve pairs a tile, as for AVX-512, in portable C++: their values can be tested
// on any machine.
#include <cstdint>
#include <cstring>

#include "drivers/dtype.hpp"
#include "kernels/kernels.hpp"

namespace mdmi {
extern const Kernels kernels_wide;
}

namespace mdmi::wide {
namespace {

constexpr int kLanes = 16;
constexpr int kPairRows = 12;
using Vec = float __attribute__((vector_size(64)));
using IVec = int32_t __attribute__((vector_size(64)));

inline Vec set1(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline bool any_lane(IVec mask) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (mask[lane] != 0) return true;
  return false;
}
inline Vec load_bf16(const uint16_t* x) {
  Vec v{};
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = float_from_bf16(x[lane]);
  return v;
}
inline Vec load_f16(const uint16_t* x) {
  Vec v{};
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = float_from_f16(x[lane]);
  return v;
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
}  // namespace mdmi::wide

#define MDMI_ISA wide
#include "kernels/kernels.inc"
