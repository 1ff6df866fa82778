#include "drivers/select.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/select_order.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

// Waking a second thread must not cost more than it brings.
constexpr int64_t kElementsPerThread = 1 << 17;
constexpr int64_t kScanRows = 64;

template <class M>
struct MiRow {  // the matrix of one batch row
  const M* data;
  int64_t stride_i, stride_j, window;
  M at(int64_t i, int64_t j) const { return data[i * stride_i + j * stride_j]; }
  double positive(int64_t i, int64_t j) const {
    const double value = double(at(i, j));
    return value > 0.0 ? value : 0.0;
  }
};

template <class M>
MiRow<M> mi_row(const MiMatrix& mi, int64_t b) {
  return {static_cast<const M*>(mi.data) + b * mi.stride_b, mi.stride_i, mi.stride_j, mi.window};
}

// Ranks [begin, end) of the candidates within the window around position i; they lie in the order of their index.
template <class M>
std::pair<size_t, size_t> near(const MiRow<M>& mi, const std::vector<Candidate>& candidates, int64_t i) {
  if (mi.window == kNoWindow) return {0, candidates.size()};
  const auto before = [](const Candidate& c, int64_t index) { return c.index < index; };
  const auto begin = std::lower_bound(candidates.begin(), candidates.end(), i - mi.window, before);
  const auto end = std::lower_bound(begin, candidates.end(), i + mi.window + 1, before);
  return {size_t(begin - candidates.begin()), size_t(end - candidates.begin())};
}

struct NanAt {
  int64_t i = -1, j = -1;
};

bool may_hold_nan(const float* row, int64_t stride, int64_t n) { return stride != 1 || kernels().any_nan_f32(row, n); }
bool may_hold_nan(const double*, int64_t, int64_t) { return true; }

// Among rows masked[begin, end) of the matrix. A whole row is scanned first, unmasked columns too: that is much faster.
template <class M>
NanAt first_nan_mi(const MiRow<M>& mi, const std::vector<Candidate>& masked, size_t begin, size_t end) {
  for (size_t k = begin; k < end; ++k) {
    const int64_t i = masked[k].index;
    const auto [from, to] = near(mi, masked, i);
    const int64_t first = masked[from].index, span = masked[to - 1].index - first + 1;
    if (!may_hold_nan(mi.data + i * mi.stride_i + first * mi.stride_j, mi.stride_j, span)) continue;
    for (size_t other = from; other < to; ++other) {
      const int64_t j = masked[other].index;
      if (j != i && mi.at(i, j) != mi.at(i, j)) return {i, j};
    }
  }
  return {};
}

// The masked positions of every row of the batch, once no NaN is among what belongs to them.
template <class M>
std::vector<std::vector<Candidate>> checked_positions(const char* op, const Positions& positions, const MiMatrix& mi,
                                                      int threads) {
  std::vector<std::vector<Candidate>> masked(static_cast<size_t>(positions.batch));
  for (size_t b = 0; b < masked.size(); ++b) masked_positions(positions, int64_t(b), masked[b]);
  const int64_t scans = (positions.n + kScanRows - 1) / kScanRows;
  std::vector<NanAt> mi_nan(static_cast<size_t>(positions.batch * scans));
  parallel_for(positions.batch * scans, threads, [&](int64_t task, int) {
    const std::vector<Candidate>& row = masked[size_t(task / scans)];
    const size_t begin = size_t(task % scans * kScanRows), end = std::min(begin + size_t(kScanRows), row.size());
    if (begin < end) mi_nan[size_t(task)] = first_nan_mi(mi_row<M>(mi, task / scans), row, begin, end);
  });
  for (int64_t b = 0; b < positions.batch; ++b) {
    check_entropy(op, b, masked[size_t(b)]);
    for (int64_t scan = b * scans; scan < (b + 1) * scans; ++scan)
      if (mi_nan[size_t(scan)].i >= 0) throw nan_in_mi(op, b, mi_nan[size_t(scan)].i, mi_nan[size_t(scan)].j);
  }
  return masked;
}

// What a rule has taken so far from one row of the batch.
struct Taken {
  uint8_t* selected;
  double spent = 0.0;
  std::vector<int32_t> order{};

  void take(int32_t index, double cost) {
    selected[index] = 1;
    spent += cost;
    order.push_back(index);
  }
};

template <class M>
double budget_by_entropy(const MiRow<M>& mi, std::vector<Candidate>& candidates, const BudgetRule& rule, double gamma,
                         uint8_t* selected) {
  Taken taken{selected};
  const Candidate first = *std::min_element(candidates.begin(), candidates.end());
  const auto own_cost = [&](const Candidate& c) { return weighted(rule.entropy_weight, c.entropy); };
  taken.take(first.index, own_cost(first));
  double remaining = gamma - taken.spent;
  keep_hopeful(candidates, first, remaining, own_cost);

  // Four candidates at a time: each sum must run in order, so one alone would wait for every addition.
  constexpr size_t kTogether = 4;
  AscendingOrder order(candidates);
  for (size_t rank = 0; rank < order.size(); rank += kTogether) {
    if (own_cost(order[rank]) > remaining) break;  // and so are all later ones
    Candidate next[kTogether];
    double mi_sum[kTogether] = {};
    for (size_t k = 0; k < kTogether; ++k) next[k] = order[std::min(rank + k, order.size() - 1)];
    const size_t summed = taken.order.size();
    for (int32_t j : taken.order)
      for (size_t k = 0; k < kTogether; ++k) mi_sum[k] += mi.positive(next[k].index, j);
    for (size_t k = 0; k < std::min(kTogether, order.size() - rank); ++k) {
      if (int64_t(taken.order.size()) >= rule.limit) return taken.spent;
      for (size_t c = summed; c < taken.order.size(); ++c) mi_sum[k] += mi.positive(next[k].index, taken.order[c]);
      const double cost = own_cost(next[k]) + weighted(rule.lam, mi_sum[k]);
      if (!(cost <= remaining)) continue;
      taken.take(next[k].index, cost);
      remaining -= cost;
    }
  }
  return taken.spent;
}

// The same within a window. Few of the candidates are near one that is taken, so it is told to them at once.
template <class M>
double budget_in_window(const MiRow<M>& mi, int64_t n, std::vector<Candidate>& candidates, const BudgetRule& rule,
                        double gamma, uint8_t* selected) {
  Taken taken{selected};
  std::vector<double> mi_sum(size_t(n), 0.0);  // by position
  const auto own_cost = [&](const Candidate& c) { return weighted(rule.entropy_weight, c.entropy); };
  const auto take = [&](const Candidate& c, double cost) {
    taken.take(c.index, cost);
    const int64_t last = std::min(n - 1, c.index + mi.window);
    for (int64_t i = std::max<int64_t>(0, c.index - mi.window); i <= last; ++i)
      mi_sum[size_t(i)] += mi.positive(i, c.index);
  };
  const Candidate first = *std::min_element(candidates.begin(), candidates.end());
  take(first, own_cost(first));
  double remaining = gamma - taken.spent;
  keep_hopeful(candidates, first, remaining, own_cost);

  AscendingOrder order(candidates);
  for (size_t rank = 0; rank < order.size() && int64_t(taken.order.size()) < rule.limit; ++rank) {
    const Candidate next = order[rank];
    if (own_cost(next) > remaining) break;  // and so are all later ones
    const double cost = own_cost(next) + weighted(rule.lam, mi_sum[size_t(next.index)]);
    if (!(cost <= remaining)) continue;
    take(next, cost);
    remaining -= cost;
  }
  return taken.spent;
}

template <class M>
double budget_by_cost(const MiRow<M>& mi, std::vector<Candidate>& candidates, const BudgetRule& rule, double gamma,
                      uint8_t* selected) {
  Taken taken{selected};
  std::vector<double> mi_sum(candidates.size(), 0.0);
  double remaining = gamma;
  while (!candidates.empty() && int64_t(taken.order.size()) < rule.limit) {
    size_t cheapest = 0;
    double least = 0.0;
    for (size_t k = 0; k < candidates.size(); ++k) {
      const double cost = weighted(rule.entropy_weight, candidates[k].entropy) + weighted(rule.lam, mi_sum[k]);
      if (k == 0 || cost < least) cheapest = k, least = cost;
    }
    if (!taken.order.empty() && !(least <= remaining)) break;
    const int32_t j = candidates[cheapest].index;
    taken.take(j, least);
    remaining -= least;
    // Kept in the order of their index, on which ties are decided.
    candidates.erase(candidates.begin() + int64_t(cheapest));
    mi_sum.erase(mi_sum.begin() + int64_t(cheapest));
    const auto [begin, end] = near(mi, candidates, j);
    for (size_t k = begin; k < end; ++k) mi_sum[k] += mi.positive(candidates[k].index, j);
  }
  return taken.spent;
}

template <class M>
double below_threshold(const MiRow<M>& mi, std::vector<Candidate>& candidates, double tau, int64_t limit,
                       uint8_t* selected) {
  Taken taken{selected};
  AscendingOrder order(candidates);
  for (size_t rank = 0; rank < order.size() && int64_t(taken.order.size()) < limit; ++rank) {
    const int32_t i = order[rank].index;
    const bool joins = std::all_of(taken.order.begin(), taken.order.end(),
                                   [&](int32_t j) { return double(std::max(mi.at(i, j), mi.at(j, i))) < tau; });
    if (!joins) continue;
    for (int32_t j : taken.order) taken.spent += mi.positive(i, j);
    taken.take(i, 0.0);
  }
  return taken.spent;
}

// Welsh-Powell on the graph whose edges are pairs of at least tau in either direction.
template <class M>
void color_row(const MiRow<M>& mi, const std::vector<Candidate>& masked, double tau, int64_t* group) {
  const size_t n = masked.size(), words = (n + 63) / 64;
  std::vector<uint64_t> adjacent(n * words, 0);
  const auto connect = [&](size_t a, size_t b) { adjacent[a * words + b / 64] |= uint64_t(1) << (b % 64); };
  for (size_t a = 0; a < n; ++a)  // along the rows only: reading columns would miss the cache at every element
    for (size_t b = 0; b < n; ++b)
      if (a != b && double(mi.at(masked[a].index, masked[b].index)) >= tau) connect(a, b), connect(b, a);

  const auto neighbours = [&](size_t a, auto visit) {
    for (size_t w = 0; w < words; ++w)
      for (uint64_t bits = adjacent[a * words + w]; bits != 0; bits &= bits - 1)
        visit(w * 64 + size_t(__builtin_ctzll(bits)));
  };
  std::vector<int64_t> degree(n, 0), colour(n, -1);
  std::vector<size_t> order(n);
  for (size_t a = 0; a < n; ++a) {
    order[a] = a;
    neighbours(a, [&](size_t) { ++degree[a]; });
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return degree[a] > degree[b]; });
  std::vector<size_t> used_by(n + 1, n);  // used_by[c] == a: a neighbour of a has colour c
  for (size_t a : order) {
    neighbours(a, [&](size_t b) {
      if (colour[b] >= 0) used_by[size_t(colour[b])] = a;
    });
    int64_t c = 0;
    while (used_by[size_t(c)] == a) ++c;
    colour[a] = c;
    group[masked[a].index] = c;
  }
}

int useful_threads(const Positions& positions, const MiMatrix& mi, int threads) {
  const int64_t elements = positions.batch * positions.n * std::min(positions.n, 2 * mi.window + 1);
  return int(std::max<int64_t>(1, std::min<int64_t>(threads, elements / kElementsPerThread)));
}

// select_row(row of mi, its candidates, b) -> spent
template <class M, class SelectRow>
void select_rows(const char* op, const Positions& positions, const MiMatrix& mi, uint8_t* selected, double* spent,
                 int threads, SelectRow select_row) {
  threads = useful_threads(positions, mi, threads);
  auto masked = checked_positions<M>(op, positions, mi, threads);
  std::fill_n(selected, positions.batch * positions.n, uint8_t(0));
  parallel_for(positions.batch, threads, [&](int64_t b, int) {
    std::vector<Candidate>& row = masked[size_t(b)];
    spent[b] = row.empty() ? 0.0 : select_row(mi_row<M>(mi, b), row, b);
  });
}

// Calls body with the element type of mi.
template <class Body>
void with_type(const MiMatrix& mi, Body body) {
  if (mi.dtype == Dtype::f64)
    body(double());
  else
    body(float());
}

}  // namespace

void select_budget(const char* op, const Positions& positions, const MiMatrix& mi, const BudgetRule& rule,
                   uint8_t* selected, double* spent, int threads) {
  with_type(mi, [&](auto type) {
    using M = decltype(type);
    select_rows<M>(op, positions, mi, selected, spent, threads,
                   [&](const MiRow<M>& row, std::vector<Candidate>& candidates, int64_t b) {
                     const double gamma = rule.gamma[b];
                     uint8_t* out = selected + b * positions.n;
                     if (rule.cheapest) return budget_by_cost(row, candidates, rule, gamma, out);
                     if (row.window != kNoWindow)
                       return budget_in_window(row, positions.n, candidates, rule, gamma, out);
                     return budget_by_entropy(row, candidates, rule, gamma, out);
                   });
  });
}

void select_threshold(const Positions& positions, const MiMatrix& mi, double tau, int64_t limit, uint8_t* selected,
                      double* spent, int threads) {
  with_type(mi, [&](auto type) {
    using M = decltype(type);
    select_rows<M>("select_threshold", positions, mi, selected, spent, threads,
                   [&](const MiRow<M>& row, std::vector<Candidate>& candidates, int64_t b) {
                     return below_threshold(row, candidates, tau, limit, selected + b * positions.n);
                   });
  });
}

void color(const Positions& positions, const MiMatrix& mi, double tau, int64_t* group, int threads) {
  with_type(mi, [&](auto type) {
    using M = decltype(type);
    threads = useful_threads(positions, mi, threads);
    const auto masked = checked_positions<M>("color", positions, mi, threads);
    std::fill_n(group, positions.batch * positions.n, int64_t(-1));
    parallel_for(positions.batch, threads,
                 [&](int64_t b, int) { color_row(mi_row<M>(mi, b), masked[size_t(b)], tau, group + b * positions.n); });
  });
}

}  // namespace mdmi
