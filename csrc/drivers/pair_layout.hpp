// Which pairs a call scores and where their scores go. Masked positions are gathered into dense, padded float32 rows;
// pairs are numbered through all rows of a layout, so that any range of numbers is a piece of work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "drivers/buffer.hpp"
#include "drivers/pairwise.hpp"

namespace mdmi {

// u and v of the masked positions of the whole batch, one after the other, each filled up with 0 to `stride` floats.
struct Gathered {
  Buffer<float> u_storage, v_storage;
  const float *u = nullptr, *v = nullptr;  // the same where the halves are equal
  int64_t stride = 0, n = 0;
  std::vector<int32_t> position, sequence;  // of each gathered row, the latter for a relation only
  std::vector<int64_t> first;               // [batch + 1]: where each sequence begins
  PairShift shift;

  const float* u_of(int64_t row) const { return u + row * stride; }
  const float* v_of(int64_t row) const { return v + row * stride; }

  // Of two rows of one sequence.
  int64_t relation_of(int64_t i, int64_t j) const {
    const int64_t from = position[size_t(i)], to = position[size_t(j)];
    if (shift.relation != nullptr) return shift.relation[sequence[size_t(i)] * shift.stride_b + from * n + to];
    const int64_t distance = from < to ? to - from : from - to;
    return std::max<int64_t>(1, std::min(distance, shift.count)) - 1;
  }
};

Gathered gather(const Halves& halves);

// The pairs of one gathered row `i` with rows [begin, end), but not with itself. The score of (i, j) goes to
// out[at + step * position(j)] and, if mirrored, also to out[mirror_at + mirror_step * position(j)].
struct PairRow {
  int64_t i, begin, end;
  int64_t at, step, mirror_at, mirror_step;
  bool mirrored;

  bool holds_itself() const { return i >= begin && i < end; }
  int64_t count() const { return end - begin - (holds_itself() ? 1 : 0); }
  int64_t partner(int64_t k) const { return begin + k + (holds_itself() && begin + k >= i ? 1 : 0); }
};

struct PairLayout {
  std::vector<PairRow> rows;
  std::vector<int64_t> first_pair;  // [rows + 1]

  void add(const PairRow& row) {
    if (row.count() <= 0) return;
    if (first_pair.empty()) first_pair.push_back(0);
    rows.push_back(row);
    first_pair.push_back(first_pair.back() + row.count());
  }
  int64_t n_pairs() const { return first_pair.empty() ? 0 : first_pair.back(); }

  // visit(row, j) for pairs [begin, end) in order.
  template <class Visit>
  void for_pairs(int64_t begin, int64_t end, Visit visit) const {
    std::size_t r = std::size_t(std::upper_bound(first_pair.begin(), first_pair.end(), begin) - first_pair.begin()) - 1;
    for (int64_t pair = begin; pair < end; ++r)
      for (int64_t k = pair - first_pair[r]; k < rows[r].count() && pair < end; ++k, ++pair)
        visit(rows[r], rows[r].partner(k));
  }
};

// `symmetric`: every unordered pair once, mirrored.
PairLayout full_layout(const Gathered& gathered, int64_t n, bool symmetric);
PairLayout rows_layout(const Gathered& gathered, int64_t n, const int64_t* rows, int64_t n_rows);
PairLayout band_layout(const Gathered& gathered, int64_t n, int64_t window, bool symmetric);

}  // namespace mdmi
