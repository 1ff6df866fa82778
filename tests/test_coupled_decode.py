"""Tokens of one pass that know each other: what `decode` makes of a coupling."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import MIBudget, PairwiseCoupling, Probing, Random, Sequential, TopK, decode, load_model
from mdmi_fast.coupling import CoupledPass, Coupling
from mdmi_fast.decoding import Asked, Step, decode_many, receipt, replay
from mdmi_fast.models import MaskedModel, MaskedOutput
from mdmi_fast.models.exact import ExactModel, JointTable, MarkovChain, xor_triple
from mdmi_fast.service.worker import Engine, Job, Settings
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

Run = Callable[..., tuple[int, str, str]]

SAMPLED: dict[str, Any] = {"temperature": 1.0}


def random_table(length: int, vocabulary: int = 3, seed: int = 2) -> JointTable:
    return JointTable(torch.rand((vocabulary,) * length, generator=torch.Generator().manual_seed(seed)) ** 2)


def chain(length: int = 5) -> MarkovChain:
    steps = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]])
    return MarkovChain(torch.tensor([0.5, 0.3, 0.2]), steps, length)


class Counting:
    """Another model, and how often it was called; its answers lie in one piece of memory."""

    def __init__(self, model: ExactModel) -> None:
        self.model, self.calls = model, 0
        self.mask_token_id, self.vocab_size, self.hidden_size = model.mask_token_id, model.vocab_size, model.hidden_size
        self.memory = torch.empty(0)

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        self.calls += 1
        logits, hidden = self.model(tokens, attention_mask)
        if self.memory.numel() < logits.numel():
            self.memory = torch.empty(logits.numel(), dtype=logits.dtype)
        answer = self.memory[: logits.numel()].view(logits.shape)
        return MaskedOutput(answer.copy_(logits), hidden)


class Given:
    """A coupling of somebody else's: says whatever a function of (k, rows, what was told) says."""

    def __init__(self, answer: Any, *, greedy: bool = False) -> None:
        self.answer, self.greedy = answer, greedy

    def check_model(self, model: MaskedModel) -> None:
        pass

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> CoupledPass:
        return _GivenPass(self.answer, order)


class _GivenPass:
    def __init__(self, answer: Any, order: Tensor) -> None:
        self.answer, self.order, self.told = answer, order, torch.full_like(order, -1)

    def correction(self, k: int) -> Any:
        assert k > 0  # nothing was told
        return self.answer(k, self.order, self.told)

    def tell(self, k: int, tokens: Tensor) -> None:
        self.told[:, k] = tokens


def nothing(k: int, order: Tensor, told: Tensor) -> Tensor:
    return torch.zeros(len(order), 3)


def repeated(k: int, order: Tensor, told: Tensor) -> Tensor:
    """What was drawn last is almost certain to come again."""
    return 50.0 * torch.nn.functional.one_hot(told[:, k - 1].clamp(min=0), 3)


def drawn_jointly(model: ExactModel, order: list[int], coupling: Coupling | None) -> Tensor:
    """[V, ..., V] float64: with what probability one pass from all masked draws each sequence."""
    length, size = len(order), model.vocab_size
    every = torch.tensor([*itertools.product(range(size), repeat=length)])
    tokens = torch.full_like(every, model.mask_token_id)
    logits, hidden = model(tokens)
    places = torch.tensor([order]).expand(len(every), -1)
    begun = (
        None if coupling is None else coupling.begin(Step(0, model=model, tokens=tokens, logits=logits), hidden, places)
    )
    log_p = torch.zeros(len(every), dtype=torch.float64)
    for k, position in enumerate(order):
        own = logits[:, position]
        correction = None if begun is None else begun.correction(k)
        if correction is not None:
            own = own + correction
        log_p += own.log_softmax(-1).gather(-1, every[:, position : position + 1]).squeeze(-1)
        # What is impossible is never drawn, and no model says what would follow from it.
        possible = model(tokens[:1]).logits[0, position].isfinite()
        token = every[:, position]
        if begun is not None:
            begun.tell(k, torch.where(possible[token], token, possible.int().argmax()))
    return log_p.exp().view((size,) * length)


def divergence(true: Tensor, drawn: Tensor) -> float:
    """KL(true || drawn), nats."""
    possible = true > 0
    return float((true[possible] * (true[possible] / drawn[possible]).log()).sum())


# --- what is drawn is closer to the joint


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("model", [random_table(2), JointTable(torch.tensor([[0.5, 0.0], [0.1, 0.4]]))])
def test_two_positions_are_drawn_from_their_joint_exactly(model: JointTable, order: list[int]) -> None:
    drawn = drawn_jointly(model, order, Probing())
    # Rounding of float64, and the e^-50 that is left to what is impossible.
    assert torch.allclose(drawn, model.joint, rtol=1e-12, atol=1e-20)
    assert divergence(model.joint, drawn_jointly(model, order, None)) > 0.01


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]])
@pytest.mark.parametrize(
    ("model", "most"),
    [
        # The most that may be left of the error: in a chain pairs tell most, tables depend on three and four at once too.
        (chain(4), 0.25),
        (random_table(4), 1.0),
        (random_table(4, seed=5), 1.0),
    ],
    ids=["chain", "table", "other"],
)
def test_more_positions_are_drawn_closer_to_their_joint_than_independently(
    model: ExactModel, most: float, order: list[int]
) -> None:
    true = joint_of(model)
    alone = divergence(true, drawn_jointly(model, order, None))
    assert divergence(true, drawn_jointly(model, order, Probing())) < most * alone
    # With a strength of 0 nothing is corrected.
    assert divergence(true, drawn_jointly(model, order, Probing(strength=0.0))) == pytest.approx(alone, rel=1e-12)


def joint_of(model: ExactModel) -> Tensor:
    if isinstance(model, JointTable):
        return model.joint
    size, length = model.vocab_size, model.length
    log_p = torch.zeros((size,) * length, dtype=torch.float64)
    for at in itertools.product(range(size), repeat=length):
        tokens = [size] * length
        for position, token in enumerate(at):
            log_p[at] += model(torch.tensor([tokens])).logits[0, position, token]
            tokens[position] = token
    return log_p.exp()


def test_what_pairs_cannot_show_is_drawn_as_if_independent() -> None:
    # Three bits with x3 = x1 xor x2: no pair of them depends on each other, so there is nothing to correct.
    tokens, seeds = torch.full((200, 3), 2), torch.arange(200)
    coupled, alone = (
        decode(xor_triple(), tokens, TopK(3), coupling=coupling, seeds=seeds, **SAMPLED).tokens
        for coupling in (Probing(), None)
    )
    assert coupled.equal(alone)


def test_decoding_draws_what_the_coupling_says() -> None:
    twins = JointTable(torch.diag(torch.tensor([0.3, 0.5, 0.2])))
    result = decode(twins, torch.full((2000, 2), 3), TopK(2), coupling=Probing(), seeds=torch.arange(2000), **SAMPLED)
    assert (result.passes == 1).all()
    assert result.tokens[:, 0].equal(result.tokens[:, 1])
    share = result.tokens[:, 0].bincount() / 2000
    # Four standard errors of a share.
    assert (share - torch.tensor([0.3, 0.5, 0.2])).abs().max() < 4 * 0.5 / math.sqrt(2000)


def test_where_every_token_is_ruled_out_one_is_drawn_all_the_same() -> None:
    # Three positions with two tokens, no two of them alike: impossible, but for the last one.
    joint = torch.zeros(3, 3, 3)
    for at in itertools.permutations(range(3)):
        joint[at] = 1.0
    result = decode(
        JointTable(joint),
        torch.full((50, 3), 3),
        TopK(3),
        coupling=Probing(),
        allowed=torch.tensor([[True, True, True], [True, True, True], [True, True, False]]),
        seeds=torch.arange(50),
        **SAMPLED,
    )
    first, second, third = result.tokens.unbind(-1)
    assert (first != second).all()
    assert (third != 2).all()
    # Where the first two leave a token, it is taken.
    free = (first == 2) | (second == 2)
    assert (third[free] == 3 - first[free] - second[free]).all()


# --- the promises of decode


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "top-p": {"top_p": 0.8, "top_k": 2},
    "gumbel": {"gumbel": True, "temperature": 0.7},
    "blocks": {"block_size": 3},
    "verified": {"verify": True, "revisions": 2},
    "remasked": {"remask_below": 0.6},
    "stopped": {"stop_tokens": [2]},
    "suppressed": {"suppressed": [1]},
    "greedy": {"temperature": 0.0},
}


def learned() -> PairwiseCoupling:
    """As strange as a network that was never trained can be."""
    torch.manual_seed(3)
    coupling = PairwiseCoupling(chain().hidden_size, 3, (8, 8), rank=3, distances=3)
    coupling.strength = 5.0
    return coupling.eval()


COUPLINGS = {
    "probed": Probing(greedy=True, batch_size=3),
    "given": Given(repeated, greedy=True),
    "learned": learned(),
}


def states(model: ExactModel, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(model.vocab_size, (count, model.length), generator=generator)
    masked = torch.rand(tokens.shape, generator=generator) < 0.8
    return tokens.masked_fill(masked, model.mask_token_id)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_sequence_is_drawn_alike_alone_and_in_every_batch(coupling: str, options: str) -> None:
    model, seeds = chain(), torch.arange(6) * 7919
    tokens = states(model)
    arguments = {"coupling": COUPLINGS[coupling], "trace": True, **SAMPLED, **OPTIONS[options]}
    whole = decode(model, tokens, Random(3), seeds=seeds, **arguments)
    for rows in (*torch.arange(6).split(1), torch.tensor([5, 2, 0]), torch.randperm(6)):
        part = decode(model, tokens[rows], Random(3), seeds=seeds[rows], **arguments)
        assert part.tokens.equal(whole.tokens[rows])
        assert part.passes.equal(whole.passes[rows])
        for place, row in enumerate(rows.tolist()):
            assert receipt(part.trace or [], place) == receipt(whole.trace or [], row)
    for row in range(6):
        assert replay(tokens[row].tolist(), receipt(whole.trace or [], row)) == whole.tokens[row].tolist()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("answer", [nothing, lambda k, order, told: None], ids=["zeros", "none"])
def test_a_coupling_that_corrects_nothing_changes_nothing(answer: Any, options: str) -> None:
    model = chain()
    tokens, arguments = states(model), {**SAMPLED, **OPTIONS[options], "seeds": torch.arange(6)}
    coupled = decode(model, tokens, TopK(3), coupling=Given(answer, greedy=True), **arguments)
    plain = decode(model, tokens, TopK(3), **arguments)
    assert coupled.tokens.equal(plain.tokens)
    assert coupled.passes.equal(plain.passes)


def test_positions_are_drawn_by_entropy_and_the_receipt_says_so() -> None:
    model = JointTable(
        torch.tensor([0.6, 0.4])[:, None, None] * torch.tensor([0.9, 0.1])[:, None] * torch.tensor([0.4, 0.6])
    )
    result = decode(model, torch.tensor([[2, 2, 2], [2, 0, 0]]), TopK(3), coupling=Probing(), trace=True, **SAMPLED)
    (first,), (second,) = (receipt(result.trace or [], row) for row in range(2))
    assert first["order"] == [1, 0, 2]  # of equal entropy, the lower one first
    assert "order" not in second
    plain = decode(model, torch.tensor([[2, 2, 2]]), TopK(3), trace=True, **SAMPLED)
    assert "order" not in receipt(plain.trace or [], 0)[0]


def test_one_position_a_pass_costs_nothing_more_and_several_a_call_for_each_but_the_last() -> None:
    model = Counting(chain(4))
    decode(model, torch.full((3, 4), 3), Sequential(), coupling=Probing(), **SAMPLED)
    assert model.calls == 4
    model.calls = 0
    decode(model, torch.full((3, 4), 3), TopK(4), coupling=Probing(), **SAMPLED)
    assert model.calls == 4


@pytest.mark.parametrize("verify", [False, True])
def test_a_model_may_answer_into_the_same_memory(verify: bool) -> None:
    tokens, arguments = states(chain()), {**SAMPLED, "seeds": torch.arange(6), "verify": verify}
    expected = decode(chain(), tokens, TopK(4), coupling=Probing(), **arguments)
    found = decode(Counting(chain()), tokens, TopK(4), coupling=Probing(), **arguments)
    assert found.tokens.equal(expected.tokens)


def test_verification_compares_with_the_corrected_probability() -> None:
    # Two bits that are drawn from their joint: as likely as the model finds them, so that neither loses its place.
    tokens, model = torch.full((60, 2), 2), random_table(2, vocabulary=2)
    seeds = torch.arange(60)
    result = decode(model, tokens, TopK(2), coupling=Probing(), verify=True, seeds=seeds, trace=True, **SAMPLED)
    plain = decode(model, tokens, TopK(2), coupling=Probing(), seeds=seeds, **SAMPLED)
    assert (result.passes == 2).all()  # one that writes, one that looks again
    assert result.tokens.equal(plain.tokens)


def test_corrected_tokens_may_be_written_where_they_are_allowed_only() -> None:
    allowed = torch.ones(1, 5, 3, dtype=torch.bool)
    allowed[:, ::2, 0] = False
    tokens = torch.full((40, 5), 3)
    result = decode(
        chain(), tokens, TopK(5), coupling=Given(repeated), allowed=allowed, suppressed=[1], **SAMPLED
    ).tokens
    assert (result[:, ::2] == 2).all()
    assert (result != 1).all()


def test_at_temperature_0_only_a_greedy_coupling_counts() -> None:
    model, tokens = chain(), torch.full((1, 5), 3)
    plain = decode(model, tokens, TopK(5)).tokens
    assert decode(model, tokens, TopK(5), coupling=Given(repeated)).tokens.equal(plain)
    assert decode(model, tokens, TopK(5), coupling=Probing()).tokens.equal(plain)
    corrected = decode(model, tokens, TopK(5), coupling=Given(repeated, greedy=True), trace=True)
    assert corrected.trace is not None
    first = corrected.trace[0].order
    assert first is not None
    assert (corrected.tokens == corrected.tokens[0, first[0, 0]]).all()
    # The most probable pair, not the two most probable tokens.
    pair = JointTable(torch.tensor([[0.0, 0.3, 0.3], [0.2, 0.0, 0.0], [0.2, 0.0, 0.0]]))
    assert decode(pair, torch.full((1, 2), 3), TopK(2), coupling=Probing()).tokens.tolist() == [[0, 0]]
    assert decode(pair, torch.full((1, 2), 3), TopK(2), coupling=Probing(greedy=True)).tokens.tolist() != [[0, 0]]


def test_many_sequences_are_coupled_too() -> None:
    twins = JointTable(torch.diag(torch.tensor([0.5, 0.5])))
    asked = [Asked([2, 2]) for _ in range(40)]
    found = [*decode_many(twins, asked, TopK(2), coupling=Probing(), trace=True, **SAMPLED)]
    assert all(each.tokens[0] == each.tokens[1] for each in found)
    assert {sum(each.tokens) for each in found} == {0, 2}
    assert all(each.trace[0]["order"] == [0, 1] for each in found)


def test_a_budget_on_information_may_be_generous_with_a_coupling() -> None:
    tokens, seeds = torch.full((100, 2), 2), torch.arange(100)
    twins = JointTable(torch.diag(torch.tensor([0.5, 0.5])))
    policy = MIBudget(Probing(), gamma=1.0, entropy_weight=0.0)
    result = decode(twins, tokens, policy, coupling=Probing(), seeds=seeds, **SAMPLED)
    assert (result.passes == 1).all()
    assert result.tokens[:, 0].equal(result.tokens[:, 1])


# --- what is refused


def bad(value: float) -> Any:
    """Corrections that are bad for the second row at the third draw."""

    def answer(k: int, order: Tensor, told: Tensor) -> Tensor:
        correction = torch.zeros(len(order), 3)
        if k == 2:
            correction[1] = value
        return correction

    return answer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_corrections_that_leave_no_distribution_are_named_with_their_place(value: float) -> None:
    message = "correction of Given at sequence 1, position 0 must leave a distribution"  # its entropy is the largest
    tokens = torch.full((2, 3), 3)
    for options in (SAMPLED, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=message):
            decode(random_table(3), tokens, TopK(3), coupling=Given(bad(value), greedy=True), **options)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda k, order, told: [0.0], TypeError, "correction of Given must be a tensor, got list"),
        (lambda k, order, told: torch.zeros(2, 3, dtype=torch.int64), TypeError, "correction of Given must be float64"),
        (
            lambda k, order, told: torch.zeros(3),
            ValueError,
            r"correction of Given must be \[R, V\] = \(2, 3\), got shape",
        ),
        (lambda k, order, told: torch.zeros(2, 3, device="meta"), ValueError, "tensors must be on one device"),
    ],
)
def test_corrections_of_another_kind_are_named(answer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(chain(2), torch.full((2, 2), 3), TopK(2), coupling=Given(answer), **SAMPLED)


class Beginless:
    def check_model(self, model: MaskedModel) -> None: ...


class Foreign(Given):
    def check_model(self, model: MaskedModel) -> None:
        raise ValueError("Foreign: was made for another model")


class Passless(Given):
    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> Any:
        return 7


@pytest.mark.parametrize(
    ("coupling", "error", "message"),
    [
        ("probing", TypeError, "decode: coupling must be an object with the methods begin and check_model"),
        (Probing, TypeError, "decode: coupling must be an object with the methods begin and check_model"),
        (Beginless(), TypeError, "decode: coupling must be an object with the methods begin and check_model"),
        (Foreign(nothing), ValueError, "was made for another model"),
        (
            Passless(nothing),
            TypeError,
            "begin of Passless must answer with an object that has the methods correction and",
        ),
    ],
)
def test_what_is_no_coupling_is_refused(coupling: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(chain(2), torch.full((1, 2), 3), TopK(2), coupling=coupling, **SAMPLED)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strength": -1.0}, ValueError, "Probing: strength must be finite and at least 0, got -1.0"),
        ({"strength": math.inf}, ValueError, "Probing: strength must be finite"),
        ({"strength": "much"}, TypeError, "Probing: strength must be a number"),
        ({"greedy": 1}, TypeError, "Probing: greedy must be True or False"),
    ],
)
def test_a_probe_is_told_what_it_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Probing(**options)


def test_probing_needs_to_know_the_pass() -> None:
    with pytest.raises(ValueError, match="Probing: step must be a Step with model, tokens and logits"):
        Probing().begin(Step(0), torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))


# --- commands and the service


@pytest.fixture
def blanks(tmp_path: Path) -> Path:
    """A board with its first nine cells and two more missing."""
    board = torch.from_numpy(validation_puzzles().solutions[0]).long()
    board[[0, 1, 2, 9, 10, 11, 18, 19, 20, 40, 41]] = 0
    path = tmp_path / "board.jsonl"
    path.write_text(json.dumps({"tokens": board.tolist()}) + "\n")
    return path


def test_commands_draw_with_the_coupling_they_are_told(run: Run, blanks: Path, tmp_path: Path) -> None:
    decode_them = ("decode", "--model", "sudoku:weak", "--policy", "topk:11", "--data", blanks, "--temperature", 1)
    trace = tmp_path / "trace.jsonl"
    code, out, err = run(*decode_them, "--coupling", "probing", "--trace", trace)
    assert code == 0, err
    model, tokens = load_model("sudoku:weak"), torch.tensor([json.loads(blanks.read_text())["tokens"]])
    generator = torch.Generator().manual_seed(0)
    expected = decode(model, tokens, TopK(11), coupling=Probing(), generator=generator, **SAMPLED)
    assert json.loads(out)["tokens"] == expected.tokens[0].tolist()
    assert len(json.loads(trace.read_text())["order"]) == 11
    PairwiseCoupling(model.hidden_size, model.vocab_size, (4,), rank=2).save_pretrained(tmp_path / "own")
    code, out, err = run(*decode_them, "--coupling", tmp_path / "own", "--trace", trace)
    assert code == 0, err
    assert len(json.loads(trace.read_text())["order"]) == 11


def test_commands_name_a_coupling_that_they_cannot_use(run: Run, blanks: Path, tmp_path: Path) -> None:
    PairwiseCoupling(3, 4, (4,)).save_pretrained(tmp_path / "other")
    decode_them = ("decode", "--model", "sudoku:weak", "--policy", "topk:11", "--data", blanks, "--temperature", 1)
    for name, told in (("other", "is for hidden states of width 3"), ("none", str(tmp_path / "none"))):
        code, out, err = run(*decode_them, "--coupling", tmp_path / name)
        assert (code != 0, out) == (True, "")
        assert told in err
        assert "Traceback" not in err


def test_what_tune_chose_with_a_coupling_is_decoded_with_it(run: Run, blanks: Path, tmp_path: Path) -> None:
    choice, trace = tmp_path / "choice.json", tmp_path / "trace.jsonl"
    options = ("--model", "sudoku:weak", "--data", blanks)
    tune = ("--policies", "topk:11", "--coupling", "probing", "--temperature", 1, "--target", "2x", "--out", choice)
    code, _, err = run("tune", *options, *tune)
    assert code == 0, err
    assert json.loads(choice.read_text())["coupling"] == "probing"
    assert run("decode", *options, "--policy", choice, "--trace", trace)[0] == 0
    assert len(json.loads(trace.read_text())["order"]) == 11


def test_the_service_draws_with_its_coupling() -> None:
    model, tokens = random_table(4), [3, 3, 3, 3]
    job = Job(tokens, None, 1.0, 5)
    engine = Engine(Settings("table", "topk:4", coupling="probing"), model=model)
    expected = decode(model, torch.tensor([tokens]), TopK(4), coupling=Probing(), seeds=torch.tensor([5]), **SAMPLED)
    assert engine.run([job])[0].tokens == expected.tokens[0].tolist()
