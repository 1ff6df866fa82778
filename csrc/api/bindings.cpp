// The only file that knows Python. Tensors arrive as addresses: mdmi_fast/native keeps them alive during a call and has
// checked shapes; no Python object is touched while the GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/mlp.hpp"
#include "drivers/pairwise.hpp"
#include "drivers/pairwise_backward.hpp"
#include "drivers/score_and_select.hpp"
#include "drivers/select.hpp"
#include "drivers/stats.hpp"
#include "tasks/sudoku.hpp"

namespace py = pybind11;
using mdmi::Dtype;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Strides2 = std::tuple<int64_t, int64_t>;
using Strides3 = std::tuple<int64_t, int64_t, int64_t>;

mdmi::Positions positions(std::tuple<int64_t, int64_t> shape, uintptr_t entropy, int dtype, Strides2 entropy_strides,
                          uintptr_t mask, Strides2 mask_strides) {
  return {std::get<0>(shape),     std::get<1>(shape),           pointer<void>(entropy),
          Dtype(dtype),           std::get<0>(entropy_strides), std::get<1>(entropy_strides),
          pointer<uint8_t>(mask), std::get<0>(mask_strides),    std::get<1>(mask_strides)};
}

mdmi::MiMatrix matrix(uintptr_t mi, int dtype, Strides3 strides) {
  return {pointer<void>(mi), Dtype(dtype), std::get<0>(strides), std::get<1>(strides), std::get<2>(strides)};
}

// A tensor of rows: address, dtype code, (inner, outer stride, inner stride).
using RowsIn = std::tuple<uintptr_t, int, Strides3>;
// The same with (count, stride between alternatives, rows of one) and the address of the weights.
using StackIn = std::tuple<RowsIn, Strides3, uintptr_t>;
using Out = std::tuple<uintptr_t, int>;

mdmi::Rows rows(const RowsIn& in) {
  const auto& [data, dtype, layout] = in;
  return {pointer<void>(data), Dtype(dtype), std::get<0>(layout), std::get<1>(layout), std::get<2>(layout)};
}

mdmi::Stack stack(const StackIn& in) {
  const auto& [first, layout, weights] = in;
  return {rows(first), std::get<0>(layout), std::get<1>(layout), std::get<2>(layout), pointer<double>(weights)};
}

mdmi::RowsOut rows_out(Out out) { return {pointer<void>(std::get<0>(out)), Dtype(std::get<1>(out))}; }

mdmi::StatsOut stats_out(const std::array<uintptr_t, 5>& out) {
  mdmi::StatsOut to;
  to.entropy = pointer<float>(out[0]);
  to.logsumexp = pointer<float>(out[1]);
  to.confidence = pointer<float>(out[2]);
  to.token = pointer<int64_t>(out[3]);
  to.margin = pointer<float>(out[4]);
  return to;
}

// u, v as (address, dtype code, strides), then (batch, n, width) and the mask.
using HalfIn = std::tuple<uintptr_t, int, Strides2>;
using HalvesIn = std::tuple<HalfIn, HalfIn, std::tuple<int64_t, int64_t, int64_t>, uintptr_t, Strides2>;
using RuleIn = std::tuple<int, bool, bool>;  // symmetry, multiply, softplus

mdmi::Halves halves(const HalvesIn& in) {
  const auto& [u, v, shape, mask, mask_strides] = in;
  const auto& [u_data, u_dtype, u_strides] = u;
  const auto& [v_data, v_dtype, v_strides] = v;
  return {pointer<void>(u_data),     pointer<void>(v_data),    Dtype(u_dtype),         Dtype(v_dtype),
          std::get<0>(u_strides),    std::get<1>(u_strides),   std::get<0>(v_strides), std::get<1>(v_strides),
          std::get<0>(shape),        std::get<1>(shape),       std::get<2>(shape),     pointer<uint8_t>(mask),
          std::get<0>(mask_strides), std::get<1>(mask_strides)};
}

mdmi::PairRule pair_rule(const RuleIn& in) {
  return {mdmi::Symmetry(std::get<0>(in)), std::get<1>(in), std::get<2>(in)};
}

// Layers as (weight, bias, in, out), then w_out, its width, b_out, whether operands are bfloat16.
using WeightsIn =
    std::tuple<std::vector<std::tuple<uintptr_t, uintptr_t, int64_t, int64_t>>, uintptr_t, int64_t, float, bool>;
using GradientsOut =
    std::tuple<uintptr_t, uintptr_t, std::vector<uintptr_t>, std::vector<uintptr_t>, uintptr_t, uintptr_t>;

mdmi::NetworkWeights network_weights(const WeightsIn& in) {
  const auto& [layers, w_out, last_width, b_out, bf16] = in;
  mdmi::NetworkWeights weights{{}, pointer<float>(w_out), last_width, b_out, bf16};
  for (const auto& [weight, bias, rows, columns] : layers)
    weights.layers.push_back({pointer<float>(weight), pointer<float>(bias), rows, columns});
  return weights;
}

mdmi::PairGradients gradients(const GradientsOut& out) {
  const auto& [u, v, weights, biases, w_out, b_out] = out;
  mdmi::PairGradients to{pointer<float>(u), pointer<float>(v), {}, {}, pointer<float>(w_out), pointer<float>(b_out)};
  for (uintptr_t weight : weights) to.weights.push_back(pointer<float>(weight));
  for (uintptr_t bias : biases) to.biases.push_back(pointer<float>(bias));
  return to;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of mdmi_fast. Private: call mdmi_fast.ops.";

  m.def("isa", [] { return std::string(mdmi::kernels().isa); });
  m.def("supported_isas", &mdmi::supported_isas);
  m.def("fma_burst", [](int64_t rounds) {
    py::gil_scoped_release unlocked;
    return mdmi::kernels().fma_burst(rounds);
  });

  m.attr("no_window") = mdmi::kNoWindow;
  m.def("select_budget",
        [](const std::string& op, std::tuple<int64_t, int64_t> shape, uintptr_t entropy, int entropy_dtype,
           Strides2 entropy_strides, uintptr_t mask, Strides2 mask_strides, uintptr_t mi, int mi_dtype,
           Strides3 mi_strides, int64_t window, uintptr_t gamma, double lam, double entropy_weight, bool cheapest,
           int64_t limit, uintptr_t selected, uintptr_t spent, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::MiMatrix pairs = matrix(mi, mi_dtype, mi_strides);
          pairs.window = window;
          mdmi::select_budget(op.c_str(), positions(shape, entropy, entropy_dtype, entropy_strides, mask, mask_strides),
                              pairs, {pointer<double>(gamma), lam, entropy_weight, cheapest, limit},
                              pointer<uint8_t>(selected), pointer<double>(spent), threads);
        });
  m.def("select_threshold",
        [](std::tuple<int64_t, int64_t> shape, uintptr_t entropy, int entropy_dtype, Strides2 entropy_strides,
           uintptr_t mask, Strides2 mask_strides, uintptr_t mi, int mi_dtype, Strides3 mi_strides, double tau,
           int64_t limit, uintptr_t selected, uintptr_t spent, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::select_threshold(positions(shape, entropy, entropy_dtype, entropy_strides, mask, mask_strides),
                                 matrix(mi, mi_dtype, mi_strides), tau, limit, pointer<uint8_t>(selected),
                                 pointer<double>(spent), threads);
        });
  m.def("color", [](std::tuple<int64_t, int64_t> shape, uintptr_t mask, Strides2 mask_strides, uintptr_t mi,
                    int mi_dtype, Strides3 mi_strides, double tau, uintptr_t group, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::color(positions(shape, 0, 0, {0, 0}, mask, mask_strides), matrix(mi, mi_dtype, mi_strides), tau,
                pointer<int64_t>(group), threads);
  });
  m.def("mlp", [](const mdmi::PackedNetwork& network, uintptr_t x, int64_t rows, int64_t inner, int64_t outer_stride,
                  int64_t inner_stride, uintptr_t out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::mlp(network, {pointer<float>(x), rows, inner, outer_stride, inner_stride}, pointer<float>(out), threads);
  });
  m.attr("sudoku_weights") = mdmi::sudoku::kWeights;
  m.attr("sudoku_hidden") = mdmi::sudoku::kHidden;
  m.def("sudoku_forward", [](uintptr_t tokens, int64_t boards, uintptr_t weights, int iterations, uintptr_t codes,
                             uintptr_t logits, uintptr_t hidden, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::sudoku_forward(pointer<int64_t>(tokens), boards, pointer<float>(weights), iterations, pointer<float>(codes),
                         pointer<float>(logits), pointer<float>(hidden), threads);
  });

  m.attr("ROW_STATE_BYTES") = sizeof(mdmi::RowState);
  m.def("row_stats", [](RowsIn logits, int64_t n_rows, int64_t width, std::array<uintptr_t, 5> out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::row_stats(rows(logits), n_rows, width, stats_out(out), threads);
  });
  m.def("stats_backward",
        [](RowsIn logits, int64_t n_rows, int64_t width, std::array<uintptr_t, 4> grad, Out d_logits, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::stats_backward(
              rows(logits), n_rows, width,
              {pointer<double>(grad[0]), pointer<double>(grad[1]), pointer<double>(grad[2]), pointer<double>(grad[3])},
              rows_out(d_logits), threads);
        });
  m.def("new_states", [](uintptr_t states, int64_t n_rows) {
    std::fill_n(pointer<mdmi::RowState>(states), n_rows, mdmi::RowState());
  });
  m.def("absorb_tile",
        [](RowsIn tile, int64_t n_rows, int64_t width, int64_t first_token, uintptr_t states, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::absorb_tile(rows(tile), n_rows, width, first_token, pointer<mdmi::RowState>(states), threads);
        });
  m.def("finish_rows", [](uintptr_t states, int64_t n_rows, std::array<uintptr_t, 5> out) {
    py::gil_scoped_release unlocked;
    mdmi::finish_rows(pointer<mdmi::RowState>(states), n_rows, stats_out(out));
  });
  m.def("stack_stats", [](StackIn logits, RowsIn base, int64_t width, std::array<uintptr_t, 3> out, int threads) {
    py::gil_scoped_release unlocked;
    const mdmi::Rows base_rows = rows(base);
    mdmi::stack_stats(stack(logits), base_rows.data == nullptr ? nullptr : &base_rows, width,
                      {pointer<float>(out[0]), pointer<float>(out[1]), pointer<float>(out[2])}, threads);
  });
  m.def("expected_kl_backward",
        [](StackIn logits, RowsIn base, int64_t width, uintptr_t grad, Out d_logits, Out d_base, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::expected_kl_backward(stack(logits), rows(base), width, pointer<double>(grad), rows_out(d_logits),
                                     rows_out(d_base), threads);
        });
  m.def("mixture_entropy_backward", [](StackIn logits, int64_t width, uintptr_t grad, Out d_logits, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::mixture_entropy_backward(stack(logits), width, pointer<double>(grad), rows_out(d_logits), threads);
  });

  py::class_<mdmi::PackedNetwork>(m, "PackedNetwork").def(py::init([](const WeightsIn& in) {
    const mdmi::NetworkWeights weights = network_weights(in);
    return std::make_unique<mdmi::PackedNetwork>(weights.layers, weights.w_out, weights.last_width, weights.b_out,
                                                 weights.bf16);
  }));
  m.def("score_all",
        [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t out, int threads) {
          py::gil_scoped_release unlocked;
          mdmi::score_all(network, halves(in), pair_rule(rule), pointer<float>(out), threads);
        });
  m.def("score_rows", [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t rows,
                         int64_t n_rows, uintptr_t out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::score_rows(network, halves(in), pair_rule(rule), pointer<int64_t>(rows), n_rows, pointer<float>(out),
                     threads);
  });
  m.def("score_band", [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, int64_t window,
                         uintptr_t out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::score_band(network, halves(in), pair_rule(rule), window, pointer<float>(out), threads);
  });
  m.def("score_and_select",
        [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t entropy,
           int entropy_dtype, Strides2 entropy_strides, uintptr_t gamma, double lam, double entropy_weight,
           int64_t limit, uintptr_t selected, uintptr_t spent, int threads) {
          py::gil_scoped_release unlocked;
          const auto& [u, v, shape, mask, mask_strides] = in;
          const mdmi::Positions masked = positions({std::get<0>(shape), std::get<1>(shape)}, entropy, entropy_dtype,
                                                   entropy_strides, mask, mask_strides);
          return mdmi::score_and_select(network, halves(in), pair_rule(rule), masked,
                                        {pointer<double>(gamma), lam, entropy_weight, false, limit},
                                        pointer<uint8_t>(selected), pointer<double>(spent), threads);
        });
  m.def("score_all_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, uintptr_t grad,
                                 const GradientsOut& out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::score_all_backward(network_weights(weights), halves(in), pair_rule(rule), pointer<float>(grad),
                             gradients(out), threads);
  });
  m.def("score_rows_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, uintptr_t rows,
                                  int64_t n_rows, uintptr_t grad, const GradientsOut& out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::score_rows_backward(network_weights(weights), halves(in), pair_rule(rule), pointer<int64_t>(rows), n_rows,
                              pointer<float>(grad), gradients(out), threads);
  });
  m.def("score_band_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, int64_t window,
                                  uintptr_t grad, const GradientsOut& out, int threads) {
    py::gil_scoped_release unlocked;
    mdmi::score_band_backward(network_weights(weights), halves(in), pair_rule(rule), window, pointer<float>(grad),
                              gradients(out), threads);
  });
}
