// What the selection rules share: the masked positions of a row, their order by entropy, and the cost of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "drivers/select.hpp"

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

inline std::string got_nan_at(int64_t batch) { return "got NaN at batch " + std::to_string(batch) + ", position"; }

inline std::invalid_argument nan_in_mi(const std::string& op, int64_t batch, int64_t i, int64_t j) {
  return std::invalid_argument(op + ": mi must not be NaN between masked positions, " + got_nan_at(batch) + "s " +
                               std::to_string(i) + " and " + std::to_string(j));
}

inline void check_entropy(const std::string& op, int64_t batch, const std::vector<Candidate>& masked) {
  for (const Candidate& c : masked)
    if (c.entropy != c.entropy)
      throw std::invalid_argument(op + ": entropy must not be NaN at masked positions, " + got_nan_at(batch) + " " +
                                  std::to_string(c.index));
}

// A weight of 0 switches its term off, also where the term is infinite.
inline double weighted(double weight, double value) { return weight == 0.0 ? 0.0 : weight * value; }

// What is left once `first` is taken: without those whose own cost alone exceeds what remains of the budget. Only where
// no cost is negative, or else a later one might make room for them.
template <class OwnCost>
void keep_hopeful(std::vector<Candidate>& candidates, Candidate first, double remaining, OwnCost own_cost) {
  const auto drop = [&](const Candidate& c) {
    return c.index == first.index || (first.entropy >= 0.0 && own_cost(c) > remaining);
  };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), drop), candidates.end());
}

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
