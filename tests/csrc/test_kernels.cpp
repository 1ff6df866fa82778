// The cores against straightforward double precision code, for every table of kernels that can run here. Built with the
// address and undefined-behaviour sanitizers by tests/test_native.py, which expects exit code 0.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/pairwise.hpp"
#include "drivers/pairwise_backward.hpp"
#include "drivers/score_and_select.hpp"
#include "drivers/select.hpp"
#include "drivers/stats.hpp"
#include "drivers/threads.hpp"

namespace mdmi {

extern const Kernels kernels_wide;

namespace {
const Kernels* current = &kernels_scalar;
}

// Instead of csrc/cpu.cpp: the test chooses.
const Kernels& kernels() { return *current; }

}  // namespace mdmi

namespace {

using mdmi::Dtype;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();
std::mt19937 generator(0);

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s: %s\n", mdmi::kernels().isa, what.c_str());
  std::exit(1);
}

void expect_near(double got, double expected, double tolerance, const std::string& what) {
  const bool same = std::isnan(expected) ? std::isnan(got) : got == expected || std::abs(got - expected) <= tolerance;
  expect(same, what + ": got " + std::to_string(got) + ", expected " + std::to_string(expected));
}

Floats normal(int64_t n, double scale = 1.0) {
  std::normal_distribution<double> distribution(0.0, scale);
  Floats x(static_cast<size_t>(n));
  for (float& value : x) value = float(distribution(generator));
  return x;
}

bool coin() { return generator() & 1u; }

Doubles softmax(const float* x, int64_t n) {
  double top = -kInf, sum = 0.0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, double(x[i]));
  Doubles p(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) sum += p[size_t(i)] = std::exp(double(x[i]) - top);
  for (double& value : p) value /= sum;
  return p;
}

double entropy(const Doubles& p) {
  double h = 0.0;
  for (double value : p) h -= value > 0.0 ? value * std::log(value) : 0.0;
  return h;
}

void test_stats(int64_t width) {
  constexpr int64_t kRows = 19;
  Floats x = normal(kRows * width, 3.0);
  for (float& value : x)
    if (generator() % 5 == 0) value = -float(kInf);
  for (int64_t row = 0; row < kRows; ++row) x[size_t(row * width)] = 0.5f;  // no row of nothing but -inf
  Floats h(kRows), lse(kRows), confidence(kRows), margin(kRows);
  std::vector<int64_t> token(kRows);
  mdmi::StatsOut out;
  out.entropy = h.data(), out.logsumexp = lse.data(), out.confidence = confidence.data(), out.margin = margin.data();
  out.token = token.data();
  const mdmi::Rows rows{x.data(), Dtype::f32, kRows, 0, width};
  mdmi::row_stats(rows, kRows, width, out, 2);
  for (int64_t row = 0; row < kRows; ++row) {
    Doubles p = softmax(x.data() + row * width, width);
    expect_near(h[size_t(row)], entropy(p), 1.5e-6, "entropy of " + std::to_string(width));
    const int64_t best = std::max_element(p.begin(), p.end()) - p.begin();
    expect(token[size_t(row)] == best, "token");
    expect_near(confidence[size_t(row)], p[size_t(best)], 1e-6, "confidence");
    const double top = p[size_t(best)];
    p[size_t(best)] = 0.0;
    expect_near(margin[size_t(row)], top - *std::max_element(p.begin(), p.end()), 1e-6, "margin");
  }
  // A second tensor as two alternatives of one mixture, with KL to the first.
  const Floats y = normal(2 * kRows * width);
  const Doubles weights = [] {
    Doubles w(2 * kRows);
    for (int64_t row = 0; row < kRows; ++row) w[size_t(row)] = 0.25, w[size_t(kRows + row)] = 0.75;
    return w;
  }();
  const mdmi::Stack stack{{y.data(), Dtype::f32, kRows, 0, width}, 2, kRows * width, kRows, weights.data()};
  Floats mixture(kRows), expected(kRows), kl(kRows), from_mixture(kRows);
  mdmi::stack_stats(stack, nullptr, width, {mixture.data(), from_mixture.data(), nullptr}, 2);
  mdmi::stack_stats(stack, nullptr, width, {nullptr, expected.data(), nullptr}, 2);
  mdmi::stack_stats(stack, &rows, width, {nullptr, nullptr, kl.data()}, 2);
  for (int64_t row = 0; row < kRows; ++row) {
    const Doubles a = softmax(y.data() + row * width, width), b = softmax(y.data() + (kRows + row) * width, width);
    const Doubles base = softmax(x.data() + row * width, width);
    Doubles mixed(static_cast<size_t>(width));
    double divergence = 0.0;
    for (size_t i = 0; i < mixed.size(); ++i) {
      mixed[i] = 0.25 * a[i] + 0.75 * b[i];
      divergence += 0.25 * a[i] * std::log(a[i] / base[i]) + 0.75 * b[i] * std::log(b[i] / base[i]);
    }
    expect_near(mixture[size_t(row)], entropy(mixed), 3e-6, "mixture entropy");
    expect_near(expected[size_t(row)], 0.25 * entropy(a) + 0.75 * entropy(b), 3e-6, "expected entropy");
    expect_near(from_mixture[size_t(row)], expected[size_t(row)], 3e-6, "expected entropy beside the mixture's");
    expect_near(kl[size_t(row)], divergence, 2e-5, "expected KL");
  }
  Floats d_logits(y.size()), d_base(x.size());
  const Doubles grad(kRows, 1.0);
  mdmi::expected_kl_backward(stack, rows, width, grad.data(), {d_logits.data(), Dtype::f32},
                             {d_base.data(), Dtype::f32}, 2);
  mdmi::mixture_entropy_backward(stack, width, grad.data(), {d_logits.data(), Dtype::f32}, 2);
  for (float value : d_logits) expect(std::isfinite(value), "gradient of the mixture entropy");
}

struct Net {
  std::vector<int64_t> widths;
  std::vector<Floats> weights, biases;
  Floats w_out;
  float b_out = -0.3f;

  explicit Net(std::vector<int64_t> w) : widths(std::move(w)) {
    for (size_t k = 0; k + 1 < widths.size(); ++k) {
      weights.push_back(normal(widths[k] * widths[k + 1], 1.0 / std::sqrt(double(widths[k]))));
      biases.push_back(normal(widths[k + 1]));
    }
    w_out = normal(widths.back(), 1.0 / std::sqrt(double(widths.back())));
  }

  mdmi::NetworkWeights view(bool bf16) const {
    mdmi::NetworkWeights view{{}, w_out.data(), widths.back(), b_out, bf16};
    for (size_t k = 0; k < weights.size(); ++k)
      view.layers.push_back({weights[k].data(), biases[k].data(), widths[k], widths[k + 1]});
    return view;
  }
};

struct Dual {  // a number and its slope along one direction
  double value = 0.0, slope = 0.0;
};
Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
Dual operator*(Dual a, Dual b) { return {a.value * b.value, a.slope * b.value + a.value * b.slope}; }
Dual relu(Dual a) { return a.value > 0.0 ? a : Dual(); }

// A network and a direction in which all its numbers move.
struct Moving {
  const Net &net, &direction;

  Dual score(const float* u, const float* du, const float* v, const float* dv, const mdmi::PairRule& rule) const {
    std::vector<Dual> z(static_cast<size_t>(net.widths[0]));
    for (size_t h = 0; h < z.size(); ++h) {
      const Dual left{u[h], du[h]}, right{v[h], dv[h]};
      z[h] = rule.multiply ? left * right : relu(left + right);
    }
    for (size_t k = 0; k < net.weights.size(); ++k) {
      std::vector<Dual> next(net.biases[k].size());
      for (size_t c = 0; c < next.size(); ++c) {
        next[c] = {net.biases[k][c], direction.biases[k][c]};
        for (size_t h = 0; h < z.size(); ++h) {
          const size_t at = h * next.size() + c;
          next[c] = next[c] + z[h] * Dual{net.weights[k][at], direction.weights[k][at]};
        }
        next[c] = relu(next[c]);
      }
      z = next;
    }
    Dual f{net.b_out, direction.b_out};
    for (size_t h = 0; h < z.size(); ++h) f = f + z[h] * Dual{net.w_out[h], direction.w_out[h]};
    if (rule.softplus) f = {std::log1p(std::exp(f.value)), f.slope / (1.0 + std::exp(-f.value))};
    return f;
  }

  std::vector<Dual> score_everything(const Floats& u, const Floats& du, const Floats& v, const Floats& dv, int64_t n,
                                     const mdmi::PairRule& rule, const std::vector<uint8_t>& mask) const {
    std::vector<Dual> out(static_cast<size_t>(n * n));
    const auto f = [&](int64_t i, int64_t j) {
      const int64_t left = i * net.widths[0], right = j * net.widths[0];
      return score(u.data() + left, du.data() + left, v.data() + right, dv.data() + right, rule);
    };
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) {
        if (i == j || !mask[size_t(i)] || !mask[size_t(j)]) continue;
        Dual& to = out[size_t(i * n + j)];
        if (rule.symmetry == mdmi::Symmetry::none) to = f(i, j);
        if (rule.symmetry == mdmi::Symmetry::mean) to = Dual{0.5, 0.0} * (f(i, j) + f(j, i));
        if (rule.symmetry == mdmi::Symmetry::upper) to = f(std::min(i, j), std::max(i, j));
      }
    return out;
  }
};

void test_pairs(const std::vector<int64_t>& widths, mdmi::Symmetry symmetry, bool equal_halves) {
  constexpr int64_t kN = 17, kWindow = 4;
  const Net net(widths);
  const mdmi::PairRule rule{symmetry, coin(), coin()};
  const int64_t width = widths[0];
  const Floats u = normal(kN * width), v = equal_halves ? u : normal(kN * width);
  std::vector<uint8_t> mask(kN);
  for (uint8_t& m : mask) m = generator() % 4 != 0;
  const float* const right = equal_halves ? u.data() : v.data();
  const mdmi::Halves halves{u.data(), right, Dtype::f32, Dtype::f32, kN * width,  width, kN * width,
                            width,    1,     kN,         width,      mask.data(), kN,    1};
  const Net direction(widths);
  const Floats u_direction = normal(kN * width), v_direction = normal(kN * width);
  const std::vector<Dual> expected =
      Moving{net, direction}.score_everything(u, u_direction, v, v_direction, kN, rule, mask);
  const mdmi::NetworkWeights weights = net.view(false);
  const mdmi::PackedNetwork packed(weights.layers, weights.w_out, weights.last_width, weights.b_out, false);
  Floats all(kN * kN, NAN), again(kN * kN, NAN), rows(3 * kN, NAN), band(kN * (2 * kWindow + 1), NAN);
  mdmi::score_all(packed, halves, rule, all.data(), 1);
  mdmi::score_all(packed, halves, rule, again.data(), 3);
  expect(all == again, "scores do not depend on the number of threads");
  for (size_t k = 0; k < all.size(); ++k) expect_near(all[k], expected[k].value, 2e-5, "score");
  const int64_t wanted[3] = {5, -1, 16};
  mdmi::score_rows(packed, halves, rule, wanted, 3, rows.data(), 2);
  mdmi::score_band(packed, halves, rule, kWindow, band.data(), 2);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t j = 0; j < kN; ++j)
      expect(rows[size_t(r * kN + j)] == (wanted[r] < 0 ? 0.0f : all[size_t(wanted[r] * kN + j)]), "row of scores");
  for (int64_t i = 0; i < kN; ++i)
    for (int64_t d = -kWindow; d <= kWindow; ++d) {
      const int64_t j = i + d;
      const float want = j < 0 || j >= kN ? 0.0f : all[size_t(i * kN + j)];
      expect(band[size_t(i * (2 * kWindow + 1) + kWindow + d)] == want, "band of scores");
    }

  // Lazy selection against selection on all scores.
  const Floats entropies = normal(kN);
  const double gamma = 1.5;
  const mdmi::Positions positions{1, kN, entropies.data(), Dtype::f32, kN, 1, mask.data(), kN, 1};
  const mdmi::BudgetRule budget{&gamma, 0.5, 1.0, false, 1000};
  std::vector<uint8_t> selected(kN), lazily(kN);
  double spent = 0.0, spent_lazily = 0.0;
  mdmi::select_budget("select_budget", positions, {all.data(), Dtype::f32, kN * kN, kN, 1}, budget, selected.data(),
                      &spent, 1);
  mdmi::score_and_select(packed, halves, rule, positions, budget, lazily.data(), &spent_lazily, 2);
  expect(selected == lazily && spent == spent_lazily, "score_and_select");

  // The gradient along the direction.
  const Floats grad = normal(kN * kN);
  std::vector<Floats> d_weights, d_biases;
  mdmi::PairGradients out{};
  Floats du(u.size()), dv(v.size()), d_w_out(net.w_out.size());
  float d_b_out = 0.0f;
  for (const Floats& w : net.weights) d_weights.emplace_back(w.size());
  for (const Floats& b : net.biases) d_biases.emplace_back(b.size());
  for (Floats& w : d_weights) out.weights.push_back(w.data());
  for (Floats& b : d_biases) out.biases.push_back(b.data());
  out.u = du.data(), out.v = dv.data(), out.w_out = d_w_out.data(), out.b_out = &d_b_out;
  mdmi::score_all_backward(weights, halves, rule, grad.data(), out, 1);
  const std::vector<Floats> alone = {du, dv, d_w_out};
  const std::vector<Floats> weights_alone = d_weights, biases_alone = d_biases;
  for (int threads : {2, 3, 4}) {
    mdmi::score_all_backward(weights, halves, rule, grad.data(), out, threads);
    expect(std::vector<Floats>({du, dv, d_w_out}) == alone && d_weights == weights_alone && d_biases == biases_alone,
           "gradients do not depend on the number of threads");
  }
  double slope = double(d_b_out) * double(direction.b_out), expected_slope = 0.0, size = 1.0;
  const auto add = [&](const Floats& gradient, const Floats& along) {
    for (size_t k = 0; k < gradient.size(); ++k) {
      slope += double(gradient[k]) * double(along[k]);
      size += std::abs(double(gradient[k]) * double(along[k]));
    }
  };
  for (size_t k = 0; k < net.weights.size(); ++k) {
    add(d_weights[k], direction.weights[k]);
    add(d_biases[k], direction.biases[k]);
  }
  add(d_w_out, direction.w_out);
  add(du, u_direction);
  add(dv, v_direction);
  for (size_t k = 0; k < expected.size(); ++k) expected_slope += double(grad[k]) * expected[k].slope;
  expect_near(slope, expected_slope, 1e-5 * size, "gradient");
}

// What fills up a row or a vector must not meet an infinity: whatever the width, one inf in u makes its scores inf.
void test_infinities(const std::vector<int64_t>& widths, bool bf16) {
  Net net(widths);
  for (Floats& w : net.weights) w.assign(w.size(), 0.5f);
  net.w_out.assign(net.w_out.size(), 1.0f);
  const int64_t width = widths[0];
  Floats u(static_cast<size_t>(3 * width), 0.0f), v = u, scores(9);
  u[size_t(width + width / 2)] = float(kInf);
  const mdmi::Halves halves{u.data(), v.data(), Dtype::f32, Dtype::f32, 3 * width, width, 3 * width,
                            width,    1,        3,          width,      nullptr,   0,     0};
  const mdmi::NetworkWeights view = net.view(bf16);
  const mdmi::PackedNetwork packed(view.layers, view.w_out, view.last_width, view.b_out, bf16);
  mdmi::score_all(packed, halves, {mdmi::Symmetry::none, false, false}, scores.data(), 1);
  for (int64_t j : {0, 2}) {
    expect_near(scores[size_t(3 + j)], kInf, 0.0, "score of an infinite state");
    expect(std::isfinite(scores[size_t(3 * j + 2 - j)]), "score beside an infinite state");
  }
}

// Logits as far apart as float32 allows: the divergence is as large as they are, and inf only beyond float32.
void test_distant_logits(int64_t width) {
  const float lowest = std::numeric_limits<float>::lowest();
  Floats p(size_t(2 * width), 0.0f), q(size_t(2 * width), lowest);
  q[0] = 0.0f;                 // the first row: KL = (1 - 1 / width) |lowest|
  q[size_t(width)] = -lowest;  // the second: twice as much, which is inf from three logits on
  Floats kl(2), d_p(p.size()), d_q(q.size());
  const mdmi::Rows base{q.data(), Dtype::f32, 2, 0, width};
  const mdmi::Stack stack{{p.data(), Dtype::f32, 2, 0, width}, 1, 2 * width, 2, nullptr};
  mdmi::stack_stats(stack, &base, width, {nullptr, nullptr, kl.data()}, 1);
  const double share = 1.0 - 1.0 / double(width), top = -double(lowest);
  expect_near(kl[0], share * top, 1e-6 * top, "divergence of distant logits");
  expect_near(kl[1], 2.0 * share <= 1.0 ? 2.0 * share * top : kInf, 1e-6 * top, "divergence of opposite logits");
  const Doubles grad(2, 1.0);
  mdmi::expected_kl_backward(stack, base, width, grad.data(), {d_p.data(), Dtype::f32}, {d_q.data(), Dtype::f32}, 1);
  for (float value : d_p) expect(std::isfinite(value), "gradient of distant logits");
  // p_0 (log p_0 / q_0 - KL) with log p_0 / q_0 = -log width
  expect_near(d_p[0], -share / double(width) * top, 1e-6 * top, "gradient of the first logit");
}

void test_selection_errors() {
  const float nan = std::nanf("");
  const Floats entropies = {0.1f, 0.2f, 0.3f};
  Floats mi(9, 0.0f);
  mi[0] = nan;  // the diagonal is never read
  const double gamma = 1.0;
  std::vector<uint8_t> selected(3);
  double spent = 0.0;
  const mdmi::Positions positions{1, 3, entropies.data(), Dtype::f32, 3, 1, nullptr, 0, 0};
  const mdmi::BudgetRule rule{&gamma, 1.0, 1.0, false, 1000};
  mdmi::select_budget("select_budget", positions, {mi.data(), Dtype::f32, 9, 3, 1}, rule, selected.data(), &spent, 1);
  expect(selected == std::vector<uint8_t>({1, 1, 1}), "selection");
  mi[5] = nan;
  try {
    mdmi::select_budget("select_budget", positions, {mi.data(), Dtype::f32, 9, 3, 1}, rule, selected.data(), &spent, 1);
    expect(false, "NaN was accepted");
  } catch (const std::invalid_argument& error) {
    expect(std::string(error.what()).find("positions 1 and 2") != std::string::npos, error.what());
  }
}

void test_threads() {
  std::vector<int> done(1000, 0);
  mdmi::parallel_for(1000, 3, [&](int64_t task, int) {
    int inner = 0;
    mdmi::parallel_for(3, 3, [&](int64_t, int) { ++inner; });  // a nested call runs on its caller alone
    done[size_t(task)] += inner;
  });
  expect(done == std::vector<int>(1000, 3), "every task runs once");
  bool caught = false;
  try {
    mdmi::parallel_for(10, 2, [](int64_t task, int) {
      if (task == 7) throw std::invalid_argument("seven");
    });
  } catch (const std::invalid_argument&) {
    caught = true;
  }
  expect(caught, "an exception of a task reaches the caller");
}

void test_table(const mdmi::Kernels& table) {
  mdmi::current = &table;
  for (int64_t width : {1, 2, 7, 16, 33, 128, 129, 1025, 3000}) test_stats(width);
  const std::vector<std::vector<int64_t>> networks = {{1},       {20},        {7, 1},       {33, 16},
                                                      {100, 33}, {16, 17, 5}, {8, 40, 3, 2}};
  for (const auto& widths : networks)
    for (mdmi::Symmetry symmetry : {mdmi::Symmetry::none, mdmi::Symmetry::mean, mdmi::Symmetry::upper})
      for (bool equal_halves : {false, true}) test_pairs(widths, symmetry, equal_halves);
  for (const auto& widths : std::vector<std::vector<int64_t>>{{4, 8}, {3, 5}, {4, 8, 7, 3}, {33, 17, 40}, {2}})
    for (bool bf16 : {false, true}) test_infinities(widths, bf16);
  for (int64_t width : {2, 4, 33, 129, 1100}) test_distant_logits(width);
  test_selection_errors();
}

}  // namespace

void test_c_api();

int main() {
  test_threads();
  test_c_api();
  test_table(mdmi::kernels_scalar);
  test_table(mdmi::kernels_wide);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) test_table(mdmi::kernels_avx2);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) test_table(mdmi::kernels_avx512);
#elif defined(__aarch64__)
  test_table(mdmi::kernels_neon);
#endif
  std::puts("passed");
}
