// The functions of mdmi_fast.h: arguments checked, exceptions turned into return codes.
#include "api/mdmi_fast.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "drivers/pairwise.hpp"
#include "drivers/select.hpp"
#include "drivers/stats.hpp"

struct mdmi_network {
  mdmi::PackedNetwork packed;
  int64_t width;
};

namespace {

using mdmi::Dtype;

thread_local std::string last_error;

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void require_sizes(const std::string& function, int64_t batch, int64_t n, int threads) {
  require(batch >= 0 && n >= 0,
          function + ": sizes must be at least 0, got batch " + std::to_string(batch) + " and n " + std::to_string(n));
  require(threads >= 1, function + ": threads must be at least 1, got " + std::to_string(threads));
}

void require_between(const std::string& function, const char* name, int value, int last) {
  require(value >= 0 && value <= last,
          function + ": " + name + " must lie in 0.." + std::to_string(last) + ", got " + std::to_string(value));
}

// Not finite or below 0.
void require_weight(const std::string& function, const char* name, double value) {
  require(value >= 0.0 && value < __builtin_inf(),
          function + ": " + name + " must be finite and at least 0, got " + std::to_string(value));
}

int64_t checked_limit(const std::string& function, int64_t limit) {
  require(limit >= 0, function + ": limit must be at least 1, or MDMI_NO_LIMIT, got " + std::to_string(limit));
  return limit == MDMI_NO_LIMIT ? INT64_MAX : limit;
}

mdmi::Positions positions(int64_t batch, int64_t n, const float* entropy, const uint8_t* mask) {
  return {batch, n, entropy, Dtype::f32, n, 1, mask, n, 1};
}

mdmi::MiMatrix matrix(int64_t n, const float* mi) { return {mi, Dtype::f32, n * n, n, 1}; }

template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

}  // namespace

const char* mdmi_last_error(void) { return last_error.c_str(); }

int mdmi_token_stats(const float* logits, int64_t rows, int64_t vocabulary, float* entropy, float* confidence,
                     int64_t* token, int threads) {
  return guarded([&] {
    require_sizes("mdmi_token_stats", rows, vocabulary, threads);
    require(vocabulary >= 1, "mdmi_token_stats: vocabulary must be at least 1, got 0");
    mdmi::StatsOut out;
    out.entropy = entropy, out.confidence = confidence, out.token = token;
    mdmi::row_stats({logits, Dtype::f32, 1, vocabulary, 0}, rows, vocabulary, out, threads);
  });
}

int mdmi_select_budget(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                       const double* gamma, double lam, double entropy_weight, int order, int64_t limit,
                       uint8_t* selected, double* spent, int threads) {
  return guarded([&] {
    const std::string name = "mdmi_select_budget";
    require_sizes(name, batch, n, threads);
    for (int64_t b = 0; b < batch; ++b)
      require(gamma[b] >= 0.0,
              name + ": gamma must be at least 0, got " + std::to_string(gamma[b]) + " at batch " + std::to_string(b));
    require_weight(name, "lam", lam);
    require_weight(name, "entropy_weight", entropy_weight);
    require_between(name, "order", order, MDMI_ORDER_CHEAPEST);
    const mdmi::BudgetRule rule{gamma, lam, entropy_weight, order == MDMI_ORDER_CHEAPEST, checked_limit(name, limit)};
    mdmi::select_budget("select_budget", positions(batch, n, entropy, mask), matrix(n, mi), rule, selected, spent,
                        threads);
  });
}

int mdmi_select_threshold(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                          double tau, int64_t limit, uint8_t* selected, double* spent, int threads) {
  return guarded([&] {
    const std::string name = "mdmi_select_threshold";
    require_sizes(name, batch, n, threads);
    require(tau == tau, name + ": tau must not be NaN");
    const int64_t most = checked_limit(name, limit);
    mdmi::select_threshold(positions(batch, n, entropy, mask), matrix(n, mi), tau, most, selected, spent, threads);
  });
}

int mdmi_color(int64_t batch, int64_t n, const float* mi, const uint8_t* mask, double tau, int64_t* group,
               int threads) {
  return guarded([&] {
    require_sizes("mdmi_color", batch, n, threads);
    require(tau == tau, "mdmi_color: tau must not be NaN");
    mdmi::color(positions(batch, n, nullptr, mask), matrix(n, mi), tau, group, threads);
  });
}

mdmi_network* mdmi_network_new(int64_t n_layers, const int64_t* widths, const float* const* weights,
                               const float* const* biases, const float* w_out, float b_out) {
  mdmi_network* network = nullptr;
  guarded([&] {
    require(n_layers >= 0, "mdmi_network_new: n_layers must be at least 0, got " + std::to_string(n_layers));
    std::vector<mdmi::LayerWeights> layers;
    for (int64_t k = 0; k <= n_layers; ++k) {
      require(widths[k] >= 1, "mdmi_network_new: widths must be at least 1, got " + std::to_string(widths[k]));
      if (k > 0) layers.push_back({weights[k - 1], biases[k - 1], widths[k - 1], widths[k]});
    }
    network = new mdmi_network{{layers, w_out, widths[n_layers], b_out, false}, widths[0]};
  });
  return network;
}

void mdmi_network_free(mdmi_network* network) { delete network; }

int mdmi_score_pairs(const mdmi_network* network, int64_t batch, int64_t n, const float* u, const float* v,
                     const uint8_t* mask, int symmetry, int combine, int activation, float* scores, int threads) {
  return guarded([&] {
    const std::string name = "mdmi_score_pairs";
    require(network != nullptr, name + ": network must not be NULL");
    require_sizes(name, batch, n, threads);
    require_between(name, "symmetry", symmetry, MDMI_SYMMETRY_UPPER);
    require_between(name, "combine", combine, MDMI_COMBINE_MULTIPLY);
    require_between(name, "activation", activation, MDMI_ACTIVATION_SOFTPLUS);
    const int64_t width = network->width;
    const mdmi::Halves halves{u,     v,     Dtype::f32, Dtype::f32, n * width, width, n * width,
                              width, batch, n,          width,      mask,      n,     1};
    const mdmi::PairRule rule{mdmi::Symmetry(symmetry), combine == MDMI_COMBINE_MULTIPLY,
                              activation == MDMI_ACTIVATION_SOFTPLUS};
    mdmi::score_all(network->packed, halves, rule, scores, threads);
  });
}
