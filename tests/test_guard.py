"""The guard finds harm, does not cry wolf, and survives a restart."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from mdmi_fast import EntropyBound, MIBudget, PairwiseMIEstimator, Probing, Sequential, TopK, decode
from mdmi_fast.decoding.policies import MISource, Step
from mdmi_fast.labels import label_mi
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.ops import Selection, TokenStats, token_stats
from mdmi_fast.watch.audit import AuditBlock, MovementBlock, Reveal, audit_position
from mdmi_fast.watch.evidence import Evidence
from mdmi_fast.watch.guard import Guard, Thresholds, pseudo_likelihood

SOON = Thresholds(
    stages=(0.2, 0.5, 0.9), interval=100, step_interval=20, quality_off=0.1, quality_alert=0.05, cooldown=200
)


def dependent_model() -> JointTable:
    return JointTable(torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(0)) ** 8)


def serve(guard: Guard, count: int, *, policy: float, control: float, first: int = 0, seconds: float = 1.0) -> int:
    """Sequences of the given mean qualities on either side, until `count` or the guard changes; how many there were."""
    luck = np.random.default_rng(first)
    before = (guard.share, guard.state.scale)
    for seed in range(first, first + count):
        ours = guard._arm(seed)
        good = float(luck.random() < (policy if ours else control))
        guard.finish(torch.tensor([seed]), quality=[good], seconds=[seconds if ours else 1.0], passes=[3])
        if (guard.share, guard.state.scale) != before:
            return seed - first + 1
    return count


@pytest.mark.parametrize("upper", [1.0, 0.2])
def test_false_alarms_are_rarer_than_promised_and_shifts_are_found(upper: float) -> None:
    luck, interval, count = np.random.default_rng(0), 200, 100_000
    evidence = Evidence(upper=upper, interval=interval)
    # The hardest case: a mean of exactly 0, from observations as far apart as they may be.
    alarms = sum(evidence.add(float(x)) for x in upper * luck.choice([-1.0, 1.0], count))
    assert 0 < alarms <= count / interval
    evidence.reset()
    delays = []
    for _ in range(100):
        delay = next(n for n in range(1, 1000) if evidence.add(float(upper * luck.choice([-1.0, 1.0], p=[0.7, 0.3]))))
        delays.append(delay)
    assert np.median(delays) < 100


def test_observations_out_of_bounds_are_refused() -> None:
    evidence = Evidence(upper=0.5, interval=100)
    for x in (0.6, math.nan):
        with pytest.raises(ValueError, match=r"x must be at most 0\.5"):
            evidence.add(x)
    for wrong in ({"upper": 0.0, "interval": 10}, {"upper": 1.0, "interval": 1}):
        with pytest.raises(ValueError, match="must be above"):
            Evidence(**wrong)


def test_every_sequence_is_decoded_by_one_side_alone_whatever_the_batch() -> None:
    model, policy = dependent_model(), TopK(2)
    seeds, states = torch.arange(64), torch.full((64, 4), 3)
    guard = Guard(policy, thresholds=Thresholds(stages=(0.5,)))
    mixed = decode(model, states, guard, seeds=seeds, temperature=1.0)
    ours = decode(model, states, policy, seeds=seeds, temperature=1.0)
    theirs = decode(model, states, Sequential(), seeds=seeds, temperature=1.0)
    watched = mixed.passes == 2
    assert 20 < int(watched.sum()) < 44
    assert torch.equal(mixed.tokens, torch.where(watched.unsqueeze(-1), ours.tokens, theirs.tokens))
    alone = decode(
        model, states[5:9], Guard(policy, thresholds=Thresholds(stages=(0.5,))), seeds=seeds[5:9], temperature=1.0
    )
    assert torch.equal(alone.tokens, mixed.tokens[5:9])


def test_the_canary_climbs_on_evidence_of_equal_quality() -> None:
    guard = Guard(TopK(2), thresholds=SOON)
    shares, first = [guard.share], 0
    while guard.share < 0.9:
        first += serve(guard, 20_000, policy=0.9, control=0.9, first=first)
        shares.append(guard.share)
        assert first < 20_000
    assert shares == [0.2, 0.5, 0.9]
    assert not guard.state.alarms


def test_worse_quality_is_taken_back_and_tried_again_later() -> None:
    guard = Guard(TopK(2), thresholds=SOON)
    guard.state.stage = 2
    with_harm = serve(guard, 5_000, policy=0.6, control=0.9)
    assert with_harm < 1_500
    assert (guard.share, guard.state.reason) == (0.0, "quality_off")
    assert serve(guard, 1_000, policy=0.6, control=0.9, first=10_000) == 200  # the cooldown
    assert guard.share == 0.2
    serve(guard, 5_000, policy=0.3, control=0.9, first=20_000)
    assert guard.share == 0.0
    assert serve(guard, 1_000, policy=0.6, control=0.9, first=40_000) == 400  # twice the cooldown


def test_a_small_loss_tightens_the_limit_and_a_quiet_time_relaxes_it() -> None:
    limits = Thresholds(stages=(0.5,), interval=50, quality_off=0.9, quality_alert=0.05, cooldown=300)
    guard = Guard(EntropyBound(0.4), thresholds=limits)
    serve(guard, 5_000, policy=0.7, control=0.95)
    assert (guard.state.scale, guard._tightened) == (0.5, EntropyBound(0.2))
    assert serve(guard, 5_000, policy=0.95, control=0.95, first=10_000) == 300
    assert guard._tightened == EntropyBound(0.4)
    for turn in range(4):
        serve(guard, 250, policy=0.3, control=0.95, first=(turn + 2) * 10_000)
    assert guard.state.scale == 0.125  # not below
    assert guard.share == 0.5


def test_slower_than_sequential_is_an_alarm_and_nothing_else() -> None:
    guard = Guard(TopK(2), thresholds=Thresholds(stages=(0.5,), interval=50))
    serve(guard, 600, policy=0.9, control=0.9, seconds=3.0)
    assert guard.state.alarms.get("latency_alert", 0) > 0
    assert guard.share == 0.5


def test_an_estimator_that_fails_is_said_once_and_the_answer_is_the_sequential_one(tmp_path: Path) -> None:
    def broken(hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.full((*mask.shape, mask.shape[1]), math.nan)

    model, seeds, states = dependent_model(), torch.arange(32), torch.full((32, 4), 3)
    guard = Guard(
        MIBudget(broken, 0.3, entropy_weight=0.0),
        thresholds=Thresholds(stages=(0.9,)),
        audit_share=0.0,
        state=tmp_path / "g",
        watched="b",
    )
    with pytest.warns(UserWarning, match="failed, decoding sequentially: select_budget: mi must not be NaN") as said:
        result = decode(model, states, guard, seeds=seeds)
    assert len(said) == 1
    plain = decode(model, states, Sequential(), seeds=seeds)
    assert torch.equal(result.tokens, plain.tokens)
    assert json.loads((tmp_path / "g").read_text())["reason"] == "error"
    guard.finish(seeds, quality=[1.0] * 32)
    assert guard.state.policy.sequences == 0  # a sequence that both sides had a part in tells of neither


def test_an_audit_gives_the_exact_mutual_information_of_a_consistent_model() -> None:
    model = dependent_model()
    states = torch.tensor([[3, 3, 0, 3]])
    mask = states == 3
    predicted, probed = audit_position(
        lambda hidden, mask: torch.ones(1, 4, 4), model(states).hidden, mask, Step(0, model=model, tokens=states), 0, 1
    )
    exact = model.mutual_information(states[0])[1, [0, 3]].float()
    torch.testing.assert_close(probed, exact, atol=1e-6, rtol=0)
    assert predicted.tolist() == [1.0, 1.0]


def test_a_block_says_what_closed_forms_say() -> None:
    block = AuditBlock()
    block.add(torch.tensor([0.0, 0.02, 0.3, 0.9]), torch.tensor([0.0, 0.08, 0.4, 1.2]))
    x, y = np.array([[0.0, 0.02, 0.3, 0.9], [0.0, 0.08, 0.4, 1.2]])
    assert block.correlation() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-7)
    assert block.false_independence(0.05) == 0.5
    assert block.calibration() == pytest.approx([0.03, 0.1, math.nan, 0.3], abs=1e-6, nan_ok=True)
    flat = AuditBlock()
    flat.add(torch.ones(3), torch.rand(3))
    assert flat.correlation() == 0.0  # an estimator that says the same of all pairs knows nothing
    assert flat.false_independence(0.5) is None
    independent = AuditBlock()
    independent.add(torch.rand(3), torch.zeros(3))
    assert independent.correlation() is None


def test_a_perfect_correlation_is_not_rounded_past_1() -> None:
    # Else the evidence, which knows bounds, would refuse it in the middle of a decode. Plain arithmetic gives 1 + 2e-16.
    block, probed = AuditBlock(), torch.tensor([0.014623880, 0.139338195, 0.917982578, 0.363736749])
    block.add(3 * probed, probed)
    r = block.correlation()
    assert r is not None
    assert 1 - 1e-12 < r <= 1


@pytest.mark.parametrize("good", [True, False])
def test_low_correlation_falls_back_and_high_correlation_does_not(good: bool) -> None:
    model, states = dependent_model(), torch.full((8, 4), 3)

    def noise(hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.rand(*mask.shape, mask.shape[1])

    limits = Thresholds(stages=(0.5,), interval=100, audited_positions=5)
    guard = Guard(MIBudget(Probing() if good else noise, 0.3), thresholds=limits, audit_share=1.0)
    for turn in range(40):
        decode(model, states, guard, seeds=torch.arange(turn * 8, turn * 8 + 8), temperature=1.0)
    assert guard.state.audits > 50
    if good:
        assert guard.state.correlation > 0.999
        assert guard.share == 0.5
    else:
        assert guard.state.correlation < 0.75
        assert (guard.share, guard.state.reason) == (0.0, "correlation_off")


def exact_source(model: JointTable, wrong: Callable[[Tensor], Tensor] = Tensor.clone) -> MISource:
    """The mutual information itself of every state, or what `wrong` makes of the values of its pairs."""

    class Exact:
        needs_step: ClassVar[Literal[True]] = True
        known: ClassVar[dict[tuple[int, ...], Tensor]] = {}

        def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
            rows = [self.of(tuple(tokens)) for tokens in step.tokens.tolist()]  # type: ignore[attr-defined]
            return torch.stack(rows)

        def of(self, tokens: tuple[int, ...]) -> Tensor:
            if tokens not in self.known:
                self.known[tokens] = model.mutual_information(torch.tensor(tokens)).float()
            i, j = self.known[tokens].triu(1).nonzero(as_tuple=True)
            mi = torch.zeros_like(self.known[tokens])
            mi[i, j] = mi[j, i] = wrong(self.known[tokens][i, j])
            return mi

    return Exact()


def shuffle(values: Tensor) -> Tensor:
    return values[torch.randperm(len(values))]


def test_what_moves_is_on_average_the_kl_form_of_the_labels() -> None:
    # Conditionals that no joint has: the three forms differ, and it is this one that movement measures.
    class Inconsistent(JointTable):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            output = super().__call__(tokens, attention_mask)
            visible = (tokens != self.mask_token_id).sum(dim=-1).view(-1, 1, 1)
            return output._replace(logits=output.logits * (1 + 0.3 * visible))

    model = Inconsistent(torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(0)) ** 4)
    before = torch.tensor([[3, 3, 0, 3]])
    output, seeds = model(before), torch.tensor([5])
    step = Step(0, model=model, tokens=before, logits=output.logits, seeds=seeds, sampled=True)
    mean = torch.zeros(4, 4, dtype=torch.float64)
    for position in (0, 1, 3):
        reveal = Reveal.of(exact_source(model), output.hidden, before == 3, step, 0, position, random.Random(0))
        for value, probability in enumerate(output.logits[0, position].softmax(dim=-1)):
            after = before.clone()
            after[0, position] = value
            moved = reveal.moved(Step(1, tokens=after, logits=model(after).logits, seeds=seeds), 3)
            assert moved is not None
            mean[position, reveal.others] += probability * moved
        for other in (before, torch.tensor([[0, 1, 0, 2]]), torch.tensor([[3, 1, 1, 3]])):  # not this position alone
            assert reveal.moved(Step(1, tokens=other, logits=output.logits, seeds=seeds), 3) is None
        assert reveal.moved(Step(1, tokens=after, logits=output.logits, seeds=seeds + 1), 3) is None
    # Labels are the mean of both directions.
    labels = label_mi(model, before, before == 3, form="kl")
    torch.testing.assert_close((mean + mean.T) / 2, labels.mi[0].double(), atol=1e-6, rtol=0)
    assert float((label_mi(model, before, before == 3, form="joint").mi - labels.mi).abs().max()) > 1e-3


def test_the_slope_is_that_of_a_least_squares_fit_within_reveals() -> None:
    block, slopes, weights = MovementBlock(), [], []
    for _ in range(5):
        guess, truth = torch.rand(6), torch.rand(6)
        block.add(guess, truth)
        slopes.append(float(np.polyfit(guess.double(), truth.double(), 1)[0]))
        weights.append(float(guess.double().var()))
    assert block.slope() == pytest.approx(np.average(slopes, weights=weights))
    for guess, truth, slope in [(0.0, 0.1, 0.0), (0.3, 0.3, 0.0), (1e-4, 1e-5, None)]:
        alike = MovementBlock()
        alike.add(torch.full((4,), guess), torch.full((4,), truth))
        assert alike.slope() == slope
    assert MovementBlock().slope() is None
    assert MovementBlock().ratio() is None


@pytest.mark.parametrize(
    ("wrong", "falls"), [(Tensor.clone, False), (lambda mi: mi / 2, False), (shuffle, True), (torch.zeros_like, True)]
)
def test_movement_tells_a_good_estimator_from_a_broken_one_without_a_pass(
    wrong: Callable[[Tensor], Tensor], falls: bool
) -> None:
    table = JointTable(torch.rand(3, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0)) ** 8)
    passes = []

    class Counting(JointTable):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            passes.append(len(tokens))
            return super().__call__(tokens, attention_mask)

    model = Counting(table.joint)
    policy = MIBudget(exact_source(table, wrong), 0.3, entropy_weight=0.0)
    limits = Thresholds(stages=(0.5,), interval=100, audited_positions=10)
    guard = Guard(policy, thresholds=limits, audit_share=0.0, movement_share=1.0)
    for turn in range(70):
        seeds, states = torch.arange(turn * 4, turn * 4 + 4), torch.full((4, 5), 3)
        result = decode(model, states, guard, seeds=seeds, temperature=1.0)
        assert len(passes) == int(result.passes.max())
        passes.clear()
        if guard.state.fallen_back:
            break
    assert guard.state.fallen_back == falls
    assert guard.state.audits == 0
    if falls:
        assert guard.state.reason == "movement_off"
    else:
        assert guard.state.reveals > 200
        assert guard.state.movement_slope is not None


def test_movement_is_not_looked_at_where_its_mean_would_be_another() -> None:
    model = dependent_model()
    states, seeds = torch.full((8, 4), 3), torch.arange(8)
    for source, options in [
        (exact_source(model), {"temperature": 0.0}),
        (exact_source(model), {"temperature": 1.0, "top_k": 2}),
        (exact_source(model), {"temperature": 1.0, "top_p": 0.9}),
        (exact_source(model), {"temperature": 1.0, "suppressed": [2]}),
        (exact_source(model), {"temperature": 1.0, "allowed": torch.tensor([True, True, False])}),
        (Probing(), {"temperature": 1.0}),
    ]:
        guard = Guard(MIBudget(source, 0.3), audit_share=0.0, movement_share=1.0)
        decode(model, states, guard, seeds=seeds, **options)  # type: ignore[arg-type]
        assert guard.state.reveals == 0
    guard = Guard(MIBudget(exact_source(model), 0.3), audit_share=0.0, movement_share=1.0)
    decode(model, states, guard, seeds=seeds, temperature=1.0)
    assert guard.state.reveals == 2  # after the third pass one position is left, and one pair has no slope


def test_an_estimator_that_reads_the_marginals_is_audited() -> None:
    model = dependent_model()
    estimator = PairwiseMIEstimator(model.hidden_size, layers=(8,), output="bounded").eval()
    guard = Guard(MIBudget(estimator, 0.3), audit_share=1.0, movement_share=1.0)
    decode(model, torch.full((8, 4), 3), guard, seeds=torch.arange(8), temperature=1.0)
    assert (guard.state.errors, guard.state.fallen_back) == (0, False)
    assert guard.state.audits > 0
    assert guard.state.reveals > 0


def test_a_foreign_loop_need_not_put_the_statistics_into_the_step() -> None:
    model, tokens = dependent_model(), torch.full((8, 4), 3)
    estimator = PairwiseMIEstimator(model.hidden_size, layers=(8,), marginals="summary").eval().requires_grad_(False)
    output, mask = model(tokens), tokens == 3
    step = Step(0, model=model, tokens=tokens, logits=output.logits, sampled=True, seeds=torch.arange(8))
    guard, arrays = (Guard(MIBudget(estimator, 0.3), audit_share=1.0, movement_share=1.0) for _ in range(2))
    stats = token_stats(output.logits)
    selected = guard.select(stats, output.hidden, mask, step).selected
    assert selected.any(dim=-1).all()
    assert (guard.state.errors, guard.state.audits) == (0, 1)
    foreign = TokenStats(*(field.numpy() for field in stats))  # type: ignore[arg-type]
    assert arrays.select(foreign, output.hidden.numpy(), mask.numpy(), step).selected.equal(selected)


class Careless:
    """Takes nothing, or answers with a tensor of another shape."""

    def __init__(self, width: int) -> None:
        self.width = width

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return Selection(torch.zeros(len(mask), self.width, dtype=torch.bool), torch.zeros(len(mask)))


@pytest.mark.parametrize(
    ("width", "message"), [(4, r"took no position of sequence \d+ in pass 0"), (1, r"must select \(32, 4\) bool")]
)
def test_a_policy_that_answers_nothing_useful_is_a_failure_like_any_other(width: int, message: str) -> None:
    model, seeds, states = dependent_model(), torch.arange(32), torch.full((32, 4), 3)
    guard = Guard(Careless(width), thresholds=Thresholds(stages=(0.9,)), audit_share=0.0)
    with pytest.warns(UserWarning, match=message):
        result = decode(model, states, guard, seeds=seeds)
    assert torch.equal(result.tokens, decode(model, states, Sequential(), seeds=seeds).tokens)
    assert (guard.state.reason, guard.state.errors) == ("error", 1)


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    straight = Guard(EntropyBound(0.4), thresholds=SOON)
    stopped = Guard(EntropyBound(0.4), thresholds=SOON, state=path)
    for seed in range(2_000):
        if seed % 500 == 499:
            # In flight and half-observed sequences are lost with the process, as they would be.
            straight._arms.clear()
            straight._waiting = {True: [], False: []}
            stopped = Guard(EntropyBound(0.4), thresholds=SOON, state=path)
        for guard in (straight, stopped):
            guard._arm(seed)
            guard.finish(torch.tensor([seed]), quality=[float(seed % 7 > 0)])
    assert straight.share > 0.2
    assert (stopped.share, stopped.state.policy) == (straight.share, straight.state.policy)
    assert [e.capital for e in stopped._evidence.values()] == [e.capital for e in straight._evidence.values()]
    assert [entry.name for entry in tmp_path.iterdir()] == ["guard.json"]


def test_other_weights_start_with_the_first_stage(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    estimator = PairwiseMIEstimator(4, layers=(8,))
    guard = Guard(MIBudget(estimator, 0.1), state=path)
    guard.state.stage = 2
    guard.save()
    assert Guard(MIBudget(estimator, 0.1), state=path).share == 0.98
    with torch.no_grad():
        estimator.last.bias += 1
    assert Guard(MIBudget(estimator, 0.1), state=path).share == 0.05


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"share": 1}',
        "{",
        '{"share": 1, "watched": "TopK(k=2)", "policy": {}, "control": {}, "stage": 9}',
        '{"share": 1, "watched": "TopK(k=2)", "policy": {}, "control": {}, "capital": {"step": [1.0]}}',
    ],
)
def test_a_file_that_is_no_state_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "guard.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"guard\.json: not the state of a guard"):
        Guard(TopK(2), state=path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stage", 0.5),
        ("fallen_back", "no"),
        ("finished_since_change", None),
        ("fallbacks_in_a_row", "3"),
        ("reveals", []),
        ("correlation", "high"),
        ("movement_slope", math.nan),
        ("calibration", 7),
        ("calibration", ["x"]),
        ("capital", {"step": ["1"] * 7}),
    ],
)
def test_a_state_with_a_field_of_another_kind_is_named(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "guard.json"
    Guard(TopK(2), state=path).save()
    Guard(TopK(2), state=path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=r"guard\.json: not the state of a guard"):
        Guard(TopK(2), state=path)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quality": [1.0, math.nan]}, "quality must be from 0 to 1, got nan of the sequence with seed 1"),
        ({"seconds": [1.0, math.nan]}, "seconds must be finite and at least 0, got nan of the sequence with seed 1"),
        ({"seconds": [math.inf, 1.0]}, "seconds must be finite and at least 0, got inf of the sequence with seed 0"),
        ({"passes": [1, -1]}, "passes must be finite and at least 0, got -1 of the sequence with seed 1"),
        ({"quality": [1.0]}, "quality must hold a number for each of 2 sequences, got 1"),
    ],
)
def test_nothing_is_counted_of_what_cannot_be(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    guard, seeds = Guard(TopK(2), state=tmp_path / "guard.json"), torch.arange(2)
    for seed in seeds.tolist():
        guard._arm(seed)
    with pytest.raises(ValueError, match=message):
        guard.finish(seeds, **told)
    assert guard.state.finished_since_change == 0
    single = np.ones(2, dtype=np.float32)  # which JSON does not know
    guard.finish(seeds, quality=single, seconds=single, passes=single)  # type: ignore[arg-type]
    guard = Guard(TopK(2), state=tmp_path / "guard.json")
    assert guard.state.policy.sequences + guard.state.control.sequences == 2
    assert guard.state.finished_since_change == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("correlation_alert", 1.0),
        ("correlation_off", 1.0),
        ("correlation_off", -1.5),
        ("quality_alert", -0.1),
        ("quality_off", 1.1),
        ("latency_alert", math.inf),
        ("false_independence_alert", 0.0),
        ("movement_off", 1.0),
        ("stages", ()),
        ("stages", (0.5, 1.5)),
        ("tau", -1.0),
        ("interval", 1.0),
        ("step_interval", 0.0),
        ("audited_positions", 0),
        ("cooldown", -1),
    ],
)
def test_a_threshold_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^Thresholds: {name} must be "):
        Thresholds(**{name: value})
    if not isinstance(value, tuple):
        with pytest.raises((TypeError, ValueError), match=f"^Thresholds: {name} must "):
            Thresholds(**{name: math.nan})
        with pytest.raises(TypeError, match=f"^Thresholds: {name} must be "):
            Thresholds(**{name: "0.5"})


@pytest.mark.parametrize(
    "edge",
    [
        {"correlation_alert": -1.0, "correlation_off": -1.0, "movement_off": 0.0, "false_independence_alert": 1.0},
        {"quality_alert": 0.0, "quality_off": 0.0, "latency_alert": 0.0, "tau": 0.0, "cooldown": 0},
        {"quality_alert": 1.0, "quality_off": 1.0, "audited_positions": 1, "interval": 1.5, "step_interval": 1.5},
    ],
)
def test_thresholds_at_the_edge_of_their_range_work(edge: dict[str, Any]) -> None:
    model = dependent_model()
    guard = Guard(
        MIBudget(exact_source(model), 0.3), thresholds=Thresholds(**edge), audit_share=1.0, movement_share=1.0
    )
    for turn in range(3):
        seeds = torch.arange(turn * 16, turn * 16 + 16)
        decode(model, torch.full((16, 4), 3), guard, seeds=seeds, temperature=1.0)
        guard.finish(seeds, quality=[0.0, 1.0] * 8, seconds=[0.0, 1.0] * 8)
    assert guard.state.errors == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="audit_share must be from 0 to 1, got 2"):
        Guard(TopK(2), audit_share=2)
    with pytest.raises(TypeError, match=r"Guard: policy must be an object with a method select, .*, got 'topk:2'"):
        Guard("topk:2")  # type: ignore[arg-type]
    for stages in (0.5, ("all",)):
        with pytest.raises(TypeError, match="Thresholds: stages must be "):
            Thresholds(stages=stages)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="movement_share must not be NaN"):
        Guard(TopK(2), movement_share=math.nan)
    guard = Guard(TopK(2))
    with pytest.raises(ValueError, match="step must be a Step with seeds, got one without or a bare number"):
        guard.select(None, None, torch.ones(1, 2, dtype=torch.bool), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quality must be from 0 to 1, got 7"):
        guard.finish(torch.tensor([1]), quality=[7])


def test_pseudo_likelihood_of_what_the_model_knows_for_sure_and_not_at_all() -> None:
    agree = JointTable(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    coins = JointTable(torch.full((2, 2), 0.25))
    tokens, decoded = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[True, True], [False, False]])
    for model, expected in [(agree, [1.0, 1.0]), (coins, [0.5, 1.0])]:
        found = pseudo_likelihood(model, tokens, decoded, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert float(pseudo_likelihood(agree, torch.tensor([[0, 1]]), torch.tensor([[True, True]]))[0]) == 0.0
