"""What is no argument of an op is refused by an error that names the op and the argument, whatever it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mdmi_fast
from mdmi_fast import (
    Confidence,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Probing,
    Random,
    Schedule,
    Sequential,
    TopK,
    ops,
)
from mdmi_fast.decoding.policies import AttentionGraph, Coloring, ConfidenceBudget, ConfidenceFactor, Stability

X, BASE, W = torch.rand(3, 2, 4), torch.rand(2, 4), torch.rand(3, 2)
H, MI, BAND, U = torch.rand(2), torch.rand(2, 2), torch.rand(2, 3), torch.rand(2, 4)
NETWORK = {"weights": [torch.rand(4, 3)], "biases": [torch.rand(3)], "w_out": torch.rand(3), "b_out": torch.tensor(0.5)}
MASK = torch.tensor([True, True])
CALLS: dict[str, dict[str, Any]] = {
    "entropy": {"logits": BASE},
    "token_stats": {"logits": BASE},
    "linear_token_stats": {"hidden": BASE, "weight": torch.rand(5, 4), "bias": torch.rand(5)},
    "kl_divergence": {"p_logits": BASE, "q_logits": BASE},
    "expected_entropy": {"logits": X, "weights": W},
    "expected_kl": {"logits": X, "weights": W, "base_logits": BASE},
    "mixture_entropy": {"logits": X, "weights": W},
    "mixture_stats": {"logits": X, "weights": W, "base_logits": BASE},
    "mlp": {"x": U, "weights": NETWORK["weights"], "biases": NETWORK["biases"]},
    "pairwise_mlp": {"u": U, "v": U, **NETWORK, "mask": MASK},
    "pairwise_mlp_rows": {"u": U, "v": U, **NETWORK, "rows": torch.tensor([0]), "mask": MASK},
    "pairwise_mlp_band": {"u": U, "v": U, **NETWORK, "window": 1, "mask": MASK},
    "prepare_pairwise": NETWORK,
    "select_budget": {"entropy": H, "mi": MI, "gamma": torch.tensor(1.0), "mask": MASK},
    "select_budget_band": {"entropy": H, "band": BAND, "gamma": torch.tensor(1.0), "mask": MASK},
    "select_threshold": {"entropy": H, "mi": MI, "tau": 1.0, "mask": MASK},
    "color": {"mi": MI, "tau": 1.0, "mask": MASK},
    "score_and_select": {"entropy": H, "u": U, "v": U, **NETWORK, "gamma": torch.tensor(1.0), "mask": MASK},
}
OPERANDS = [
    (op, name) for op, call in CALLS.items() for name, value in call.items() if not isinstance(value, int | float)
]


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


# PyTorch says that a layout is a prototype, and that quantised tensors will go
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        Tensor.to_sparse,
        lambda x: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1)),
        lambda x: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda x: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]).bool(),
        lambda x: torch.zeros(1).to_mkldnn(),
        quantized,
        lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.int32),
        lambda x: x.to(torch.float8_e5m2),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: None,
        lambda x: "x",
        lambda x: object,
    ],
    ids=[
        "coo",
        "csr",
        "nested",
        "jagged",
        "nested-bool",
        "mkldnn",
        "quantized",
        "complex",
        "int",
        "float8",
        "numpy",
        "list",
        "none",
        "text",
        "class",
    ],
)
@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_what_is_no_dense_tensor_of_the_right_dtype_is_a_type_error(op: str, name: str, kind: Callable) -> None:
    call = CALLS[op]
    value = call[name]
    wrong = [kind(value[0])] if isinstance(value, list) else kind(value)
    if (name in ("mask", "bias") and wrong is None) or (isinstance(wrong, float) and name in ("gamma", "b_out")):
        pytest.skip("which is one of the values it may have")
    with pytest.raises(TypeError, match=rf"^{op}: {name}(\[0\])? must be "):
        getattr(ops, op)(**{**call, name: wrong})


NUMBERS = [
    ("select_budget", "gamma"),
    ("select_budget", "lam"),
    ("select_budget", "entropy_weight"),
    ("select_budget_band", "gamma"),
    ("select_budget_band", "lam"),
    ("select_threshold", "tau"),
    ("color", "tau"),
    ("score_and_select", "gamma"),
    ("score_and_select", "entropy_weight"),
    ("pairwise_mlp", "b_out"),
]


@pytest.mark.parametrize(
    "value",
    [True, None, "1", Fraction(1, 2), Decimal(1), np.float32(1), np.int64(1), np.array(1.0), [1.0] * 9999, 1j],
    ids=str,
)
@pytest.mark.parametrize(("op", "name"), NUMBERS)
def test_what_is_no_number_is_a_type_error(op: str, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{op}: {name} must be a number, got ") as caught:
        getattr(ops, op)(**{**CALLS[op], name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [math.nan, 10**400, 10**5000, np.float64("nan")], ids=["nan", "400", "5000", "numpy"])
@pytest.mark.parametrize(("op", "name"), NUMBERS)
def test_numbers_that_are_none_are_value_errors(op: str, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{op}: {name} must (not be NaN|be a number that float64 can hold)"):
        getattr(ops, op)(**{**CALLS[op], name: value})


@pytest.mark.parametrize("value", [-1, -0.5, -math.inf, -(10**30)], ids=str)
def test_negative_weights_and_budgets_are_value_errors(value: float) -> None:
    for op in ("select_budget", "select_budget_band", "score_and_select"):
        for name in ("gamma", "lam", "entropy_weight"):
            with pytest.raises(ValueError, match=rf"^{op}: {name} must be .*at least 0, got"):
                getattr(ops, op)(**{**CALLS[op], name: value})
        for name in ("lam", "entropy_weight"):
            with pytest.raises(ValueError, match=rf"^{op}: {name} must be finite"):
                getattr(ops, op)(**{**CALLS[op], name: math.inf})


def test_a_bias_that_its_dtype_cannot_hold_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="pairwise_mlp: b_out must be a number that float32 can hold, got 1e\\+300"):
        ops.pairwise_mlp(**{**CALLS["pairwise_mlp"], "b_out": 1e300})
    half = [x.half() for x in (NETWORK["weights"][0], NETWORK["biases"][0], NETWORK["w_out"], U)]
    got = ops.pairwise_mlp(half[3], half[3], half[:1], half[1:2], half[2], 1e5)  # beyond float16
    assert ((got[0, 1] - 1e5).abs() < 10).all()


@pytest.mark.op("select_budget", "select_budget_band", "select_threshold", "score_and_select")
@pytest.mark.parametrize("limit", [2, 3, 2**31, 2**32, 2**62, 2**63 - 1])
def test_a_limit_beyond_the_length_is_none(limit: int, backend: str) -> None:
    for op, options in (
        ("select_budget", {"gamma": 9.0}),
        ("select_budget_band", {"gamma": 9.0}),
        ("select_threshold", {"tau": 9.0}),
        ("score_and_select", {"gamma": 9.0}),
    ):
        call = {**CALLS[op], **options, "backend": backend}
        got, expected = getattr(ops, op)(**call, limit=limit), getattr(ops, op)(**call)
        assert torch.equal(got.selected, expected.selected)
        assert torch.equal(got.spent, expected.spent)


WHOLE = [(op, "limit") for op in ("select_budget", "select_budget_band", "select_threshold", "score_and_select")]
WHOLE.append(("pairwise_mlp_band", "window"))


@pytest.mark.parametrize(("op", "name"), WHOLE)
def test_whole_numbers_that_tensors_cannot_count_are_value_errors(op: str, name: str) -> None:
    for value in (2**63, 10**30, 10**5000):
        with pytest.raises(ValueError, match=rf"^{op}: {name} must be at most \d+, got 2\*\*\d+ or more"):
            getattr(ops, op)(**{**CALLS[op], name: value})
    for value in (-1, -(10**5000)):
        with pytest.raises(ValueError, match=rf"^{op}: {name} must be at least \d, got -"):
            getattr(ops, op)(**{**CALLS[op], name: value})
    for wrong in (True, 1.0, "1", np.int64(1), torch.tensor(1), Fraction(1)):
        with pytest.raises(TypeError, match=rf"^{op}: {name} must be an int, got "):
            getattr(ops, op)(**{**CALLS[op], name: wrong})


@pytest.mark.op("pairwise_mlp_band", "pairwise_mlp_band_backward")
def test_a_band_wider_than_the_sequence_costs_its_result_and_nothing_more(backend: str) -> None:
    for window in (2**31, 10**18):
        with pytest.raises(ValueError, match=f"pairwise_mlp_band: window must be at most 2147483647, got {window}"):
            ops.pairwise_mlp_band(U, U, *NETWORK.values(), window, backend=backend)
    u = U.clone().requires_grad_()
    band = ops.pairwise_mlp_band(u, u, *NETWORK.values(), 100_000, backend=backend)
    near = ops.pairwise_mlp_band(u, u, *NETWORK.values(), 1, backend=backend)
    assert torch.equal(band[:, 99_999:100_002], near)
    assert not band[:, :99_999].any()
    assert not band[:, 100_002:].any()
    (got,), (expected,) = torch.autograd.grad(band.sum(), u), torch.autograd.grad(near.sum(), u)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("wrong", [["cpp"], 1, b"cpp", torch.float32, True], ids=str)
def test_choices_are_text(wrong: Any) -> None:
    for op, name in [
        ("entropy", "backend"),
        ("pairwise_mlp", "combine"),
        ("pairwise_mlp", "symmetry"),
        ("pairwise_mlp", "activation"),
        ("pairwise_mlp", "precision"),
        ("select_budget", "order"),
        ("prepare_pairwise", "precision"),
    ]:
        with pytest.raises(TypeError, match=rf"^{op}: {name} must be one of '"):
            getattr(ops, op)(**{**CALLS[op], name: wrong})


@pytest.mark.parametrize("wrong", [["cpp"], [], 1, 0, False, b"cpp", ""], ids=repr)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("op", ["entropy", "kl_divergence", "mlp", "pairwise_mlp", "select_budget"])
def test_a_backend_is_named_or_none_also_where_torch_follows_gradients(op: str, gradient: bool, wrong: Any) -> None:
    arguments = {
        name: x.clone().requires_grad_(gradient) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in CALLS[op].items()
    }
    with pytest.raises(ValueError if wrong == "" else TypeError, match=rf"^{op}: backend must be one of '"):
        getattr(ops, op)(**{**arguments, "backend": wrong})


@pytest.mark.parametrize("name", ["weights", "biases"])
@pytest.mark.parametrize(
    "wrong", [None, 5, torch.tensor(1.0), (x for x in ())], ids=["None", "int", "tensor", "iterator"]
)
def test_layers_are_a_sequence_beside_prepared_weights_too(name: str, wrong: Any) -> None:
    prepared = ops.prepare_pairwise(**NETWORK)
    arguments = {**CALLS["pairwise_mlp"], "prepared": prepared, name: wrong}
    with pytest.raises(TypeError, match=rf"^pairwise_mlp: {name} must be a sequence of tensors, got "):
        ops.pairwise_mlp(**arguments)


@pytest.mark.parametrize("op", ["select_budget", "select_budget_band", "score_and_select"])
def test_budgets_without_values_are_refused(op: str) -> None:
    lead = CALLS[op]["entropy"].shape[:-1]
    gamma = torch.empty(lead, device="meta")
    with pytest.raises(ValueError, match=rf"^{op}: gamma must have values, got shape .* on meta"):
        getattr(ops, op)(**{**CALLS[op], "gamma": gamma})


def test_threads_are_counted_in_32_bits() -> None:
    with pytest.raises(ValueError, match="set_num_threads: n must be at most 2147483647, got 2147483648"):
        mdmi_fast.set_num_threads(2**31)


STATS = ops.token_stats(torch.tensor([[[3.0, 0.0], [1.0, 0.0], [0.5, 0.0]]]))
THREE = torch.tensor([[True, True, True]])


def given(hidden: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(1, 3, 3)


def test_policies_take_whole_numbers_of_any_size_that_tensors_count() -> None:
    for policy in (
        TopK(2**63 - 1),
        Random(2**62),
        MIBudget(given, 9, limit=2**63 - 1, mi_min_masked=2**62, mi_max_masked=2**63 - 1),
        MIThreshold(given, 10**300, limit=2**63 - 1, mi_max_masked=2**62),
        EntropyBound(10**300),
        ConfidenceBudget(2**70),
        ConfidenceFactor(2**70),
    ):
        assert policy.select(STATS, torch.zeros(1, 3, 1), THREE, 0).selected.all()
    assert Confidence(2**70).select(STATS, None, THREE, 0).selected.sum() == 1
    for make in (TopK, Random):
        with pytest.raises(ValueError, match=f"^{make.__name__}: k must be at most"):
            make(2**63)
    for name in ("limit", "mi_min_masked", "mi_max_masked"):
        with pytest.raises(ValueError, match=f"^MIBudget: {name} must be at most"):
            MIBudget(given, 1.0, **{name: 2**63})


@pytest.mark.parametrize(
    "value", [True, None, "1", Fraction(1, 2), np.float32(1), [1.0], 1j, torch.zeros(1).bool()], ids=str
)
def test_limits_of_policies_are_numbers(value: Any) -> None:
    for make, name in [
        (Confidence, "threshold"),
        (ConfidenceFactor, "factor"),
        (ConfidenceBudget, "epsilon"),
        (EntropyBound, "gamma"),
        (lambda x: Stability(x), "kl"),
        (AttentionGraph, "tau"),
        (lambda x: MIBudget(given, x), "gamma"),
        (lambda x: MIThreshold(given, x), "tau"),
        (lambda x: Coloring(given, x), "tau"),
        (lambda x: Probing(epsilon=x), "epsilon"),
        (lambda x: Schedule(x, 0.0), "start"),
    ]:
        with pytest.raises(TypeError, match=f"^[A-Za-z]+: {name} must be "):
            make(value)


def test_limits_of_each_sequence_are_dense_numbers() -> None:
    for wrong in (torch.tensor([1j]), torch.tensor([1.0]).to_sparse(), torch.tensor([True])):
        with pytest.raises(TypeError, match=r"^EntropyBound: gamma must be "):
            EntropyBound(wrong)
    with pytest.raises(ValueError, match=r"^EntropyBound: gamma must be numbers of at least 0"):
        EntropyBound(torch.tensor([math.nan]))
    whole = EntropyBound(torch.tensor([1])).select(STATS, None, THREE, 0)
    assert torch.equal(whole.selected, EntropyBound(1.0).select(STATS, None, THREE, 0).selected)
    assert Sequential().select(STATS, None, THREE, 0).selected.sum() == 1


def test_statistics_of_a_pass_are_floating() -> None:
    for wrong in (STATS.entropy.long(), STATS.entropy.to(torch.complex64), STATS.entropy.to_sparse()):
        with pytest.raises(TypeError, match=r"^EntropyBound: stats.entropy must be "):
            EntropyBound(1.0).select(STATS._replace(entropy=wrong), None, THREE, 0)
