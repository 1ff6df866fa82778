#include "drivers/score_and_select.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "drivers/pair_scorer.hpp"
#include "drivers/select_order.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

struct Waiting {  // a position that may still join
  Candidate candidate;
  int64_t row;      // among the gathered ones
  double mi_sum;    // with the positions chosen first
  size_t n_summed;  // how many of them
};

struct WantedPair {
  size_t waiting;
  int64_t chosen_row;
  float score;
};

// Pairs scored at a time: whole tiles of every target, and not many more than the position whose turn it is needs.
constexpr size_t kPairsAhead = 24;
constexpr size_t kPairsPerTask = 12;
constexpr int64_t kOperationsPerTask = 1 << 18;  // fewer are done before another thread is awake

// Selects from one sequence. Positions take their turns by entropy, so the pairs of one that is never reached are never
// scored, nor those of one whose cost exceeds the budget already.
class SequenceSelection {
 public:
  SequenceSelection(const Gathered& gathered, const BudgetRule& rule, int64_t b, uint8_t* selected)
      : gathered_(gathered), rule_(rule), batch_(b), remaining_(rule.gamma[b]), selected_(selected) {}

  void select(std::vector<Candidate>& masked, std::vector<PairScorer>& scorers) {
    const Candidate first = *std::min_element(masked.begin(), masked.end());
    take(first.index, row_of(first), own_cost(first));
    keep_hopeful(masked, first, remaining_, [&](const Candidate& c) { return own_cost(c); });
    std::sort(masked.begin(), masked.end());
    for (const Candidate& c : masked) waiting_.push_back({c, row_of(c), 0.0, 0});
    for (size_t turn = 0; turn < waiting_.size() && int64_t(chosen_rows_.size()) < rule_.limit; ++turn) {
      const Waiting& w = waiting_[turn];
      if (own_cost(w.candidate) > remaining_) break;  // and so are all later ones
      while (w.n_summed < chosen_rows_.size() && cost(w) <= remaining_) score_from(turn, scorers);
      if (cost(w) <= remaining_) take(w.candidate.index, w.row, cost(w));
    }
  }

  double spent() const { return spent_; }
  int64_t pairs() const { return pairs_; }

 private:
  double own_cost(const Candidate& c) const { return weighted(rule_.entropy_weight, c.entropy); }
  // No more than the full cost while pairs are missing: none of them is negative.
  double cost(const Waiting& w) const { return own_cost(w.candidate) + weighted(rule_.lam, w.mi_sum); }

  int64_t row_of(const Candidate& c) const {
    const auto begin = gathered_.position.begin() + gathered_.first[size_t(batch_)];
    const auto end = gathered_.position.begin() + gathered_.first[size_t(batch_) + 1];
    return int64_t(std::lower_bound(begin, end, c.index) - gathered_.position.begin());
  }

  void take(int32_t index, int64_t row, double cost) {
    selected_[index] = 1;
    spent_ += cost;
    remaining_ -= cost;
    chosen_rows_.push_back(row);
  }

  // The next pairs that the position whose turn it is lacks and, to fill the tiles, those that later ones do.
  void score_from(size_t turn, std::vector<PairScorer>& scorers) {
    wanted_.clear();
    for (size_t k = turn; k < waiting_.size() && wanted_.size() < kPairsAhead; ++k) {
      const Waiting& w = waiting_[k];
      if (own_cost(w.candidate) > remaining_) break;
      if (!(cost(w) <= remaining_)) continue;
      for (size_t c = w.n_summed; c < chosen_rows_.size() && wanted_.size() < kPairsAhead; ++c)
        wanted_.push_back({k, chosen_rows_[c], 0.0f});
    }
    parallel_for(int64_t((wanted_.size() + kPairsPerTask - 1) / kPairsPerTask), int(scorers.size()),
                 [&](int64_t task, int worker) {
                   PairScorer& scorer = scorers[size_t(worker)];
                   const size_t begin = size_t(task) * kPairsPerTask;
                   for (size_t k = begin; k < std::min(wanted_.size(), begin + kPairsPerTask); ++k)
                     scorer.add(waiting_[wanted_[k].waiting].row, wanted_[k].chosen_row, &wanted_[k].score, nullptr);
                   scorer.flush();
                 });
    pairs_ += int64_t(wanted_.size());
    for (const WantedPair& pair : wanted_) {
      Waiting& w = waiting_[pair.waiting];
      if (pair.score != pair.score)
        throw nan_in_mi("score_and_select", batch_, w.candidate.index, gathered_.position[size_t(pair.chosen_row)]);
      w.mi_sum += pair.score > 0.0f ? double(pair.score) : 0.0;
      ++w.n_summed;
    }
  }

  const Gathered& gathered_;
  const BudgetRule& rule_;
  int64_t batch_;
  double remaining_, spent_ = 0.0;
  uint8_t* selected_;
  int64_t pairs_ = 0;
  std::vector<int64_t> chosen_rows_;
  std::vector<Waiting> waiting_;
  std::vector<WantedPair> wanted_;
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
  const int at_one = net.operations() * int64_t(kPairsPerTask) < kOperationsPerTask ? 1 : threads;
  const int workers = std::max(1, one_each ? threads : 1);
  std::vector<std::vector<PairScorer>> scorers(static_cast<size_t>(workers));
  for (auto& mine : scorers)
    for (int k = 0; k < std::max(1, one_each ? 1 : at_one); ++k)
      mine.emplace_back(net, gathered, pair_rule, halves.symmetric());
  std::vector<std::string> errors(masked.size());
  parallel_for(positions.batch, workers, [&](int64_t b, int worker) {
    spent[b] = 0.0;
    if (masked[size_t(b)].empty()) return;
    try {
      check_entropy("score_and_select", b, masked[size_t(b)]);
      SequenceSelection row(gathered, rule, b, selected + b * positions.n);
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
