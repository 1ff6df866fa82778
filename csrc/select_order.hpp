// What the selection rules share: the masked positions of a row, their order by entropy, and the cost of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "select.hpp"

namespace mdmi {

struct Candidate {
  double entropy;
  int32_t index;
  bool operator<(const Candidate& other) const {
    return entropy < other.entropy || (entropy == other.entropy && index < other.index);
  }
};

// Masked positions of batch row b, lowest index first. Without entropies (color) they are all 0.
inline void masked_positions(const Positions& positions, int64_t b, std::vector<Candidate>& masked) {
  masked.clear();
  const uint8_t* mask = positions.mask == nullptr ? nullptr : positions.mask + b * positions.mask_stride_b;
  const int64_t at = b * positions.entropy_stride_b, step = positions.entropy_stride_n;
  const auto* f32 = static_cast<const float*>(positions.entropy);
  const auto* f64 = static_cast<const double*>(positions.entropy);
  for (int64_t i = 0; i < positions.n; ++i) {
    if (mask != nullptr && !mask[i * positions.mask_stride_n]) continue;
    double entropy = 0.0;
    if (positions.entropy != nullptr)
      entropy = positions.entropy_dtype == Dtype::f64 ? f64[at + i * step] : double(f32[at + i * step]);
    masked.push_back({entropy, int32_t(i)});
  }
}

// A weight of 0 switches its term off, also where the term is infinite.
inline double weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

// Sorts as far as it is read: a budget usually ends after a few of many positions.
class AscendingOrder {
 public:
  explicit AscendingOrder(std::vector<Candidate>& candidates) : candidates_(candidates) {}

  size_t size() const { return candidates_.size(); }

  const Candidate& operator[](size_t rank) {
    while (rank >= sorted_) sort_more();
    return candidates_[rank];
  }

 private:
  void sort_more() {
    const auto begin = candidates_.begin() + sorted_, end = candidates_.end();
    const auto chunk_end = begin + std::min<std::ptrdiff_t>(chunk_, end - begin);
    if (chunk_end != end) std::nth_element(begin, chunk_end, end);
    std::sort(begin, chunk_end);
    sorted_ = size_t(chunk_end - candidates_.begin());
    chunk_ *= 4;
  }

  std::vector<Candidate>& candidates_;
  size_t sorted_ = 0;
  std::ptrdiff_t chunk_ = 32;
};

}  // namespace mdmi
