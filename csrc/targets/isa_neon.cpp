// NEON, which every 64-bit ARM processor has: vectors of four.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "drivers/dtype.hpp"
#include "kernels/kernels.hpp"

namespace mdmi::neon {
namespace {

constexpr int kLanes = 4;
constexpr int kPairRows = 12;  // 32 registers: 2 * 12 sums and what feeds them
using Vec = float __attribute__((vector_size(16)));
using IVec = int32_t __attribute__((vector_size(16)));

inline Vec set1(float x) { return Vec(vdupq_n_f32(x)); }
inline Vec fma(Vec a, Vec b, Vec c) { return Vec(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b))); }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline bool any_lane(IVec mask) { return vmaxvq_u32(uint32x4_t(mask)) != 0; }
inline Vec load_bf16(const uint16_t* x) { return Vec(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16))); }
inline Vec load_f16(const uint16_t* x) { return Vec(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)))); }

inline void transpose(Vec (&rows)[kLanes]) {
  const float32x4x2_t a = vtrnq_f32(float32x4_t(rows[0]), float32x4_t(rows[1]));
  const float32x4x2_t b = vtrnq_f32(float32x4_t(rows[2]), float32x4_t(rows[3]));
  for (int i = 0; i < 2; ++i) {
    rows[i] = Vec(vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i])));
    rows[i + 2] = Vec(vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i])));
  }
}
}  // namespace
}  // namespace mdmi::neon

#define MDMI_ISA neon
#include "kernels/kernels.inc"
#endif
