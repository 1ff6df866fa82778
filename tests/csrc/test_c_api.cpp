// mdmi_fast.h with every argument that it must refuse: NULL, misaligned and negative ones, and sizes whose products
// overflow. Part of the program of test_kernels.cpp, whose sanitizers see what is read before it is refused.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api/mdmi_fast.h"

namespace {

constexpr int64_t kBatch = 2, kN = 3, kHuge = int64_t(1) << 62;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s (last error: %s)\n", what.c_str(), mdmi_last_error());
  std::exit(1);
}

// Arguments of every function, good ones at first.
struct Arguments {
  std::vector<float> floats = std::vector<float>(64, 0.25f);
  std::vector<double> doubles = std::vector<double>(8, 0.5);
  std::vector<int64_t> ints = std::vector<int64_t>(32, 0);
  std::vector<uint8_t> bytes = std::vector<uint8_t>(32, 1);
  std::vector<float> written = std::vector<float>(64);
  std::vector<double> spent = std::vector<double>(8);

  int64_t batch = kBatch, n = kN, rows = kBatch, vocabulary = kN, limit = MDMI_NO_LIMIT;
  int threads = 1, order = MDMI_ORDER_ENTROPY, symmetry = MDMI_SYMMETRY_MEAN, combine = 0, activation = 0;
  double lam = 1.0, entropy_weight = 1.0, tau = 0.5;
  const float *logits = floats.data(), *entropy = floats.data(), *mi = floats.data(), *u = floats.data(),
              *v = floats.data();
  const uint8_t* mask = nullptr;
  const double* gamma = doubles.data();
  float *entropy_out = written.data(), *confidence = written.data() + 8, *scores = written.data();
  int64_t *token = ints.data(), *group = ints.data();
  uint8_t* selected = bytes.data();
  double* spent_out = spent.data();

  int64_t n_layers = 1, widths[2] = {2, 3};
  const int64_t* widths_in = widths;
  const float *weight[1] = {floats.data()}, *bias[1] = {floats.data()};
  const float *const *weights = weight, *const *biases = bias;
  const float* w_out = floats.data();
  mdmi_network* network = nullptr;

  Arguments() = default;
  Arguments(const Arguments&) = delete;
};

using Change = std::function<void(Arguments&)>;

template <class T>
T* one_byte_on(T* address) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(address) + 1);
}

int token_stats(Arguments& a) {
  return mdmi_token_stats(a.logits, a.rows, a.vocabulary, a.entropy_out, a.confidence, a.token, a.threads);
}
int select_budget(Arguments& a) {
  return mdmi_select_budget(a.batch, a.n, a.entropy, a.mi, a.mask, a.gamma, a.lam, a.entropy_weight, a.order, a.limit,
                            a.selected, a.spent_out, a.threads);
}
int select_threshold(Arguments& a) {
  return mdmi_select_threshold(a.batch, a.n, a.entropy, a.mi, a.mask, a.tau, a.limit, a.selected, a.spent_out,
                               a.threads);
}
int color(Arguments& a) { return mdmi_color(a.batch, a.n, a.mi, a.mask, a.tau, a.group, a.threads); }
int network_new(Arguments& a) {
  mdmi_network* network = mdmi_network_new(a.n_layers, a.widths_in, a.weights, a.biases, a.w_out, 0.0f);
  mdmi_network_free(network);
  return network == nullptr ? -1 : 0;
}
int score_pairs(Arguments& a) {
  return mdmi_score_pairs(a.network, a.batch, a.n, a.u, a.v, a.mask, a.symmetry, a.combine, a.activation, a.scores,
                          a.threads);
}

// Each change alone is refused by `call` with a message that names the argument.
void refuses(const char* function, int (*call)(Arguments&), const std::vector<std::pair<const char*, Change>>& changes,
             mdmi_network* network = nullptr) {
  Arguments good;
  good.network = network;
  expect(call(good) == 0, std::string(function) + " takes good arguments");
  for (const auto& [argument, change] : changes) {
    Arguments bad;
    bad.network = network;
    change(bad);
    const std::string what = std::string(function) + " refuses a bad " + argument;
    expect(call(bad) == -1, what);
    const std::string said = mdmi_last_error();
    expect(said.find(std::string(function) + ": " + argument) == 0, what + " by its name");
  }
}

}  // namespace

void test_c_api() {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const Change negative_batch = [](Arguments& a) { a.batch = -1; };
  const Change negative_n = [](Arguments& a) { a.n = -1; };
  const Change too_many = [](Arguments& a) { a.n = int64_t(1) << 31; };
  const Change overflowing = [](Arguments& a) { a.batch = kHuge; };
  const Change no_threads = [](Arguments& a) { a.threads = 0; };
  const std::vector<std::pair<const char*, Change>> common = {
      {"batch", negative_batch}, {"n", negative_n}, {"n", too_many}, {"threads", no_threads}};
  const auto with_common = [&](std::vector<std::pair<const char*, Change>> changes) {
    changes.insert(changes.end(), common.begin(), common.end());
    return changes;
  };

  refuses("mdmi_token_stats", token_stats,
          {{"logits", [](Arguments& a) { a.logits = nullptr; }},
           {"logits", [](Arguments& a) { a.logits = one_byte_on(a.logits); }},
           {"logits", [](Arguments& a) { a.vocabulary = kHuge; }},
           {"logits", [](Arguments& a) { a.rows = a.vocabulary = int64_t(1) << 40; }},
           {"rows", [](Arguments& a) { a.rows = -1; }},
           {"entropy", [](Arguments& a) { a.entropy_out = one_byte_on(a.entropy_out); }},
           {"confidence", [](Arguments& a) { a.confidence = one_byte_on(a.confidence); }},
           {"token", [](Arguments& a) { a.token = one_byte_on(a.token); }},
           {"vocabulary", [](Arguments& a) { a.vocabulary = 0; }},
           {"threads", no_threads}});
  refuses("mdmi_select_budget", select_budget,
          with_common({{"entropy", overflowing},
                       {"gamma", [](Arguments& a) { a.gamma = nullptr; }},
                       {"gamma", [&](Arguments& a) { a.doubles[1] = nan; }},
                       {"gamma", [&](Arguments& a) { a.doubles[1] = -inf; }},
                       {"entropy", [](Arguments& a) { a.entropy = nullptr; }},
                       {"entropy", [](Arguments& a) { a.entropy = one_byte_on(a.entropy); }},
                       {"mi", [](Arguments& a) { a.mi = nullptr; }},
                       {"mi", [](Arguments& a) { a.n = INT32_MAX; }},
                       {"selected", [](Arguments& a) { a.selected = nullptr; }},
                       {"spent", [](Arguments& a) { a.spent_out = nullptr; }},
                       {"spent", [](Arguments& a) { a.spent_out = one_byte_on(a.spent_out); }},
                       {"lam", [&](Arguments& a) { a.lam = nan; }},
                       {"entropy_weight", [&](Arguments& a) { a.entropy_weight = inf; }},
                       {"order", [](Arguments& a) { a.order = 2; }},
                       {"limit", [](Arguments& a) { a.limit = -1; }}}));
  refuses("mdmi_select_threshold", select_threshold,
          with_common({{"entropy", overflowing},
                       {"entropy", [](Arguments& a) { a.entropy = nullptr; }},
                       {"mi", [](Arguments& a) { a.mi = nullptr; }},
                       {"mi", [](Arguments& a) { a.mi = one_byte_on(a.mi); }},
                       {"selected", [](Arguments& a) { a.selected = nullptr; }},
                       {"spent", [](Arguments& a) { a.spent_out = nullptr; }},
                       {"tau", [&](Arguments& a) { a.tau = nan; }},
                       {"limit", [](Arguments& a) { a.limit = -1; }}}));
  refuses("mdmi_color", color,
          with_common({{"mi", overflowing},
                       {"mi", [](Arguments& a) { a.mi = nullptr; }},
                       {"group", [](Arguments& a) { a.group = nullptr; }},
                       {"group", [](Arguments& a) { a.group = one_byte_on(a.group); }},
                       {"tau", [&](Arguments& a) { a.tau = nan; }}}));
  refuses("mdmi_network_new", network_new,
          {{"n_layers", [](Arguments& a) { a.n_layers = -1; }},
           {"weights", [](Arguments& a) { a.n_layers = INT64_MAX; }},
           {"widths", [](Arguments& a) { a.widths_in = nullptr; }},
           {"widths", [](Arguments& a) { a.widths[1] = 0; }},
           {"weights", [](Arguments& a) { a.weights = nullptr; }},
           {"weights[0]", [](Arguments& a) { a.weight[0] = nullptr; }},
           {"weights[0]", [](Arguments& a) { a.widths[0] = a.widths[1] = int64_t(1) << 40; }},
           {"biases", [](Arguments& a) { a.biases = nullptr; }},
           {"biases[0]", [](Arguments& a) { a.bias[0] = nullptr; }},
           {"w_out", [](Arguments& a) { a.w_out = nullptr; }},
           {"w_out", [](Arguments& a) { a.w_out = one_byte_on(a.w_out); }},
           {"w_out", [](Arguments& a) { a.n_layers = 0, a.widths[0] = kHuge; }}});

  Arguments of_network;
  mdmi_network* network =
      mdmi_network_new(1, of_network.widths, of_network.weight, of_network.bias, of_network.w_out, 0);
  refuses("mdmi_score_pairs", score_pairs,
          with_common({{"u", overflowing},
                       {"network", [](Arguments& a) { a.network = nullptr; }},
                       {"u", [](Arguments& a) { a.u = nullptr; }},
                       {"v", [](Arguments& a) { a.v = nullptr; }},
                       {"v", [](Arguments& a) { a.v = one_byte_on(a.v); }},
                       {"scores", [](Arguments& a) { a.scores = nullptr; }},
                       {"symmetry", [](Arguments& a) { a.symmetry = 3; }},
                       {"combine", [](Arguments& a) { a.combine = -1; }},
                       {"activation", [](Arguments& a) { a.activation = 2; }}}),
          network);
  const float shift[] = {0.5f, 1.0f};
  std::vector<int32_t> relation(size_t(kN * kN), 1);
  const auto shift_refused = [&](mdmi_network* of, int64_t count, const float* by, int64_t n, const int32_t* where,
                                 const char* argument) {
    const std::string what = std::string("mdmi_network_shift refuses a bad ") + argument;
    expect(mdmi_network_shift(of, count, by, n, where) == -1, what);
    expect(std::string(mdmi_last_error()).find(std::string("mdmi_network_shift: ") + argument) == 0, what + " by name");
  };
  expect(mdmi_network_shift(network, 2, shift, kN, relation.data()) == 0, "a relation");
  shift_refused(nullptr, 2, shift, kN, nullptr, "network");
  shift_refused(network, -1, shift, kN, nullptr, "count");
  shift_refused(network, 2, nullptr, kN, nullptr, "shift");
  shift_refused(network, 2, shift, -1, relation.data(), "n");
  shift_refused(network, 2, shift, kN, one_byte_on(relation.data()), "relation");
  shift_refused(network, 1, shift, kN, relation.data(), "relation");
  Arguments longer;
  longer.network = network;
  longer.n = kN - 1;
  expect(score_pairs(longer) == -1, "a relation of other positions");
  expect(mdmi_network_shift(network, 0, nullptr, 0, nullptr) == 0, "no shift any more");
  expect(score_pairs(longer) == 0, "positions without a relation");
  mdmi_network_free(network);
  mdmi_network_free(nullptr);

  // Without elements, arrays may be NULL; an infinite budget takes everything.
  expect(mdmi_select_budget(0, 0, nullptr, nullptr, nullptr, nullptr, 1, 1, 0, 0, nullptr, nullptr, 1) == 0, "no rows");
  expect(mdmi_token_stats(nullptr, 0, 5, nullptr, nullptr, nullptr, 1) == 0, "no logits");
  Arguments unlimited;
  unlimited.doubles = {inf, inf};
  unlimited.gamma = unlimited.doubles.data();
  unlimited.bytes.assign(unlimited.bytes.size(), 0);
  expect(select_budget(unlimited) == 0, "an infinite budget");
  for (int64_t i = 0; i < kBatch * kN; ++i) expect(unlimited.selected[i] == 1, "an infinite budget takes everything");
}
