// Which table of kernels can run here. The processor says what it has (cpuid), the operating system whether it saves
// the wide registers (xgetbv): a virtual machine may grant the one without the other.
#include <cstdlib>
#include <stdexcept>

#include "kernels/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mdmi {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avx512 = false, avx512bf16 = false;
};

uint64_t saved_register_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

Features detect() {
  Features features;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool fma = c & (1u << 12), osxsave = c & (1u << 27), f16c = c & (1u << 29);
  if (!osxsave) return features;
  const uint64_t state = saved_register_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const bool avx2 = b & (1u << 5);
  const bool f = b & (1u << 16), dq = b & (1u << 17), bw = b & (1u << 30), vl = b & (1u << 31);
  features.avx2 = ymm && avx2 && fma && f16c;
  features.avx512 = features.avx2 && zmm && f && dq && bw && vl;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) features.avx512bf16 = features.avx512 && (a & (1u << 5));
  return features;
}

const Features& features() {
  static const Features detected = detect();
  return detected;
}

bool has_avx2() { return features().avx2; }
bool has_avx512() { return features().avx512; }
bool has_avx512bf16() { return features().avx512bf16; }
#endif

struct Candidate {
  const Kernels* kernels;
  bool (*supported)();
};

const Candidate candidates[] = {
    {&kernels_scalar, always},
#if defined(__x86_64__)
    {&kernels_avx2, has_avx2},
    {&kernels_avx512, has_avx512},
    {&kernels_avx512bf16, has_avx512bf16},
#elif defined(__aarch64__)
    {&kernels_neon, always},
#endif
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Kernels& choose() {
  const char* forced = std::getenv("MDMI_FORCE_ISA");
  const Kernels* best = nullptr;
  for (const Candidate& candidate : candidates) {
    if (!candidate.supported()) continue;
    if (forced == nullptr || *forced == '\0' || std::string(forced) == candidate.kernels->isa) best = candidate.kernels;
  }
  if (best == nullptr)
    throw std::runtime_error("MDMI_FORCE_ISA must name an instruction set of this build that this machine supports (" +
                             joined(supported_isas()) + "), got " + forced);
  return *best;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates)
    if (candidate.supported()) names.push_back(candidate.kernels->isa);
  return names;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mdmi
