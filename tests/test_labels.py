from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mdmi_fast import label_mi
from mdmi_fast.labels import FORMS, Form, masked_pairs, probe_mi
from mdmi_fast.labels.options import Directions
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable, MarkovChain, PottsModel, xor_triple
from mdmi_fast.tasks.sudoku.model import SudokuModel, load_model
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

pytestmark = pytest.mark.arithmetic

LN2 = math.log(2)


class Scripted:
    """A model of two bits that answers what it is told, consistent or not: state -> probabilities of each position."""

    mask_token_id, vocab_size, hidden_size = 2, 2, 1

    def __init__(self, answers: dict[tuple[int, int], list[list[float]]]) -> None:
        self.answers = answers

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        p = torch.tensor([self.answers[a, b] for a, b in tokens.tolist()], dtype=torch.float64)
        return MaskedOutput(p.log(), torch.zeros(*tokens.shape, 1))


FIRST, SECOND = [1.0, 0.0], [0.0, 1.0]
INCONSISTENT = {
    (2, 2): [[0.5, 0.5], [0.95, 0.05]],
    (0, 2): [FIRST, [0.9, 0.1]],
    (1, 2): [SECOND, [0.7, 0.3]],
    (2, 0): [[0.5, 0.5], FIRST],
    (2, 1): [[0.5, 0.5], SECOND],
}


def random_table(length: int, vocabulary: int, *, peaked: float = 2.0, seed: int = 0) -> JointTable:
    weights = torch.randn((vocabulary,) * length, generator=torch.Generator().manual_seed(seed)).double()
    return JointTable((peaked * weights).exp())


@pytest.fixture(scope="module")
def sudoku() -> SudokuModel:
    return load_model("strong")


@pytest.fixture(scope="module")
def puzzles() -> Tensor:
    return torch.from_numpy(validation_puzzles().givens[:3]).long()


def nearly_solved(puzzles: Tensor, blanks: int) -> Tensor:
    """The puzzles with only their first blanks left open."""
    solutions = torch.from_numpy(validation_puzzles().solutions[: len(puzzles)]).long()
    masked = puzzles == 0
    return solutions.masked_fill(masked & (masked.cumsum(1) <= blanks), 0)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_information_of_an_enumerated_joint(form: Form) -> None:
    model = random_table(4, 3)
    tokens = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 3], [3, 1, 0, 3], [2, 1, 0, 3], [2, 1, 0, 2]])
    labels = label_mi(model, tokens, form=form)
    for row, sequence in enumerate(tokens):
        # float32 results; sums of a few terms below ln 3
        torch.testing.assert_close(labels.mi[row].double(), model.mutual_information(sequence), rtol=0, atol=1e-6)
        for i, token in enumerate(sequence.tolist()):
            expected = model.entropy(sequence, (i,)) if token == 3 else 0.0
            assert float(labels.entropy[row, i]) == pytest.approx(expected, abs=1e-6)
    assert labels.mi.dtype == labels.entropy.dtype == labels.bound.dtype == torch.float32
    assert labels.bound.abs().max() == 0
    assert labels.asymmetry.max() < 1e-6
    assert labels.passes.tolist() == [1 + 4 * 3, 1 + 3 * 3, 1 + 2 * 3, 1, 1]  # one masked position is no pair


def potts() -> PottsModel:
    generator = torch.Generator().manual_seed(3)
    return PottsModel(torch.randn(5, 4, generator=generator), torch.randn(5, 5, 4, 4, generator=generator))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "model",
    [potts(), MarkovChain(torch.rand(5) + 0.1, torch.rand(5, 5) ** 3, length=7), random_table(5, 4, peaked=4.0)],
    ids=["potts", "chain", "table"],
)
def test_every_form_gives_the_information_of_every_exact_model(model: Any, form: Form) -> None:
    mask = model.mask_token_id
    for visible in ((), (0,), (2,), (1, 3)):
        tokens = torch.full((model.length,), mask)
        tokens[list(visible)] = 1
        torch.testing.assert_close(
            label_mi(model, tokens, form=form).mi.double(), model.mutual_information(tokens), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("form", FORMS)
def test_two_bits_by_hand(form: Form) -> None:
    # H(.5, .5) + H(.6, .4) - H(.4, .1, .2, .3) = 0.693147 + 0.673012 - 1.279854
    model = JointTable(torch.tensor([[0.4, 0.1], [0.2, 0.3]]))
    labels = label_mi(model, torch.tensor([2, 2]), form=form)
    torch.testing.assert_close(labels.mi, torch.tensor([[0, 0.086305], [0.086305, 0]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_pair_of_an_xor_triple_shows_its_total_correlation(form: Form) -> None:
    model, tokens = xor_triple(), torch.tensor([2, 2, 2])
    assert label_mi(model, tokens, form=form).mi.abs().max() < 1e-6
    assert model.total_correlation(tokens, (0, 1, 2)) == pytest.approx(LN2)
    given = label_mi(model, torch.tensor([2, 2, 0]), form=form).mi
    torch.testing.assert_close(given[:2, :2], LN2 * (1 - torch.eye(2)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "forward"),
    [
        # H(.8, .2) - (H(.9, .1) + H(.7, .3)) / 2 = 0.500402 - 0.467974
        ("joint", 0.032429),
        # H(.95, .05) - 0.467974 = 0.198515 - 0.467974: the model grows less sure
        ("entropy", -0.269459),
        # (KL(.9 .1 | .95 .05) + KL(.7 .3 | .95 .05)) / 2 = (0.020654 + 0.323757) / 2
        ("kl", 0.172206),
    ],
)
def test_the_forms_of_an_inconsistent_model_by_hand(form: Form, forward: float) -> None:
    labels = label_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]), form=form)
    # The first bit moves the second and not the other way round.
    torch.testing.assert_close(labels.mi[0, 0, 1], torch.tensor(forward / 2), rtol=0, atol=2e-6)
    assert labels.mi.equal(labels.mi.mT)
    assert float(labels.asymmetry) == pytest.approx(abs(forward), abs=2e-6)


def test_one_probing_run_tells_all_forms() -> None:
    probe = probe_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]))
    assert tuple(probe.directed) == FORMS == get_args(Form)
    for form in FORMS:
        assert probe.directed[form][0, 1, 0] == pytest.approx(0, abs=1e-6)
        assert probe.labels(form).mi.equal(label_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]), form=form).mi)


def test_a_value_that_only_a_probe_makes_possible_costs_infinitely_many_nats_in_kl_form() -> None:
    answers = INCONSISTENT | {(2, 2): [[0.5, 0.5], [1.0, 0.0]]}
    labels = label_mi(Scripted(answers), torch.tensor([2, 2]), form="kl")
    assert labels.mi.tolist() == [[0, math.inf], [math.inf, 0]]


def test_passes_are_counted_and_impossible_values_not_probed() -> None:
    model = JointTable(torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    finished: list[int] = []
    probe = probe_mi(model, torch.tensor([[3, 3], [0, 3], [0, 2]]), batch_size=2, progress=finished.append)
    assert probe.passes.tolist() == [1 + 1 + 2, 1, 1]
    assert sum(finished) == int(probe.passes.sum())
    # A certain position shares nothing in the joint form.
    assert label_mi(model, torch.tensor([3, 3])).passes == 1 + 2


def test_a_certain_position_is_probed_for_the_forms_that_see_a_drift() -> None:
    answers = INCONSISTENT | {(2, 2): [FIRST, [0.5, 0.5]]}
    # H(.5, .5) - H(.9, .1) = KL(.9 .1 | .5 .5) = 0.368064 one way; H(1, 0) - H(.5, .5) = -ln 2 the other
    assert label_mi(Scripted(answers), torch.tensor([2, 2]), form="joint").mi.abs().max() < 1e-6
    entropy = label_mi(Scripted(answers), torch.tensor([2, 2]), form="entropy").mi
    assert float(entropy[0, 1]) == pytest.approx((0.368064 - LN2) / 2, abs=1e-6)


class Plain:
    """A model without what labelling may know of it besides."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.mask_token_id, self.vocab_size, self.hidden_size = model.mask_token_id, model.vocab_size, model.hidden_size

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        output: MaskedOutput = self.model(tokens)
        return output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("epsilon", [1e-4, 0.01, 0.05, 0.2, 0.7])
def test_what_is_left_out_errs_within_its_bound_on_exact_models(form: Form, epsilon: float) -> None:
    saved = 0
    for seed in range(4):
        model = random_table(3, 6, peaked=3.0, seed=seed)
        tokens = torch.tensor([[6, 6, 6], [6, 6, 1], [6, 0, 6]])
        full, part = label_mi(model, tokens, form=form), label_mi(model, tokens, form=form, epsilon=epsilon)
        assert part.bound.max() <= epsilon
        assert ((part.mi - full.mi).abs() <= part.bound + 1e-6).all()  # 1e-6: float32 sums
        assert (part.passes <= full.passes).all()
        saved += int((full.passes - part.passes).sum())
    assert saved > 0 or epsilon < 0.05 or form == "kl"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("epsilon", [0.005, 0.1])
def test_what_is_left_out_errs_within_its_bound_on_a_trained_model(
    sudoku: SudokuModel, puzzles: Tensor, form: Form, epsilon: float
) -> None:
    tokens = puzzles[:2]
    full, part = label_mi(Plain(sudoku), tokens, form=form), label_mi(sudoku, tokens, form=form, epsilon=epsilon)
    assert part.bound.max() <= epsilon
    assert ((part.mi - full.mi).abs() <= part.bound + 2e-6).all()  # 2e-6: float32 sums and answers
    assert part.entropy.equal(full.entropy)
    assert (part.passes < full.passes).all() or form == "kl"  # a digit that cannot stand leaves that form no bound


def test_the_bound_of_a_dropped_tail_is_the_entropy_that_was_not_probed() -> None:
    # p = (.9, .1): with one of the values probed, all of H(.9, .1) = 0.325083 is unknown; with both, nothing
    model = JointTable(torch.tensor([[0.9, 0.0], [0.0, 0.1]]))
    labels = label_mi(model, torch.tensor([2, 2]), epsilon=0.3252)
    assert (labels.passes, float(labels.mi[0, 1])) == (1, 0.0)
    assert float(labels.bound[0, 1]) == pytest.approx(0.325083, abs=1e-6)
    labels = label_mi(model, torch.tensor([2, 2]), epsilon=0.3250)
    assert (labels.passes, float(labels.bound[0, 1])) == (5, 0.0)
    # p = (.90, .09, .01): without the last, h(.01) = 0.056002; the two others share (1 - .01) H(1/11) = 0.301590
    model = JointTable(torch.diag(torch.tensor([0.90, 0.09, 0.01])))
    labels = label_mi(model, torch.tensor([3, 3]), epsilon=0.0561)
    assert labels.passes == 1 + 2 * 2
    assert float(labels.bound[0, 1]) == pytest.approx(0.056002, abs=1e-6)
    assert float(labels.mi[0, 1]) == pytest.approx(0.301590, abs=1e-6)


def test_few_passes_are_needed_on_the_way_from_an_empty_grid_to_a_full_one(
    sudoku: SudokuModel, puzzles: Tensor
) -> None:
    few_clues = puzzles[:1].masked_fill(puzzles[:1].gt(0).cumsum(1) > 9, 0)
    states = torch.cat([torch.zeros_like(few_clues), few_clues, puzzles[:1], nearly_solved(puzzles[:1], 30)])
    labels = label_mi(sudoku, states, epsilon=0.01)
    assert labels.bound.max() <= 0.01
    # 29% on 100 states met while decoding (mdmi-fast bench labels)
    assert labels.passes.sum() < 0.35 * (1 + 9 * (states == 0).sum(-1)).sum()


def test_one_probe_tells_of_all_interchangeable_tokens_that_are_not_visible(sudoku: SudokuModel) -> None:
    tokens = torch.zeros(1, 81, dtype=torch.int64)
    tokens[0, :70] = 1
    tokens[0, 3] = 5
    told, asked = probe_mi(sudoku, tokens), probe_mi(Plain(sudoku), tokens)
    assert (int(told.passes), int(asked.passes)) == (1 + 11 * 3, 1 + 11 * 9)
    for form in FORMS:
        torch.testing.assert_close(told.directed[form], asked.directed[form], rtol=1e-5, atol=2e-6)
    labels = label_mi(sudoku, tokens, samples=2, seed=1)
    torch.testing.assert_close(label_mi(Plain(sudoku), tokens, samples=2, seed=1).mi, labels.mi, rtol=1e-5, atol=2e-6)


def test_relabelled_digits_relabel_the_answer_of_the_sudoku_model(sudoku: SudokuModel, puzzles: Tensor) -> None:
    digits = list(sudoku.interchangeable_tokens)
    for shift in (1, 4):
        relabel = torch.tensor([0, *digits[shift:], *digits[:shift]])
        answer = sudoku(relabel[puzzles]).logits[:, :, relabel]
        torch.testing.assert_close(answer.exp(), sudoku(puzzles).logits.exp(), rtol=0, atol=1e-5)


def test_one_direction_is_enough_where_conditionals_are_consistent() -> None:
    model = MarkovChain(torch.ones(3), torch.eye(3) + 0.1, length=6)
    tokens = torch.tensor([[3] * 6, [3, 3, 0, 3, 3, 3]])
    full, one = label_mi(model, tokens), label_mi(model, tokens, directions="one")
    torch.testing.assert_close(one.mi, full.mi, rtol=0, atol=1e-6)
    assert one.passes.tolist() == [1 + 5 * 3, 1 + 4 * 3]  # all positions but one
    near = label_mi(model, tokens, directions="one", window=1)
    assert near.passes.tolist() == [1 + 3 * 3, 1 + 2 * 3]  # every other position; three and two pairs
    for row, column in ((0, 1), (3, 4), (4, 5)):
        assert float(near.mi[0, row, column]) == pytest.approx(float(full.mi[0, row, column]), abs=1e-6)


def test_the_label_of_one_direction_is_the_reading_in_that_direction() -> None:
    # The first bit moves the second by .032429 and not the other way round: see above.
    labels = label_mi(Scripted(INCONSISTENT), torch.tensor([2, 2]), directions="one")
    assert labels.passes == 1 + 2
    assert float(labels.mi[0, 1]) in (0.0, pytest.approx(0.032429, abs=2e-6))
    assert float(labels.asymmetry) == 0.0  # nothing is known of it


def test_one_direction_errs_within_its_bound_of_full_probing_in_that_direction(
    sudoku: SudokuModel, puzzles: Tensor
) -> None:
    tokens = puzzles[:2]
    full = probe_mi(sudoku, tokens, forms=("joint",)).directed["joint"]
    probe = probe_mi(sudoku, tokens, forms=("joint",), epsilon=0.01, directions="one")
    labels = probe.labels("joint")
    share = probe.known.unsqueeze(-1).float() * masked_pairs(tokens == 0)
    expected = (share * full + (share * full).mT) / (share + share.mT).clamp(min=1)
    assert not probe.known[tokens == 0].all()
    assert ((share + share.mT > 0) | ~masked_pairs(tokens == 0)).all()
    assert labels.bound.max() <= 0.01
    assert ((labels.mi - expected).abs() <= labels.bound + 2e-6).all()


def test_only_pairs_that_were_chosen_are_labelled_and_the_bound_holds_for_the_others_too() -> None:
    model, tokens = random_table(4, 3), torch.tensor([[3, 3, 3, 3]])
    chosen = torch.zeros(1, 4, 4, dtype=torch.bool)
    chosen[0, 0, 2] = chosen[0, 2, 0] = True
    near = (torch.arange(4).unsqueeze(-1) - torch.arange(4)).abs() <= 1
    for form in FORMS:
        full = label_mi(model, tokens, form=form)
        for wanted, options in ((chosen[0], {"pairs": chosen}), (near, {"window": 1})):
            for directions in get_args(Directions):
                part = label_mi(model, tokens, form=form, directions=directions, **options)
                torch.testing.assert_close(part.mi[0][wanted], full.mi[0][wanted])
                assert not part.mi[0][~wanted].any()
                assert ((part.mi - full.mi).abs() <= part.bound + 1e-6).all()
    assert label_mi(model, tokens, pairs=chosen).passes == 1 + 2 * 3
    assert label_mi(model, tokens[0], pairs=chosen[0]).passes == 1 + 2 * 3


@pytest.mark.parametrize("form", FORMS)
def test_samples_err_by_their_standard_error(form: Form) -> None:
    model = random_table(2, 40, peaked=1.0)
    tokens = torch.tensor([40, 40])
    truth = float(model.mutual_information(tokens)[0, 1])
    drawn = [label_mi(model, tokens, form=form, samples=16, seed=seed) for seed in range(60)]
    errors = torch.tensor([float(each.mi[0, 1]) - truth for each in drawn])
    claimed = torch.tensor([float(each.standard_error[0, 1]) for each in drawn])
    if form == "joint":  # low by an order of 1 / samples, as said
        assert -0.1 * truth - 1 / 16 * 40 < float(errors.mean()) < 0
    else:  # unbiased: 60 runs of one standard error each
        assert abs(float(errors.mean())) < 4 * float(claimed.mean()) / 60**0.5
    assert 0.6 < float(errors.std() / claimed.mean()) < 1.6
    assert all(each.passes <= 1 + 2 * 16 for each in drawn)
    # What is proven holds whatever was drawn.
    assert all(bool(((each.mi - truth).abs() <= each.bound + 1e-6)[0, 1]) for each in drawn)


def test_samples_are_drawn_only_where_more_values_are_needed_and_from_the_seed() -> None:
    model, tokens = random_table(2, 6), torch.tensor([[6, 6], [6, 2]])
    exact = label_mi(model, tokens)
    few = label_mi(model, tokens, samples=6)
    assert few.mi.equal(exact.mi)
    assert not few.standard_error.any()
    sampled = [label_mi(model, tokens, samples=3, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0].mi.equal(sampled[1].mi)
    assert not sampled[0].mi.equal(sampled[2].mi)
    assert label_mi(model, tokens[0], samples=3, seed=1).mi.equal(sampled[0].mi[0])
    pieces = label_mi(model, tokens, samples=3, seed=1, batch_size=1)
    torch.testing.assert_close(pieces.mi, sampled[0].mi)


class Small(JointTable):
    """Runs out of memory with more than so many sequences."""

    most = 3

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        if len(tokens) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory, say")
        return super().__call__(tokens, attention_mask)


def test_out_of_memory_halves_the_batch_and_goes_on() -> None:
    weights = random_table(3, 3).joint
    tokens = torch.full((10, 3), 3)
    finished: list[int] = []
    labels = label_mi(Small(weights), tokens, batch_size=64, progress=finished.append)
    torch.testing.assert_close(labels.mi, label_mi(JointTable(weights), tokens).mi)
    assert sum(finished) == int(labels.passes.sum()) == 10 * 10
    model = Small(weights)
    model.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        label_mi(model, tokens, batch_size=64)


def test_bf16_is_the_forward_of_autocast() -> None:
    class Linear(torch.nn.Module):
        mask_token_id, vocab_size, hidden_size = 4, 4, 8

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 8)
            self.mix = torch.nn.Linear(8, 4)
            self.seen: set[torch.dtype] = set()

        def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            hidden = self.embed(tokens)
            logits = self.mix(hidden + 2 * hidden.mean(1, keepdim=True))
            self.seen.add(logits.dtype)
            return MaskedOutput(logits, hidden)

    torch.manual_seed(0)
    model, tokens = Linear(), torch.tensor([[4, 4, 4]])
    full, rough = label_mi(model, tokens), label_mi(model, tokens, precision="bf16")
    assert model.seen == {torch.float32, torch.bfloat16}
    torch.testing.assert_close(rough.mi, full.mi, rtol=0.1, atol=5e-3)  # bfloat16 has 8 bits


def test_labels_of_a_trained_model_are_symmetric_bounded_and_zero_elsewhere(
    sudoku: SudokuModel, puzzles: Tensor
) -> None:
    tokens = nearly_solved(puzzles, 12)
    probe = probe_mi(sudoku, tokens)
    pairs = masked_pairs(tokens == 0)
    for form in FORMS:
        labels = probe.labels(form)
        assert labels.mi.equal(labels.mi.mT)
        assert not labels.mi[~pairs].any()
        assert (labels.asymmetry > 0).all()
    assert (probe.directed["joint"] >= 0).all()
    assert (probe.directed["kl"] >= 0).all()
    # I(X_i; X_j) <= H(X_i), of the row's own marginal
    assert (probe.directed["joint"] <= probe.entropy.unsqueeze(-1) + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_labels_do_not_depend_on_batches_or_mates(sudoku: SudokuModel, puzzles: Tensor, form: Form) -> None:
    tokens = nearly_solved(puzzles, 6)
    tokens[1] = nearly_solved(puzzles, 11)[1]
    together = label_mi(sudoku, tokens, form=form)
    for batch_size in (9, 20):
        for whole, part in zip(together, label_mi(sudoku, tokens, form=form, batch_size=batch_size), strict=True):
            assert whole.equal(part)
    for row, sequence in enumerate(tokens):
        for whole, alone in zip(together, label_mi(sudoku, sequence, form=form), strict=True):
            assert whole[row].equal(alone)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_position_with_more_values_than_a_batch_is_summed_over_batches(
    sudoku: SudokuModel, puzzles: Tensor, batch_size: int
) -> None:
    tokens = torch.cat([nearly_solved(puzzles, 4)[:1], torch.zeros(1, 81, dtype=torch.int64)])
    tokens[1, 10:] = 1  # nonsense, but eight digits are interchangeable
    tokens[1, :5] = 1
    whole = probe_mi(sudoku, tokens)
    pieces = probe_mi(sudoku, tokens, batch_size=batch_size)
    assert pieces.passes.equal(whole.passes)
    for form in FORMS:  # float32 sums in another order
        torch.testing.assert_close(pieces.directed[form], whole.directed[form], rtol=1e-5, atol=2e-6)


def test_a_mask_hides_what_stands_there() -> None:
    model, tokens = random_table(3, 3), torch.tensor([[0, 1, 2], [0, 1, 2]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    before = tokens.clone()
    given, placed = label_mi(model, tokens, mask), label_mi(model, tokens.masked_fill(mask, 3))
    for a, b in zip(given, placed, strict=True):
        assert a.equal(b)
    alone = label_mi(model, tokens[1], mask[1])
    assert alone.mi.equal(given.mi[1])
    assert alone.passes.shape == ()
    assert tokens.equal(before)


def test_masked_pairs_need_two_masked_ends() -> None:
    pairs = masked_pairs(torch.tensor([True, False, True]))
    assert pairs.nonzero().tolist() == [[0, 2], [2, 0]]


def test_padding_is_neither_probed_nor_labelled() -> None:
    model = random_table(3, 3)
    short = JointTable(model.joint.sum(1))
    visible = torch.tensor([True, False, True])
    for padding in range(4):
        padded = label_mi(model, torch.tensor([3, padding, 3]), attention_mask=visible)
        expected = label_mi(short, torch.tensor([3, 3]))
        torch.testing.assert_close(padded.mi[::2, ::2], expected.mi)
        assert not padded.mi[1].any()
        assert padded.passes == expected.passes


def test_no_sequences_give_no_labels() -> None:
    labels = label_mi(random_table(3, 2), torch.zeros(0, 3, dtype=torch.int64))
    assert [tuple(field.shape) for field in labels] == [(0, 3, 3), (0, 3), (0, 3, 3), (0,), (0,)]
    assert labels.standard_error.shape == (0, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "total"}, "form must be one of joint, entropy, kl"),
        ({"epsilon": -0.1}, "epsilon must be at least 0"),
        ({"epsilon": math.nan}, "epsilon must not be NaN"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"window": -1}, "window must be at least 0"),
        ({"directions": "two"}, "directions must be one of both, one, got 'two'"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, got 'fp8'"),
        ({"pairs": torch.ones(1, 3, 3).bool().triu()}, "pairs must be .* symmetric"),
        ({"pairs": torch.ones(3, 3).bool()}, "pairs must be .1, 3, 3. bool"),
        ({"tokens": torch.full((1, 1, 3), 2)}, "tokens must be .B, N. int64, got shape .1, 1, 3."),
        ({"tokens": torch.full((1, 3), 2.0)}, "tokens must be"),
        ({"tokens": torch.full((1, 3), 2, dtype=torch.int32)}, "tokens must be"),
        ({"mask": torch.ones(1, 2, dtype=torch.bool)}, "mask must be .1, 3. bool"),
        ({"mask": torch.ones(1, 3)}, "mask must be"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.int64)}, "attention_mask must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"tokens": torch.full((1, 3), 2), "mask": None} | change
    with pytest.raises(ValueError, match=message):
        label_mi(random_table(3, 2), arguments.pop("tokens"), arguments.pop("mask"), **arguments)


@pytest.mark.parametrize("state", [(2, 2), (1, 2)], ids=["unprobed", "probed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_answers_nan_is_refused(state: tuple[int, int], form: Form) -> None:
    answers = INCONSISTENT | {state: [[0.5, 0.5], [math.nan, 0.5]]}
    with pytest.raises(ValueError, match=r"give no distribution .* sequence 1, position \d"):
        label_mi(Scripted(answers | {(0, 1): [FIRST, SECOND]}), torch.tensor([[0, 1], [2, 2]]), form=form)


def test_nan_at_a_visible_position_is_no_error() -> None:
    answers = {(2, 0): [[0.5, 0.5], [math.nan, math.nan]]}
    answers |= {(token, 0): [[0.5, 0.5], [math.nan, math.nan]] for token in (0, 1)}
    for form in FORMS:
        labels = label_mi(Scripted(answers), torch.tensor([2, 0]), form=form)
        assert not labels.mi.any()
