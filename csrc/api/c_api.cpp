// The functions of mdmi_fast.h: arguments checked, exceptions turned into return codes.
#include "api/mdmi_fast.h"

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "drivers/checks.hpp"
#include "drivers/pairwise.hpp"
#include "drivers/select.hpp"
#include "drivers/stats.hpp"
#include "drivers/threads.hpp"

struct mdmi_network {
  mdmi::PackedNetwork packed;
  int64_t width;
  std::vector<float> shift = {};
  std::vector<int32_t> relation = {};
  int64_t positions = 0;  // of the relation; 0: there is none
};

namespace {

using mdmi::array;
using mdmi::array_or_null;
using mdmi::Dtype;
using mdmi::refuse;

// No std::string: saying what went wrong must not itself go wrong.
thread_local char last_error[512];

void require_sizes(const char* function, int64_t batch, int64_t n) {
  if (batch < 0) refuse(function, "batch must be at least 0, got " + std::to_string(batch));
  mdmi::require_positions(function, n);
}

int checked_threads(const char* function, int threads) {
  if (threads < 1) refuse(function, "threads must be at least 1, got " + std::to_string(threads));
  return mdmi::usable_threads(threads);
}

void require_between(const char* function, const char* name, int value, int last) {
  if (value < 0 || value > last)
    refuse(function, std::string(name) + " must lie in 0.." + std::to_string(last) + ", got " + std::to_string(value));
}

void require_weight(const char* function, const char* name, double value) {
  if (!(value >= 0.0 && value < __builtin_inf()))
    refuse(function, std::string(name) + " must be finite and at least 0, got " + std::to_string(value));
}

int64_t checked_limit(const char* function, int64_t limit) {
  if (limit < 0) refuse(function, "limit must be at least 1, or MDMI_NO_LIMIT, got " + std::to_string(limit));
  return limit == MDMI_NO_LIMIT ? INT64_MAX : limit;
}

mdmi::Positions positions(const char* function, int64_t batch, int64_t n, const float* entropy, const uint8_t* mask) {
  return {batch, n, array(function, "entropy", entropy, {batch, n}), Dtype::f32, n, 1, mask, n, 1};
}

mdmi::MiMatrix matrix(const char* function, int64_t batch, int64_t n, const float* mi) {
  return {array(function, "mi", mi, {batch, n, n}), Dtype::f32, n * n, n, 1};
}

void keep_error(const char* message) { std::snprintf(last_error, sizeof last_error, "%s", message); }

template <class Body>
int guarded(const char* function, Body body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    std::snprintf(last_error, sizeof last_error, "%s: not enough memory", function);
  } catch (const std::exception& error) {
    keep_error(error.what());
  } catch (...) {
    std::snprintf(last_error, sizeof last_error, "%s: unknown error", function);
  }
  return -1;
}

}  // namespace

const char* mdmi_last_error(void) { return last_error; }

int mdmi_token_stats(const float* logits, int64_t rows, int64_t vocabulary, float* entropy, float* confidence,
                     int64_t* token, int threads) {
  const char* name = "mdmi_token_stats";
  return guarded(name, [&] {
    if (rows < 0) refuse(name, "rows must be at least 0, got " + std::to_string(rows));
    if (vocabulary < 1) refuse(name, "vocabulary must be at least 1, got " + std::to_string(vocabulary));
    array(name, "logits", logits, {rows, vocabulary});
    mdmi::StatsOut out;
    out.entropy = array_or_null(name, "entropy", entropy, {rows});
    out.confidence = array_or_null(name, "confidence", confidence, {rows});
    out.token = array_or_null(name, "token", token, {rows});
    threads = checked_threads(name, threads);
    mdmi::row_stats({logits, Dtype::f32, 1, vocabulary, 0}, rows, vocabulary, out, threads);
  });
}

int mdmi_select_budget(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                       const double* gamma, double lam, double entropy_weight, int order, int64_t limit,
                       uint8_t* selected, double* spent, int threads) {
  const char* name = "mdmi_select_budget";
  return guarded(name, [&] {
    require_sizes(name, batch, n);
    const mdmi::Positions of_entropy = positions(name, batch, n, entropy, mask);
    const mdmi::MiMatrix pairs = matrix(name, batch, n, mi);
    array(name, "gamma", gamma, {batch});
    for (int64_t b = 0; b < batch; ++b)
      if (!(gamma[b] >= 0.0))
        refuse(name, "gamma must be at least 0, got " + std::to_string(gamma[b]) + " at batch " + std::to_string(b));
    require_weight(name, "lam", lam);
    require_weight(name, "entropy_weight", entropy_weight);
    require_between(name, "order", order, MDMI_ORDER_CHEAPEST);
    const mdmi::BudgetRule rule{gamma, lam, entropy_weight, order == MDMI_ORDER_CHEAPEST, checked_limit(name, limit)};
    array(name, "selected", selected, {batch, n});
    array(name, "spent", spent, {batch});
    threads = checked_threads(name, threads);
    mdmi::select_budget("select_budget", of_entropy, pairs, rule, selected, spent, threads);
  });
}

int mdmi_select_threshold(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                          double tau, int64_t limit, uint8_t* selected, double* spent, int threads) {
  const char* name = "mdmi_select_threshold";
  return guarded(name, [&] {
    require_sizes(name, batch, n);
    const mdmi::Positions of_entropy = positions(name, batch, n, entropy, mask);
    const mdmi::MiMatrix pairs = matrix(name, batch, n, mi);
    if (tau != tau) refuse(name, "tau must not be NaN");
    const int64_t most = checked_limit(name, limit);
    array(name, "selected", selected, {batch, n});
    array(name, "spent", spent, {batch});
    threads = checked_threads(name, threads);
    mdmi::select_threshold(of_entropy, pairs, tau, most, selected, spent, threads);
  });
}

int mdmi_color(int64_t batch, int64_t n, const float* mi, const uint8_t* mask, double tau, int64_t* group,
               int threads) {
  const char* name = "mdmi_color";
  return guarded(name, [&] {
    require_sizes(name, batch, n);
    const mdmi::MiMatrix pairs = matrix(name, batch, n, mi);
    if (tau != tau) refuse(name, "tau must not be NaN");
    array(name, "group", group, {batch, n});
    threads = checked_threads(name, threads);
    mdmi::color({batch, n, nullptr, Dtype::f32, 0, 0, mask, n, 1}, pairs, tau, group, threads);
  });
}

mdmi_network* mdmi_network_new(int64_t n_layers, const int64_t* widths, const float* const* weights,
                               const float* const* biases, const float* w_out, float b_out) {
  const char* name = "mdmi_network_new";
  mdmi_network* network = nullptr;
  guarded(name, [&] {
    if (n_layers < 0) refuse(name, "n_layers must be at least 0, got " + std::to_string(n_layers));
    array(name, "weights", weights, {n_layers});
    array(name, "biases", biases, {n_layers});
    array(name, "widths", widths, {n_layers + 1});
    std::vector<mdmi::LayerWeights> layers;
    for (int64_t k = 0; k <= n_layers; ++k) {
      if (widths[k] < 1) refuse(name, "widths must be at least 1, got " + std::to_string(widths[k]));
      if (k == 0) continue;
      const std::string of_layer = "[" + std::to_string(k - 1) + "]";
      layers.push_back({array(name, ("weights" + of_layer).c_str(), weights[k - 1], {widths[k - 1], widths[k]}),
                        array(name, ("biases" + of_layer).c_str(), biases[k - 1], {widths[k]}), widths[k - 1],
                        widths[k]});
    }
    const int64_t last = widths[n_layers];
    network = new mdmi_network{{layers, array(name, "w_out", w_out, {last}), last, b_out, false}, widths[0]};
  });
  return network;
}

void mdmi_network_free(mdmi_network* network) { delete network; }

int mdmi_network_shift(mdmi_network* network, int64_t count, const float* shift, int64_t n, const int32_t* relation) {
  const char* name = "mdmi_network_shift";
  return guarded(name, [&] {
    if (network == nullptr) refuse(name, "network must not be NULL");
    if (count < 0) refuse(name, "count must be at least 0, got " + std::to_string(count));
    array(name, "shift", shift, {count});
    if (relation != nullptr) {
      mdmi::require_positions(name, n);
      array(name, "relation", relation, {n, n});
      for (int64_t k = 0; k < n * n; ++k)
        if (relation[k] < 0 || relation[k] >= count)
          refuse(name,
                 "relation must be within 0.." + std::to_string(count - 1) + ", got " + std::to_string(relation[k]));
    }
    std::vector<float> values(shift, shift + count);
    std::vector<int32_t> relations;
    if (relation != nullptr) relations.assign(relation, relation + n * n);
    network->shift.swap(values);
    network->relation.swap(relations);
    network->positions = relation == nullptr ? 0 : n;
  });
}

int mdmi_score_pairs(const mdmi_network* network, int64_t batch, int64_t n, const float* u, const float* v,
                     const uint8_t* mask, int symmetry, int combine, int activation, float* scores, int threads) {
  const char* name = "mdmi_score_pairs";
  return guarded(name, [&] {
    if (network == nullptr) refuse(name, "network must not be NULL");
    require_sizes(name, batch, n);
    const int64_t width = network->width, stride = mdmi::count_of(name, "u", {n, width});
    array(name, "u", u, {batch, n, width});
    array(name, "v", v, {batch, n, width});
    require_between(name, "symmetry", symmetry, MDMI_SYMMETRY_UPPER);
    require_between(name, "combine", combine, MDMI_COMBINE_MULTIPLY);
    require_between(name, "activation", activation, MDMI_ACTIVATION_SOFTPLUS);
    array(name, "scores", scores, {batch, n, n});
    threads = checked_threads(name, threads);
    if (network->positions != 0 && network->positions != n)
      refuse(name, "n must be that of the network's relation, " + std::to_string(network->positions) + ", got " +
                       std::to_string(n));
    const mdmi::PairShift shift{network->shift.empty() ? nullptr : network->shift.data(),
                                int64_t(network->shift.size()),
                                network->relation.empty() ? nullptr : network->relation.data(), 0};
    const mdmi::Halves halves{u,     v, Dtype::f32, Dtype::f32, stride, width, stride, width,
                              batch, n, width,      mask,       n,      1,     shift};
    const mdmi::PairRule rule{mdmi::Symmetry(symmetry), combine == MDMI_COMBINE_MULTIPLY,
                              activation == MDMI_ACTIVATION_SOFTPLUS};
    mdmi::score_all(network->packed, halves, rule, scores, threads);
  });
}
