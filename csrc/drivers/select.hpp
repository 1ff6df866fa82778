// Selection from entropies and pairwise MI: which positions to unmask together. All costs are float64 and summed in
// the order in which positions were chosen; ties go to the lower index. Rows of the batch are independent.
#pragma once

#include <cstdint>

#include "drivers/dtype.hpp"

namespace mdmi {

constexpr int64_t kNoWindow = int64_t(1) << 40;  // farther than any two positions are apart

// Positions of a batch: strides are in elements, mask may be null (every position is masked).
struct Positions {
  int64_t batch, n;
  const void* entropy;  // null for color()
  Dtype entropy_dtype;  // f32 or f64
  int64_t entropy_stride_b, entropy_stride_n;
  const uint8_t* mask;
  int64_t mask_stride_b, mask_stride_n;
};

// A band is a matrix with a window whose rows are so far apart in memory that [i, j] falls on what the band has of it;
// nothing outside the window is read. Only select_budget knows windows.
struct MiMatrix {
  const void* data;
  Dtype dtype;  // f32 or f64
  int64_t stride_b, stride_i, stride_j;
  int64_t window = kNoWindow;  // pairs farther apart are 0
};

struct BudgetRule {
  const double* gamma;  // [batch]
  double lam, entropy_weight;
  bool cheapest;
  int64_t limit;
};

// `selected` [batch, n] and `spent` [batch] are contiguous and fully written. Each throws std::invalid_argument for the
// first row of the batch that holds a NaN where it must not: entropy before mi, then the lowest index.
void select_budget(const char* op, const Positions& positions, const MiMatrix& mi, const BudgetRule& rule,
                   uint8_t* selected, double* spent, int threads);
void select_threshold(const Positions& positions, const MiMatrix& mi, double tau, int64_t limit, uint8_t* selected,
                      double* spent, int threads);
void color(const Positions& positions, const MiMatrix& mi, double tau, int64_t* group, int threads);

}  // namespace mdmi
