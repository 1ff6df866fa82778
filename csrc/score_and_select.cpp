#include "score_and_select.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "pair_scorer.hpp"
#include "select_order.hpp"
#include "threads.hpp"

namespace mdmi {
namespace {

struct Waiting {  // a position that may still join
  Candidate candidate;
  int64_t row;  // among the gathered ones
  double mi_sum;
  float score;  // with the position chosen last
};

constexpr int64_t kPairsPerTask = 48;

// Scores of every waiting position with gathered row j.
void score_column(std::vector<PairScorer>& scorers, std::vector<Waiting>& waiting, int64_t j) {
  const int64_t n = int64_t(waiting.size());
  parallel_for((n + kPairsPerTask - 1) / kPairsPerTask, int(scorers.size()), [&](int64_t task, int worker) {
    PairScorer& scorer = scorers[size_t(worker)];
    for (int64_t k = task * kPairsPerTask; k < std::min(n, (task + 1) * kPairsPerTask); ++k)
      scorer.add(waiting[size_t(k)].row, j, &waiting[size_t(k)].score, nullptr);
    scorer.flush();
  });
}

class Row {
 public:
  Row(const Gathered& gathered, const BudgetRule& rule, int64_t b, uint8_t* selected)
      : gathered_(gathered), rule_(rule), batch_(b), remaining_(rule.gamma[b]), selected_(selected) {}

  void select(std::vector<Candidate>& masked, std::vector<PairScorer>& scorers) {
    const Candidate first = *std::min_element(masked.begin(), masked.end());
    take(first, own_cost(first));
    keep_hopeful(masked, first, remaining_, [&](const Candidate& c) { return own_cost(c); });
    std::sort(masked.begin(), masked.end());
    for (const Candidate& c : masked) waiting_.push_back({c, row_of(c), 0.0, 0.0f});
    Candidate last = first;
    while (!waiting_.empty() && chosen_ < rule_.limit) {
      score_column(scorers, waiting_, row_of(last));
      pairs_ += int64_t(waiting_.size());
      for (Waiting& w : waiting_) add_score(w, last);
      if (!take_next(last)) break;
    }
  }

  double spent() const { return spent_; }
  int64_t pairs() const { return pairs_; }

 private:
  double own_cost(const Candidate& c) const { return weighted(rule_.entropy_weight, c.entropy); }
  double cost(const Waiting& w) const { return own_cost(w.candidate) + weighted(rule_.lam, w.mi_sum); }

  int64_t row_of(const Candidate& c) const {
    const auto begin = gathered_.position.begin() + gathered_.first[size_t(batch_)];
    const auto end = gathered_.position.begin() + gathered_.first[size_t(batch_) + 1];
    return int64_t(std::lower_bound(begin, end, c.index) - gathered_.position.begin());
  }

  void take(const Candidate& c, double cost) {
    selected_[c.index] = 1;
    spent_ += cost;
    remaining_ -= cost;
    ++chosen_;
  }

  void add_score(Waiting& w, const Candidate& with) const {
    if (w.score != w.score) throw nan_in_mi("score_and_select", batch_, w.candidate.index, with.index);
    w.mi_sum += w.score > 0.0f ? double(w.score) : 0.0;
  }

  // Takes the first waiting position that fits, and forgets those before it and those behind it that never will.
  bool take_next(Candidate& last) {
    for (size_t k = 0; k < waiting_.size(); ++k) {
      if (own_cost(waiting_[k].candidate) > remaining_) return false;  // and so are all later ones
      if (!(cost(waiting_[k]) <= remaining_)) continue;
      last = waiting_[k].candidate;
      take(last, cost(waiting_[k]));
      const auto hopeless = [&](const Waiting& w) { return last.entropy >= 0.0 && cost(w) > remaining_; };
      waiting_.erase(waiting_.begin(), waiting_.begin() + int64_t(k) + 1);
      waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), hopeless), waiting_.end());
      return true;
    }
    return false;
  }

  const Gathered& gathered_;
  const BudgetRule& rule_;
  int64_t batch_;
  double remaining_, spent_ = 0.0;
  uint8_t* selected_;
  int64_t chosen_ = 0, pairs_ = 0;
  std::vector<Waiting> waiting_;
};

}  // namespace

int64_t score_and_select(const PackedNetwork& network, const Halves& halves, const PairRule& pair_rule,
                         const Positions& positions, const BudgetRule& rule, uint8_t* selected, double* spent,
                         int threads) {
  const Gathered gathered = gather(halves);
  const PairNetwork net = network.view(halves.width, pair_rule.multiply, pair_rule.softplus);
  std::fill_n(selected, positions.batch * positions.n, uint8_t(0));
  std::vector<std::vector<Candidate>> masked(static_cast<size_t>(positions.batch));
  for (size_t b = 0; b < masked.size(); ++b) masked_positions(positions, int64_t(b), masked[b]);
  std::vector<int64_t> pairs(masked.size(), 0);
  // One thread for each sequence where there are enough of them, else all threads for one sequence after the other.
  const bool one_each = positions.batch >= threads;
  const int workers = std::max(1, one_each ? threads : 1);
  std::vector<std::vector<PairScorer>> scorers(static_cast<size_t>(workers));
  for (auto& mine : scorers)
    for (int k = 0; k < std::max(1, one_each ? 1 : threads); ++k)
      mine.emplace_back(net, gathered, pair_rule, halves.equal());
  std::vector<std::string> errors(masked.size());
  parallel_for(positions.batch, workers, [&](int64_t b, int worker) {
    spent[b] = 0.0;
    if (masked[size_t(b)].empty()) return;
    try {
      check_entropy("score_and_select", b, masked[size_t(b)]);
      Row row(gathered, rule, b, selected + b * positions.n);
      row.select(masked[size_t(b)], scorers[size_t(worker)]);
      spent[b] = row.spent();
      pairs[size_t(b)] = row.pairs();
    } catch (const std::invalid_argument& error) {
      errors[size_t(b)] = error.what();
    }
  });
  for (const std::string& error : errors)
    if (!error.empty()) throw std::invalid_argument(error);  // of the first sequence that has one
  int64_t total = 0;
  for (int64_t n : pairs) total += n;
  return total;
}

}  // namespace mdmi
