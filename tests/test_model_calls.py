"""Every place that calls a model: answers that do not fit, modes and devices, and who decides what padding is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mdmi_fast import PairwiseMIEstimator, TopK, decode, label_mi, ops, train_estimator
from mdmi_fast.decoding import Step, calibrate
from mdmi_fast.estimator.data import examples, read_batch
from mdmi_fast.estimator.splits import shifted_states
from mdmi_fast.labels import FixedShare, LabelSet, Trajectory, UniformShare, write_labels
from mdmi_fast.labels.masking import Masking
from mdmi_fast.maps import mi_map
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.identity import describe_model, differences
from mdmi_fast.tasks.likelihood import surprise
from mdmi_fast.watch.audit import audit_position
from mdmi_fast.watch.guard import pseudo_likelihood

V, MASK, D = 6, 4, 3
TOKENS = torch.tensor([[MASK, MASK, 1, 5, 2, 0, MASK]])


class Answering:
    """Answers as it is told."""

    mask_token_id, vocab_size, hidden_size = MASK, V, D

    class tokenizer:  # noqa: N801 - an attribute of the model
        before = ()
        encode = staticmethod(lambda texts: torch.tensor([[1, 5, 2, 0]]))

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.answer(tokens)


def train(model: Any) -> Any:
    tokens = TOKENS.repeat(4, 1)
    tokens[:, 2] = torch.arange(4)  # states that are alike are not both trained on and held out
    labels = label_mi(Answering(fitting), tokens)
    estimator = PairwiseMIEstimator(D, layers=(4,))
    return train_estimator(estimator, model, LabelSet(tokens, tokens == MASK, labels.mi, labels.entropy), held_out=0.5)


def audit(model: Any) -> Any:
    def nothing(hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros(*mask.shape, mask.shape[1])

    step = Step(0, model=model, tokens=TOKENS)
    return audit_position(nothing, torch.zeros(*TOKENS.shape, D), TOKENS == MASK, step, 0, 0)


CALLERS: dict[str, Callable[[Any], Any]] = {
    "decode": lambda model: decode(model, TOKENS, TopK(1)),
    "label_mi": lambda model: label_mi(model, TOKENS),
    "train_estimator": train,
    "mi_map": lambda model: mi_map(model, TOKENS[0], estimator=lambda hidden, mask: torch.zeros(1, 7, 7)),
    "splits": lambda model: shifted_states(model, TOKENS),
    "Trajectory": lambda model: Trajectory()(model, torch.ones_like(TOKENS), [0]),
    "audit_position": audit,
    "guard": lambda model: pseudo_likelihood(model, torch.ones_like(TOKENS), TOKENS == MASK),
    "tune": lambda model: calibrate.log_likelihood(model)(torch.ones_like(TOKENS), TOKENS == MASK, torch.arange(1)),
    "surprise": lambda model: surprise(model, ["ABCD"], [range(4)]),
}


def fitting(tokens: Tensor) -> MaskedOutput:
    return MaskedOutput(torch.zeros(*tokens.shape, V), torch.zeros(*tokens.shape, D))


def _with(**changed: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda tokens: fitting(tokens)._replace(**{name: make(tokens) for name, make in changed.items()})


SIZE = r"\[B, N, V\] = \(\d+, \d, 6\), got shape"
MISFITS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "more tokens than the vocabulary": (
        _with(logits=lambda t: torch.zeros(*t.shape, 9)),
        ValueError,
        rf"logits of Answering must be {SIZE} \(\d+, \d, 9\)",
    ),
    "fewer tokens": (_with(logits=lambda t: torch.zeros(*t.shape, 4)), ValueError, rf"must be {SIZE} \(\d+, \d, 4\)"),
    "other positions": (_with(logits=lambda t: torch.zeros(len(t), 2, V)), ValueError, rf"{SIZE} \(\d+, 2, 6\)"),
    "other sequences": (_with(logits=lambda t: torch.zeros(99, t.shape[1], V)), ValueError, rf"{SIZE} \(99, \d, 6\)"),
    "no vocabulary": (_with(logits=lambda t: torch.zeros(t.shape)), ValueError, rf"{SIZE} \(\d+, \d\)"),
    "whole numbers": (_with(logits=lambda t: torch.zeros(*t.shape, V).long()), TypeError, "must be float64, .* int64"),
    "another device": (
        _with(logits=lambda t: torch.zeros(*t.shape, V, device="meta")),
        ValueError,
        "tensors must be on one device, got tokens on cpu and logits of Answering on meta",
    ),
    "an array": (_with(logits=lambda t: torch.zeros(*t.shape, V).numpy()), TypeError, "logits of type ndarray"),
    "hidden states of another width": (
        _with(hidden=lambda t: torch.zeros(*t.shape, D + 1)),
        ValueError,
        r"hidden of Answering must be \[B, N, D\] = \(\d+, \d, 3\), got shape \(\d+, \d, 4\)",
    ),
    "no hidden states": (
        _with(hidden=lambda t: None),
        TypeError,
        r"MaskedOutput\(logits, hidden\), got MaskedOutput without hid",
    ),
    "a plain tuple": (
        lambda t: tuple(fitting(t)),
        TypeError,
        r"MaskedOutput\(logits, hidden\), got tuple without logits",
    ),
    "nothing": (lambda t: None, TypeError, "got NoneType without logits"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("caller", CALLERS)
def test_an_answer_that_does_not_fit_is_named_wherever_a_model_is_called(caller: str, misfit: str) -> None:
    answer, error, message = MISFITS[misfit]
    with pytest.raises(error, match=message):
        CALLERS[caller](Answering(answer))


@pytest.mark.parametrize("caller", CALLERS)
def test_an_answer_that_fits_is_taken_wherever_a_model_is_called(caller: str) -> None:
    CALLERS[caller](Answering(fitting))


class StatsOnly(Answering):
    """Has statistics of its own making."""

    forbidden_tokens = (MASK,)

    def __init__(self, **changed: Any) -> None:
        super().__init__(fitting)
        self.changed = changed

    def token_stats(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Any:
        class Output(NamedTuple):
            stats: Any
            hidden: Any

        logits, hidden = fitting(tokens)
        stats = ops.token_stats(logits)._replace(**{k: v for k, v in self.changed.items() if k != "hidden"})
        return Output(stats, self.changed.get("hidden", hidden))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"token": torch.full((1, 7), 8)}, ValueError, r"token of StatsOnly must lie in 0\.\.5, got 8"),
        ({"token": torch.full((1, 7), -1)}, ValueError, r"token of StatsOnly must lie in 0\.\.5, got -1"),
        ({"token": torch.zeros(1, 7)}, TypeError, "token of StatsOnly must be int64"),
        (
            {"entropy": torch.zeros(1, 6)},
            ValueError,
            r"entropy of StatsOnly must be \[B, N\] = \(1, 7\), got shape \(1, 6",
        ),
        ({"confidence": torch.zeros(1, 7, dtype=torch.int64)}, TypeError, "confidence of StatsOnly must be float64"),
        ({"hidden": torch.zeros(1, 7, 1)}, ValueError, r"hidden of StatsOnly must be \[B, N, D\] = \(1, 7, 3\)"),
        ({"hidden": None}, TypeError, "got Output without hidden"),
    ],
)
def test_statistics_that_do_not_fit_are_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(StatsOnly(**changed), TOKENS, TopK(1))


def test_what_is_no_model_is_named() -> None:
    for model in (None, Answering, "sudoku"):
        with pytest.raises(TypeError, match="decode: model must be an object that can be called, got"):
            decode(model, TOKENS, TopK(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="probe_mi: model must have an integer mask_token_id, got None of function"):
        label_mi(lambda tokens: fitting(tokens), TOKENS)  # type: ignore[arg-type]
    model = Answering(fitting)
    model.vocab_size = 6.0  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"model must have an integer vocab_size, got 6\.0 of Answering"):
        decode(model, TOKENS, TopK(1))
    model.vocab_size, model.mask_token_id = 6, True
    with pytest.raises(TypeError, match="model must have an integer mask_token_id, got True of Answering"):
        decode(model, TOKENS, TopK(1))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mask_token_id": 2**63}, ValueError, "mask_token_id of Answering must be at most 9223372036854775807"),
        ({"mask_token_id": torch.tensor(4.0)}, TypeError, "model must have an integer mask_token_id, got tensor"),
        ({"vocab_size": 0}, ValueError, "vocab_size of Answering must be at least 1, got 0"),
        ({"vocab_size": 2**70}, ValueError, "vocab_size of Answering must be at most"),
        (
            {"forbidden_tokens": None},
            TypeError,
            "forbidden_tokens of Answering must be a sequence of tokens, which are integers, got None",
        ),
        (
            {"forbidden_tokens": [1.7]},
            TypeError,
            r"forbidden_tokens of Answering must be a sequence of tokens.*got \[1\.7\]",
        ),
        (
            {"forbidden_tokens": torch.tensor(2)},
            TypeError,
            "forbidden_tokens of Answering must be a sequence of tokens",
        ),
        ({"forbidden_tokens": [400]}, ValueError, r"forbidden_tokens of Answering must be tokens in 0\.\.5, got 400"),
        ({"visible": lambda tokens: [[True]]}, TypeError, "visible of Answering must be a tensor, got list"),
        ({"visible": lambda tokens: tokens}, TypeError, "visible of Answering must be bool, got"),
        (
            {"visible": lambda tokens: tokens[:, 1:] > 0},
            ValueError,
            r"visible of Answering must be \[B, N\] = \(1, 7\)",
        ),
    ],
)
def test_what_a_model_says_of_itself_is_checked(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Answering(fitting)
    vars(model).update(changed)
    for stop_tokens in ([], [1]):
        with pytest.raises(error, match=f"decode: {message}"):
            decode(model, TOKENS, TopK(1), stop_tokens=stop_tokens)
    if "forbidden_tokens" not in changed:  # nothing is written
        with pytest.raises(error, match=f"probe_mi: {message}"):
            label_mi(model, TOKENS)


@pytest.mark.parametrize("order", ["entropy", "random"])
@pytest.mark.parametrize("mask_token", [MASK, V])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_trajectory_ends_where_the_model_gives_no_distribution(
    order: Literal["entropy", "random"], mask_token: int, value: float
) -> None:
    model = Answering(lambda tokens: fitting(tokens)._replace(logits=torch.full((*tokens.shape, V), value)))
    model.mask_token_id = mask_token
    with pytest.raises(
        ValueError, match=r"Trajectory: the model's logits at sequence \d, position 0 give no distribution"
    ):
        Trajectory(order)(model, torch.zeros(8, 3, dtype=torch.int64), range(8))


@pytest.mark.parametrize("masking", [Trajectory(), FixedShare(0.5), UniformShare()])
@pytest.mark.parametrize(
    ("tokens", "seeds", "error", "message"),
    [
        (TOKENS, [0, 1], ValueError, "a seed for each, got 1 and 2"),
        (TOKENS[:0], [], ValueError, "there must be sequences"),
        (TOKENS, [1.5], TypeError, "each of seeds must be an int, got 1.5"),
        (TOKENS, [2**70], ValueError, "each of seeds must be at most"),
        (TOKENS[0], [0], ValueError, r"tokens must be \[B, N\] int64"),
        (TOKENS.float(), [0], ValueError, r"tokens must be \[B, N\] int64"),
        (TOKENS.tolist(), [0], TypeError, "tokens must be a tensor, got list"),
    ],
)
def test_arguments_of_a_masking_are_named(
    masking: Masking, tokens: Any, seeds: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"masking: .*{message}"):
        masking(Answering(fitting), tokens, seeds)


class Careless(nn.Module):
    """A network with dropout, as it is made: in training mode."""

    mask_token_id, vocab_size, hidden_size = MASK, V, D

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(V, D), nn.Linear(D, V)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        place = torch.arange(tokens.shape[1]).unsqueeze(-1) / 10
        x = self.drop(self.embed(tokens) + self.embed(tokens).mean(1, keepdim=True) + place)
        return MaskedOutput(self.out(x).detach(), x.detach())


class Wrapping:
    """No module itself, but made of one."""

    mask_token_id, vocab_size, hidden_size = MASK, V, D

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        answer: MaskedOutput = self.network(tokens)
        return answer


class Slotted:
    """Holds a network in a slot."""

    __slots__ = ("__dict__", "network")

    def __init__(self, network: nn.Module) -> None:
        self.network = network


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "a list": lambda network: [network],
    "a dict": lambda network: {"first": network},
    "an object": Wrapping,
    "an object in a list": lambda network: [Wrapping(network)],
    "a slot": Slotted,
}


class Holding(Wrapping):
    """Has its network somewhere below an attribute."""

    def __init__(self, network: nn.Module, how: str = "a list") -> None:
        self.held = HOLDERS[how](network)
        self.answer = lambda tokens: network(tokens)

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return self.answer(tokens)


@pytest.mark.parametrize("how", HOLDERS)
def test_a_model_is_known_by_a_network_that_it_holds_wherever_it_holds_it(how: str) -> None:
    network, other = Careless(), Careless()
    assert describe_model(Holding(network, how)) == describe_model(Holding(network, how))
    assert describe_model(Holding(network, how)) != describe_model(Holding(other, how))
    with pytest.raises(ValueError, match=r"weights must be loaded, got held.*embed.weight on the device meta"):
        decode(Holding(Careless().to("meta"), how), TOKENS, TopK(1))


@pytest.mark.parametrize(
    "wrap",
    [lambda network: network, Wrapping, *(lambda network, how=how: Holding(network, how) for how in HOLDERS)],
)
def test_a_network_in_training_mode_answers_as_in_evaluation_mode(wrap: Callable[[nn.Module], Any]) -> None:
    network = Careless()
    network.drop.train()
    model, seeds = wrap(network), torch.arange(20)
    tokens = TOKENS.repeat(20, 1)
    drawn = decode(model, tokens, TopK(1), temperature=1.0, seeds=seeds).tokens
    mi = label_mi(model, TOKENS).mi
    assert network.training
    assert network.drop.training
    network.eval()
    assert drawn.equal(decode(model, tokens, TopK(1), temperature=1.0, seeds=seeds).tokens)
    assert mi.equal(label_mi(model, TOKENS).mi)
    assert not network.drop.training
    broken = Careless()
    broken.forward = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        decode(wrap(broken), TOKENS, TopK(1))
    assert broken.training


def test_weights_and_tokens_on_the_device_meta_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = Careless()
    message = "weights must be loaded, got embed.weight on the device meta"
    for call in (
        lambda: decode(empty, TOKENS, TopK(1)),
        lambda: label_mi(empty, TOKENS),
        lambda: write_labels(empty, TOKENS, tmp_path / "labels"),
        lambda: train(empty),
        lambda: describe_model(empty),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"network.embed.weight on the device meta"):
        decode(Wrapping(empty), TOKENS, TopK(1))
    for call in (
        lambda: decode(Careless(), TOKENS.to("meta"), TopK(1)),
        lambda: label_mi(Careless(), TOKENS.to("meta")),
    ):
        with pytest.raises(ValueError, match=r"tokens must hold numbers, got shape \(1, 7\) int64 on meta"):
            call()


class Padding(Careless):
    """Knows its pad token, 0, and may write it."""

    def visible(self, tokens: Tensor) -> Tensor:
        return tokens != 0

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        assert attention_mask is not None  # whoever writes to the tokens says what padding is
        logits, hidden = super().forward(tokens)
        logits[..., 0] += 2.0
        self.shown.append(attention_mask)
        return MaskedOutput(logits, hidden)

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []


def test_what_is_padding_is_decided_once_of_the_tokens_as_they_were_given() -> None:
    torch.manual_seed(2)
    tokens = torch.tensor([[1, MASK, MASK, MASK, 0, 0]])
    visible = tokens != 0
    model = Padding()
    written = decode(model, tokens, TopK(1), temperature=1.0, seeds=torch.arange(1)).tokens
    assert (written[0, 1:4] == 0).any()  # it wrote what padding is
    assert len(model.shown) == 3
    label_mi(model, tokens)
    mi_map(model, tokens[0])
    states = Trajectory()(model, torch.tensor([[1, 5, 2, 3, 0, 0]]), [3])
    assert states[0, 4:].tolist() == [0, 0]
    assert all(shown.equal(visible.expand_as(shown)) for shown in model.shown)


def test_padding_of_a_state_is_hidden_and_never_masked_whatever_lengths_its_batch_has() -> None:
    torch.manual_seed(0)
    model, states = Padding().eval(), [torch.tensor([1, MASK, MASK, 5, 0, 0]), torch.tensor([2, MASK, 3, MASK])]
    labelled = [
        examples(LabelSet(*(each[None] for each in (s, s == MASK, torch.zeros(len(s), len(s)), s.float()))))
        for s in states
    ]
    alone = [read_batch(rows, model, torch.device("cpu")) for rows in labelled]
    together = read_batch([*labelled[0], *labelled[1]], model, torch.device("cpu"))
    shown = torch.tensor([[True] * 4 + [False] * 2] * 2)
    assert model.shown[-1].equal(shown)
    assert model.shown[0].equal(shown[:1])
    assert together.hidden[0].equal(alone[0].hidden[0])
    for masking in (UniformShare(), FixedShare(1.0), Trajectory()):
        made = masking(model, torch.tensor([[1, 5, 2, 3, 0, 0]] * 9), list(range(9)))
        assert (made[:, 4:] == 0).all()
        assert (made[:, :4] == MASK).any(dim=-1).all()


def test_how_long_a_sequence_may_be_makes_no_other_model() -> None:
    here = {"class": "Model", "max_length": 14, "weights": "a"}
    assert differences({"class": "Model", "weights": "a"}, here) == []
    assert differences({**here, "max_length": 18}, here) == []
    assert differences({"model": {"weights": "a"}, "layer": 1}, {"model": here, "layer": 1}) == ["model"]
    assert differences({"model": here, "layer": 1}, {"model": {**here, "max_length": 9}, "layer": 1}) == []
    assert differences({"model": here}, {"model": {**here, "weights": "b"}}) == ["model"]
    assert differences(here, {**here, "weights": "b"}) == ["weights"]
