// Collects pairs until a tile of the kernel is full, scores it, and writes the scores where they belong.
#pragma once

#include <cstdint>

#include "drivers/buffer.hpp"
#include "kernels/kernels.hpp"
#include "drivers/pair_layout.hpp"

namespace mdmi {

class PairScorer {
 public:
  PairScorer(const PairNetwork& net, const Gathered& gathered, const PairRule& rule, bool symmetric)
      : kernels_(kernels()),
        net_(net),
        gathered_(gathered),
        scratch_(make_buffer<float>(size_t(2 * kernels_.pair_rows * net.widest))),
        sort_(rule.symmetry == Symmetry::upper),
        both_ways_(rule.symmetry == Symmetry::mean && !symmetric) {}

  // The score of gathered rows (i, j), symmetrised by the rule, will go to *to and, unless null, to *mirror.
  void add(int64_t i, int64_t j, float* to, float* mirror) {
    const bool swap = sort_ && j < i;
    i_[count_] = swap ? j : i;
    j_[count_] = swap ? i : j;
    to_[count_] = to;
    mirror_[count_] = mirror;
    if (++count_ == kernels_.pair_rows) flush();
  }

  void flush() {
    if (count_ == 0) return;
    float scores[kMaxRows], swapped[kMaxRows];
    score(i_, j_, scores);
    if (both_ways_) score(j_, i_, swapped);
    for (int k = 0; k < count_; ++k) {
      const float result = both_ways_ ? 0.5f * (scores[k] + swapped[k]) : scores[k];
      *to_[k] = result;
      if (mirror_[k] != nullptr) *mirror_[k] = result;
    }
    count_ = 0;
  }

 private:
  static constexpr int kMaxRows = 16;

  void score(const int64_t* i, const int64_t* j, float* scores) {
    const float *left[kMaxRows], *right[kMaxRows];
    float shifts[kMaxRows] = {};
    const float* const values = gathered_.shift.values;
    for (int k = 0; values != nullptr && k < count_; ++k) shifts[k] = values[gathered_.relation_of(i[k], j[k])];
    for (int k = 0; k < kernels_.pair_rows; ++k) {
      const int pair = k < count_ ? k : 0;  // a tile is always full: a pair's score may not depend on its company
      left[k] = gathered_.u_of(i[pair]);
      right[k] = gathered_.v_of(j[pair]);
    }
    kernels_.pair_scores(net_, left, right, values == nullptr ? nullptr : shifts, scores, scratch_.get());
  }

  const Kernels& kernels_;
  const PairNetwork net_;
  const Gathered& gathered_;
  Buffer<float> scratch_;
  bool sort_, both_ways_;
  int count_ = 0;
  int64_t i_[kMaxRows], j_[kMaxRows];
  float *to_[kMaxRows], *mirror_[kMaxRows];
};

}  // namespace mdmi
