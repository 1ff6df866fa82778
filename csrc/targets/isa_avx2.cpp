// AVX2 with FMA and F16C: vectors of eight.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "drivers/dtype.hpp"
#include "kernels/kernels.hpp"

// From here on, and behind every header: an inline function of a header compiled for AVX2 could be the copy that the
// linker keeps for all processors.
#define MDMI_TARGET "avx2,fma,f16c"
#include "targets/target_begin.inc"

namespace mdmi::avx2 {
namespace {

constexpr int kLanes = 8;
constexpr int kPairRows = 6;  // 16 registers: 2 * 6 sums and what feeds them
using Vec = float __attribute__((vector_size(32)));
using IVec = int32_t __attribute__((vector_size(32)));

inline Vec set1(float x) { return Vec(_mm256_set1_ps(x)); }
inline Vec fma(Vec a, Vec b, Vec c) { return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
inline Vec max(Vec a, Vec b) { return Vec(_mm256_max_ps(__m256(a), __m256(b))); }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return Vec(_mm256_min_ps(__m256(a), __m256(b))); }
inline bool any_lane(IVec mask) { return _mm256_movemask_ps(__m256(Vec(mask))) != 0; }
inline Vec load_bf16(const uint16_t* x) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return Vec(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
}
inline Vec load_f16(const uint16_t* x) {
  return Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = Vec(_mm256_unpacklo_ps(__m256(rows[i]), __m256(rows[i + 1])));
    pairs[i + 1] = Vec(_mm256_unpackhi_ps(__m256(rows[i]), __m256(rows[i + 1])));
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; ++k) {
      const __m256d low = __m256d(pairs[i + k]), high = __m256d(pairs[i + 2 + k]);
      quads[i + 2 * k] = Vec(_mm256_unpacklo_pd(low, high));
      quads[i + 2 * k + 1] = Vec(_mm256_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = Vec(_mm256_permute2f128_ps(__m256(quads[i]), __m256(quads[i + 4]), 0x20));
    rows[i + 4] = Vec(_mm256_permute2f128_ps(__m256(quads[i]), __m256(quads[i + 4]), 0x31));
  }
}
}  // namespace
}  // namespace mdmi::avx2

#define MDMI_ISA avx2
#include "kernels/kernels.inc"
#include "targets/target_end.inc"
#endif
