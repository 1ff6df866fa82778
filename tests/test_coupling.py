"""A coupling learned from decoded sequences, on models whose joint distribution is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import (
    PairwiseCoupling,
    draw_trajectories,
    evaluate_coupling,
    load_coupling,
    load_model,
    train_coupling,
)
from mdmi_fast.cli import main
from mdmi_fast.coupling import Trajectories
from mdmi_fast.coupling.draws import ask, chunks, divergence, pairs_of
from mdmi_fast.decoding.coupling import Coupling
from mdmi_fast.decoding.policies import Step
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.sudoku.coupling import SudokuCoupling

N = 6


class Chain(JointTable):
    """Six spins, each like its neighbour with probability .9, and hidden states that tell what stands beside a position."""

    def __init__(self, alike: float = 0.9) -> None:
        step = torch.tensor([[alike, 1 - alike], [1 - alike, alike]])
        joint = torch.tensor([0.5, 0.5])
        for _ in range(N - 1):
            joint = joint.unsqueeze(-1) * step
        super().__init__(joint)
        self.hidden_size = 6

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        beside = torch.nn.functional.pad(tokens, (1, 1), value=2)
        around = torch.cat([torch.nn.functional.one_hot(beside[:, s : s + N], 3) for s in (0, 2)], -1)
        return MaskedOutput(super().__call__(tokens, attention_mask).logits, around.float())


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.fixture(scope="module")
def trajectories(chain: Chain) -> Trajectories:
    tokens = torch.full((300, N), 2)
    return draw_trajectories(chain, tokens, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trained(chain: Chain, trajectories: Trajectories) -> tuple[PairwiseCoupling, Any]:
    torch.manual_seed(0)
    coupling = PairwiseCoupling(chain.hidden_size, chain.vocab_size, (32,), rank=4, distances=3)
    return train_coupling(coupling, chain, trajectories, states=3000, steps=600, most_drawn=4, held_out=0.2)


def test_trajectories_hold_every_state_on_the_way(chain: Chain) -> None:
    tokens = torch.full((7, N), 2)
    tokens[2, 3:] = 1
    found = draw_trajectories(chain, tokens, generator=torch.Generator().manual_seed(1))
    assert found.lengths.tolist() == [6, 6, 3, 6, 6, 6, 6]
    assert found.order[2, 3:].tolist() == [-1] * 3
    for sequence, length in zip(found.order, found.lengths, strict=True):
        assert sorted(x for x in sequence.tolist() if x >= 0) == list(range(int(length)))
    rows = torch.arange(7)
    assert found.states(rows, torch.zeros(7, dtype=torch.int64)).equal(tokens)
    assert found.states(rows, found.lengths).equal(found.tokens)
    assert (found.states(rows, torch.ones(7, dtype=torch.int64)) == 2).sum(-1).tolist() == [5, 5, 2, 5, 5, 5, 5]
    with pytest.raises(ValueError, match="with a masked position in every sequence"):
        draw_trajectories(chain, torch.zeros(2, N, dtype=torch.int64))


def test_trajectories_come_back_from_their_file(trajectories: Trajectories, tmp_path: Path) -> None:
    path = tmp_path / "trajectories.safetensors"
    trajectories.save(path)
    found = Trajectories.load(path)
    assert found.tokens.equal(trajectories.tokens)
    assert found.order.equal(trajectories.order)
    assert found.mask_token_id == 2
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="holds no trajectories"):
        Trajectories.load(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        Trajectories.load(tmp_path / "none")


def test_draws_are_what_the_model_says_before_and_after(chain: Chain, trajectories: Trajectories) -> None:
    rows, passes, counts = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([1, 3])
    draws = ask(chain, trajectories, rows, passes, counts)
    assert draws.drawn.sum(-1).tolist() == [1, 3]
    assert draws.left.sum(-1).tolist() == [5, 1]
    state = trajectories.states(rows, passes)
    exact = chain(state).logits.float().log_softmax(-1).clamp(min=-60)
    torch.testing.assert_close(draws.before.float(), exact, atol=2e-2, rtol=2e-3)  # half precision, down to -60
    after = chain(state.where(~draws.drawn, trajectories.tokens[rows])).logits.float().log_softmax(-1).clamp(min=-60)
    torch.testing.assert_close(draws.after.float(), after, atol=2e-2, rtol=2e-3)
    pairs = pairs_of(draws.of(torch.tensor([0])), reach=1)
    assert set((pairs.j - pairs.a).tolist()) <= {-1, 1}


def test_base_states_are_spread_over_passes_and_counts(trajectories: Trajectories) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = list(chunks(trajectories, states=1000, most=4, generator=generator))
    rows, passes, counts = (torch.cat(field) for field in zip(*parts, strict=True))
    assert len(rows) == 1000
    assert bool((passes + counts <= trajectories.lengths[rows] - 1).all())
    assert set(counts.tolist()) == {1, 2, 3, 4}
    assert set(passes.tolist()) == {0, 1, 2, 3, 4}


def test_what_a_drawn_token_does_is_learned(trained: tuple[PairwiseCoupling, Any], chain: Chain) -> None:
    coupling, report = trained
    assert report.explained.value > 0.9
    assert report.explained.low > report.control.high
    assert set(report.by_drawn) == {"1", "2-3", "4-7"}
    fresh = draw_trajectories(chain, torch.full((60, N), 2), generator=torch.Generator().manual_seed(5))
    again = evaluate_coupling(coupling, chain, fresh, states=200, most_drawn=4)
    assert again.explained.value > 0.85
    assert not coupling.training


def test_a_pass_adds_up_what_each_drawn_token_did(trained: tuple[PairwiseCoupling, Any], chain: Chain) -> None:
    coupling, _ = trained
    assert isinstance(coupling, Coupling)
    tokens = torch.full((2, N), 2)
    output = chain(tokens)
    order = torch.tensor([[2, 3, 1], [5, 4, -1]])
    with torch.no_grad():
        one_pass = coupling.begin(Step.of(0), output.hidden, order)
        assert one_pass.correction(0) is None
        one_pass.tell(0, torch.tensor([1, 0]))
        second = one_pass.correction(1)
        assert second is not None
        drawn = (output.logits[:, 0] + second).softmax(-1)
        # position 3 beside a 1, position 4 beside a 0
        assert drawn[0, 1] > 0.8
        assert drawn[1, 0] > 0.8
        one_pass.tell(1, torch.tensor([1, 0]))
        third = one_pass.correction(2)
        assert third is not None
        assert torch.equal(third[1], torch.zeros(chain.vocab_size))  # nothing is drawn there
        alone = coupling.begin(Step.of(0), output.hidden[:1], order[:1])
        alone.tell(0, torch.tensor([1]))
        first_of_many = alone.correction(1)
        assert first_of_many is not None
        assert torch.equal(first_of_many[0], second[0])  # the same bits in every batch


def test_pairs_that_are_far_apart_are_not_corrected(chain: Chain) -> None:
    coupling = PairwiseCoupling(chain.hidden_size, chain.vocab_size, (4,), rank=2, distances=2)
    one_pass = coupling.begin(Step.of(0), torch.randn(1, N, 6), torch.tensor([[0, 3, 2]]))
    one_pass.tell(0, torch.tensor([1]))
    far, near = one_pass.correction(1), one_pass.correction(2)
    assert far is not None
    assert near is not None
    assert not far.any()
    assert near.any()


def test_training_gives_the_same_weights_again(chain: Chain, trajectories: Trajectories) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        coupling = PairwiseCoupling(chain.hidden_size, chain.vocab_size, (8,), rank=2, distances=2)
        steps: list[Any] = []
        train_coupling(coupling, chain, trajectories, states=64, steps=120, most_drawn=2, on_progress=steps.append)
        assert [(p.stage, p.step) for p in steps] == [("pairs", 100)]
        results.append(coupling.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])


def test_a_coupling_comes_back_from_its_folder(
    trained: tuple[PairwiseCoupling, Any], chain: Chain, tmp_path: Path
) -> None:
    coupling, _ = trained
    coupling.save_pretrained(tmp_path)
    found = load_coupling(tmp_path)
    assert found.summary() == coupling.summary()
    assert found.strength == coupling.strength
    found.check_model(chain)
    with pytest.raises(ValueError, match="was trained on a model of"):
        found.check_model(Chain(0.7))
    with pytest.raises(ValueError, match="is for hidden states of width 6 and 2 tokens"):
        found.check_model(JointTable(torch.ones(3, 3)))
    config = json.loads((tmp_path / "coupling.json").read_text())
    config["configuration"]["rank"] = 3
    (tmp_path / "coupling.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="do not make a coupling"):
        load_coupling(tmp_path)
    for damage in ("{}", "[]", '{"configuration": 3}', "no json"):
        (tmp_path / "coupling.json").write_text(damage)
        with pytest.raises(ValueError, match=r"coupling"):
            load_coupling(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_coupling(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": 0}, "states, steps and most_drawn must be at least 1"),
        ({"steps": 0}, "states, steps and most_drawn must be at least 1"),
        ({"most_drawn": 0}, "states, steps and most_drawn must be at least 1"),
        ({"held_out": 1.0}, "held_out must be a share between 0 and 1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str, chain: Chain, trajectories: Trajectories) -> None:
    coupling = PairwiseCoupling(chain.hidden_size, chain.vocab_size, (4,))
    with pytest.raises(ValueError, match=message):
        train_coupling(coupling, chain, trajectories, **options)


def test_what_is_no_coupling_and_no_trajectory_is_refused(
    trained: tuple[PairwiseCoupling, Any], chain: Chain, trajectories: Trajectories
) -> None:
    coupling, _ = trained
    for call in (train_coupling, evaluate_coupling):
        with pytest.raises(TypeError, match="coupling must be a LearnedCoupling, got 'chain'"):
            call("chain", chain, trajectories)  # type: ignore[operator]
        with pytest.raises(TypeError, match="trajectories must be a Trajectories, got 3"):
            call(coupling, chain, 3)  # type: ignore[operator]
    with pytest.raises(ValueError, match="states and most_drawn must be at least 1, got 0 and 16"):
        evaluate_coupling(coupling, chain, trajectories, states=0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        draw_trajectories(chain, torch.full((2, N), 2), temperature=0.0)


def test_other_sizes_are_refused(chain: Chain, trajectories: Trajectories) -> None:
    with pytest.raises(ValueError, match="coupling must be for hidden states of 6 and 2 tokens"):
        train_coupling(PairwiseCoupling(5, 2), chain, trajectories)
    with pytest.raises(ValueError, match=r"hidden must be \[R, N, 5\]"):
        PairwiseCoupling(5, 2).begin(Step.of(0), torch.randn(1, N, 6), torch.tensor([[0, 1]]))
    for sizes in ({"hidden_size": 0}, {"rank": 0}, {"layers": ()}, {"distances": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            PairwiseCoupling(**{"hidden_size": 4, "vocab_size": 2, **sizes})
    short = Trajectories(trajectories.tokens[:3], torch.full((3, N), -1), 2)
    with pytest.raises(ValueError, match="two sequences of two passes or more"):
        train_coupling(PairwiseCoupling(6, 2), chain, short)


def test_the_command_trains_and_goes_on_with_the_sequences_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "boards.txt", tmp_path / "coupling"
    solved = "".join(str((3 * (row % 3) + row // 3 + column) % 9 + 1) for row in range(9) for column in range(9))
    data.write_text("".join(f"{solved[:k]}{'0' * 20}{solved[k + 20 :]}\n" for k in range(0, 60, 10)))
    command = ["couple", "--model", "sudoku:weak", "--data", str(data), "--out", str(out)]
    command += ["--states", "40", "--steps", "20", "--most-drawn", "2", "--layers", "4", "--held-out", "0.5"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "explained of the change" in said
    assert load_coupling(out).provenance["sequences"] == 6
    kept = (out / "trajectories-00000.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    assert (out / "trajectories-00000.safetensors").stat().st_mtime_ns == kept
    data.write_text(f"{solved[:60]}{'0' * 21}\n{'0' * 30}{solved[30:]}\n")
    assert main(command) == 1
    assert "is of other sequences than" in capsys.readouterr().err
    assert isinstance(load_coupling(out), SudokuCoupling)
    assert main([*command, "--temperature", "0"]) == 2
    assert main([*command, "--rank", "3"]) == 2
    assert "--rank belongs to --architecture general" in capsys.readouterr().err


def test_three_bits_of_which_one_is_the_parity_of_the_others_are_left_alone() -> None:
    """No pair of them depends on each other: what pairs cannot show, a coupling must not make worse."""
    joint = torch.zeros(2, 2, 2)
    for a in (0, 1):
        for b in (0, 1):
            joint[a, b, a ^ b] = 0.25
    model = JointTable(joint)
    found = draw_trajectories(model, torch.full((200, 3), 2), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    coupling = PairwiseCoupling(model.hidden_size, 2, (8,), rank=2, distances=2)
    coupling, _ = train_coupling(coupling, model, found, states=600, steps=300, most_drawn=1)
    draws = ask(model, found, *next(chunks(found, states=200, most=1, generator=torch.Generator().manual_seed(2))))
    first = draws.drawn.sum(-1) + draws.left.sum(-1) == 3  # nothing stood there before
    from mdmi_fast.coupling.evaluate import after_draws

    some = draws.of(first.nonzero().squeeze(-1))
    with torch.no_grad():
        assert float(divergence(some.after[some.left], after_draws(coupling, some)).mean()) < 0.01


def test_the_sudoku_coupling_does_not_care_what_a_digit_is_called() -> None:
    model, coupling = load_model("sudoku:weak"), SudokuCoupling((12, 6)).eval()
    board = torch.zeros(1, 81, dtype=torch.int64)
    board[0, :9] = torch.tensor([5, 3, 0, 0, 7, 0, 0, 0, 9])
    renamed = torch.tensor([0, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    order, drawn = torch.tensor([[2, 3, 40, 5]]), torch.tensor([4])

    def correction(tokens: Tensor, told: Tensor) -> Tensor:
        one_pass = coupling.begin(Step.of(0), model(tokens).hidden, order)
        one_pass.tell(0, told)
        one_pass.tell(1, told)
        found = one_pass.correction(3)
        assert found is not None
        return found[0]

    with torch.no_grad():
        mine, theirs = correction(board, drawn), correction(renamed[board], renamed[drawn])
    torch.testing.assert_close(mine, theirs[renamed], rtol=1e-4, atol=1e-5)
    assert mine[0] == 0.0
    assert mine.abs().max() > 0


def test_the_sudoku_coupling_comes_back_from_its_folder(tmp_path: Path) -> None:
    SudokuCoupling((12, 6)).save_pretrained(tmp_path)
    found = load_coupling(tmp_path)
    assert isinstance(found, SudokuCoupling)
    assert found.n_parameters == 1_136
    with pytest.raises(ValueError, match="PairwiseCoupling reads 'general'"):
        PairwiseCoupling.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers must be one width or more"):
        SudokuCoupling(())
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_coupling(tmp_path / "none")


def test_sequences_by_entropy_write_the_surest_position_first(chain: Chain) -> None:
    tokens = torch.full((5, N), 2)
    tokens[:, 2] = 1
    found = draw_trajectories(chain, tokens, order="entropy", generator=torch.Generator().manual_seed(0))
    assert bool((found.order[:, 1] == 0).all())  # the first of two alike beside what is given
    with pytest.raises(ValueError, match="order must be one of 'random', 'entropy'"):
        draw_trajectories(chain, tokens, order="surest")  # type: ignore[arg-type]
