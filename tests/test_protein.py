"""The antibody task: chains out of an alignment, states, and scores against closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.loading import find_for_model
from mdmi_fast.statistics import mean_interval
from mdmi_fast.tasks.likelihood import surprise
from mdmi_fast.tasks.protein.chains import Chain, fetch_chains, read_fasta, translate, write_fasta
from mdmi_fast.tasks.protein.letters import LetterTokenizer
from mdmi_fast.tasks.protein.models import RESIDUES
from mdmi_fast.tasks.protein.scores import Reference, diversity, jensen_shannon
from mdmi_fast.tasks.protein.states import TASKS, decoding_states, heavy_states, prompts, split
from mdmi_fast.tasks.protein.structure import enrichment, known_pairs, rank_share

CODON = {"A": "GCT", "C": "TGT", "W": "TGG", "G": "GGT", "S": "AGT", "D": "GAT", "Y": "TAT"}


def row(**changed: str) -> dict[str, str]:
    """An aligned rearrangement: A in frameworks, G in the first two loops, S in the third, cysteines and W in place."""
    residues = ["A"] * 104 + list("SSSDY") + list("WAAAA")
    for start, end in ((27, 38), (56, 65)):
        residues[start - 1 : end] = ["G"] * (end - start + 1)
    residues[22] = residues[103] = "C"
    codons = [CODON[residue] for residue in residues]
    codons[9] = codons[29] = "..."  # gaps in the alignment: the first framework and the first loop are shorter
    return {
        "sequence_id": "x",
        "locus": "IGH",
        "productive": "T",
        "sequence_alignment": "".join(codons) + "GC",
        "junction_length": str(3 * 7),
        **changed,
    }


def test_a_rearrangement_becomes_a_chain_with_its_loops_and_cysteines() -> None:
    chain = translate(row())
    assert chain is not None
    assert len(chain.residues) == 112
    assert [chain.residues[a:b] for a, b in chain.cdrs] == ["G" * 11, "G" * 10, "SSSDY"]
    assert [chain.residues[place] for place in chain.cysteines] == ["C", "C"]
    assert chain.cysteines == (21, 101)
    assert chain.residues[chain.cdrs[2][1]] == "W"
    regions = chain.regions()
    assert sorted(set(regions)) == list(range(7))
    assert [int((regions == loop).sum()) for loop in (1, 3, 5)] == [11, 10, 5]


@pytest.mark.parametrize(
    "changed",
    [
        {"locus": "IGK"},
        {"productive": "F"},
        {"junction_length": "18"},
        {"sequence_alignment": row()["sequence_alignment"].replace("GCT", "GCN", 1)},
        {"sequence_alignment": row()["sequence_alignment"].replace("GCT", "TAA", 1)},
        {"sequence_alignment": "..." + row()["sequence_alignment"][3:]},
    ],
    ids=["light chain", "not productive", "shifted", "unknown base", "stop", "incomplete"],
)
def test_doubtful_rearrangements_are_left_out(changed: dict[str, str]) -> None:
    assert translate(row(**changed)) is None


def test_chains_go_to_fasta_and_back(tmp_path: Path) -> None:
    chain = translate(row())
    assert chain is not None
    path = tmp_path / "chains.fasta"
    write_fasta([chain, chain._replace(name="y")], path)
    assert read_fasta(path) == [chain, chain._replace(name="y")]
    path.write_text(">z\nACD\n")
    with pytest.raises(ValueError, match="z does not say where its loops and cysteines are"):
        read_fasta(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no chains"):
        read_fasta(path)


@pytest.mark.slow
def test_the_package_holds_a_thousand_chains() -> None:
    """Needs apt-get and a Debian mirror; 2.4 MB."""
    try:
        chains = fetch_chains()
    except OSError as error:
        pytest.skip(f"offline, or no Debian: {error}")
    assert len(chains) > 1000
    assert len({chain.residues for chain in chains}) == len(chains)
    assert all(chain.residues[place] == "C" for chain in chains for place in chain.cysteines)


def test_a_missing_package_manager_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="apt-get is missing"):
        fetch_chains()


def random_chains(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(RESIDUES), size=int(random.integers(112, 130)))) for _ in range(count)]


def chain_of(residues: str) -> Chain:
    return Chain("x", residues, ((25, 33), (50, 58), (95, 105)), (21, 94))


def test_prompts_hide_all_the_loops_or_a_half() -> None:
    chains = [chain_of(residues) for residues in random_chains(3)]
    everything, loops, half = (prompts(task, chains, 5, seed=1) for task in TASKS)
    assert [len(text) for text in everything] == [len(chains[n % 3].residues) for n in range(5)]
    assert all(set(text) == {"_"} for text in everything)
    assert all(text.count("_") == 26 and text[25:33] == "_" * 8 for text in loops)
    assert all(text.count("_") == len(text) // 2 for text in half)
    assert half[0] != half[3]  # the same chain, another half
    assert half == prompts("complete", chains, 5, seed=1)


def test_chains_are_split_once_and_for_all() -> None:
    chains = [chain_of(residues) for residues in random_chains(40)]
    train, judge = split(chains, longest=125)
    assert not set(train) & set(judge)
    assert len(train) + len(judge) == sum(len(chain.residues) <= 125 for chain in chains)
    assert (train, judge) == split(chains, longest=125)


TOKENIZER = LetterTokenizer(RESIDUES, first=4, start=0, end=2, mask=24, pad=1)


class Uniform:
    """Knows nothing: 20 residues with equal probability; the hidden state is the position."""

    mask_token_id, vocab_size, hidden_size, tokenizer = 24, 25, 1, TOKENIZER

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        logits = torch.zeros(*tokens.shape, 25)
        logits[..., [0, 1, 2, 3, 24]] = -torch.inf
        return MaskedOutput(logits, torch.arange(tokens.shape[1]).float().expand(tokens.shape).unsqueeze(-1))


def test_states_are_between_the_prompt_and_the_answer() -> None:
    chains = [chain_of(residues) for residues in random_chains(6)]
    states = decoding_states(Uniform(), TOKENIZER, chains, 12, seed=3)
    assert torch.equal(states, decoding_states(Uniform(), TOKENIZER, chains, 12, seed=3))
    masked = (states == 24).sum(dim=1)
    assert int(masked.min()) >= 1
    assert len(set(masked.tolist())) > 6
    texts = TOKENIZER.decode(states)
    assert {len(text) for text in texts} <= {len(chain.residues) for chain in chains}
    assert all(state[0] == 0 and (state == 2).sum() == 1 for state in states)


def test_states_to_label_come_from_chains_that_are_fetched_once_and_judge_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [chain_of(residues) for residues in random_chains(8)]
    fetched: list[int] = []

    def fetch() -> list[Chain]:
        fetched.append(1)
        return chains

    monkeypatch.setenv("MDMI_CACHE", str(tmp_path))
    monkeypatch.setattr("mdmi_fast.tasks.protein.chains.fetch_chains", fetch)
    model = Uniform()
    model.max_length, model.pad_token_id = 144, 1  # type: ignore[attr-defined]
    states = heavy_states(model, 6, seed=2)
    assert [state.tolist() for state in heavy_states(model, 6, seed=2)] == [state.tolist() for state in states]
    assert fetched == [1]
    assert all(state[0] == 0 and state[-1] == 2 and (state == 24).any() for state in states)
    train, _ = split(chains, longest=142)
    assert {len(state) - 2 for state in states} <= {len(chain.residues) for chain in train}
    assert find_for_model("mdmi_fast.states", "sapiens:heavy") is heavy_states


def test_surprise_of_a_model_that_knows_nothing_is_ln_20() -> None:
    chains = random_chains(5)
    values = surprise(Uniform(), chains, [range(10, 50)] * 5)
    assert values == pytest.approx([math.log(20)] * 5)


class Watching(Uniform):
    """Remembers which places were masked; thinks less of a residue the further back it stands."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        self.seen.append((tokens[0] == 24).nonzero().squeeze(-1).tolist())
        output = super().__call__(tokens)
        output.logits[..., 4] = -torch.arange(tokens.shape[1]).float()  # of A; of the others 0
        return output


def test_every_place_is_judged_once_a_quarter_of_them_at_a_time() -> None:
    judge = Watching()
    (value,) = surprise(judge, ["A" * 112], [range(20, 30)])
    assert sorted(place for places in judge.seen for place in places) == list(range(21, 31))  # behind the start token
    assert sorted(map(len, judge.seen)) == [2, 2, 3, 3]
    places = np.arange(21, 31)
    assert value == pytest.approx(float((places + np.log(19 + np.exp(-places))).mean()))


def test_texts_judged_in_one_pass_take_turns_with_their_places() -> None:
    judge = Watching()
    surprise(judge, random_chains(4), [range(20, 30)] * 4, passes=1)
    assert len(judge.seen) == 4
    assert sorted(place for places in judge.seen for place in places) == list(range(21, 31))


def test_divergences_have_their_closed_forms() -> None:
    assert jensen_shannon(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(math.log(2))
    assert jensen_shannon(np.array([0.5, 0.5]), np.array([0.5, 0.5])) == pytest.approx(0)
    # The mixture is (3/4, 1/4); of the two halves only the second has an entropy, ln 2.
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) - math.log(2) / 2
    assert jensen_shannon(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == pytest.approx(expected)
    only_a, only_w = ["A" * 120] * 3, ["W" * 120] * 3
    apart = Reference(only_a).compare(only_w)
    assert [estimate.value for estimate in apart] == pytest.approx([math.log(2)] * 3)
    same = Reference(only_a).compare(only_a)
    assert [estimate.value for estimate in same] == pytest.approx([0.0] * 3, abs=1e-12)


def test_divergence_of_position_pairs_sees_what_marginals_do_not() -> None:
    """Chains in which one place copies another, against chains with the same frequencies and no copying."""
    random = np.random.default_rng(0)

    def make(copying: bool) -> list[str]:
        chains = []
        for _ in range(400):
            chain = list("A" * 120)
            chain[3] = str(random.choice(["A", "W"]))
            chain[50] = chain[3] if copying else str(random.choice(["A", "W"]))
            chains.append("".join(chain))
        return chains

    copies, independent, again = make(True), make(False), make(False)
    reference = Reference(independent)
    assert reference.compare(copies).position_pair.low > reference.compare(again).position_pair.high


def test_interval_of_a_mean_and_of_a_divergence_covers_the_value() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    estimate = mean_interval(values)
    assert estimate.value == 2.5
    assert estimate.high - estimate.value == pytest.approx(1.96 * values.std(ddof=1) / 2)
    found = Reference(random_chains(50)).compare(random_chains(50, seed=1))
    assert all(entry.low < entry.value < entry.high for entry in found)


def test_a_difference_is_that_of_the_divergences_and_leaves_out_what_both_share() -> None:
    reference, chains = Reference(random_chains(50)), random_chains(50, seed=1)
    changed = [chain[:60] + "W" * 5 + chain[65:] for chain in chains]
    difference = reference.compare(changed, minus=chains)
    apart, before = reference.compare(changed), reference.compare(chains)
    for found, first, second in zip(difference, apart, before, strict=True):
        assert found.value == pytest.approx(first.value - second.value)
    width, alone = difference.two_mer.high - difference.two_mer.low, apart.two_mer.high - apart.two_mer.low
    assert width < alone / 2  # 115 of 120 residues are the same in both
    assert all(estimate.low == estimate.high == 0 for estimate in reference.compare(chains, minus=chains))


def test_collapse_shows_in_diversity() -> None:
    assert diversity(["A" * 120] * 4) == (0.25, 1.0)
    distinct, identity = diversity(random_chains(60))
    assert distinct == 1.0
    assert identity == pytest.approx(1 / 20, abs=0.01)
    with pytest.raises(ValueError, match="at least 100 residues, got one of 5"):
        diversity(["A" * 5, "A" * 120])


def test_commands_write_what_the_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from mdmi_fast.tasks.protein import __main__ as commands

    model = Uniform()
    model.max_length = 144  # type: ignore[attr-defined]
    monkeypatch.setattr(commands, "load_model", lambda name: model)
    chains = tmp_path / "chains.fasta"
    write_fasta([chain_of(residues) for residues in random_chains(8)], chains)
    for command in (["states"], ["prompts", "--task", "infill"]):
        out = tmp_path / f"{command[0]}.jsonl"
        arguments = [*command, "--chains", str(chains), "--count", "3", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["protein", *arguments])
        commands.main()
        assert len(out.read_text().splitlines()) == 3
    monkeypatch.setattr("sys.argv", ["protein", "fasta", str(tmp_path / "prompts.jsonl")])
    commands.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ">0"
    assert lines[1].count("_") == 26


def test_known_pairs_are_what_their_names_say() -> None:
    chain = chain_of("A" * 112)
    known = known_pairs(chain)
    assert all((pairs == pairs.T).all() for pairs in known.values())
    assert np.argwhere(known["cysteines"]).tolist() == [[21, 94], [94, 21]]
    assert known["V gene"][25, 55]
    assert known["V gene"][10, 26]
    assert known["V gene"][10, 40]
    assert not known["V gene"][26, 100]
    assert known["CDR3"][95, 104]
    assert not known["CDR3"][95, 99]  # too near to each other
    assert known["loops"][30, 52]
    assert not known["loops"][26, 32]


def test_enrichment_counts_known_pairs_and_sees_when_there_are_too_many() -> None:
    random = np.random.default_rng(0)
    mi = random.random((60, 60)) * 0.1
    mi = mi + mi.T
    known = np.zeros((60, 60), dtype=bool)
    block = np.arange(40, 60)
    known[np.ix_(block, block)] = True
    nothing = enrichment(mi, known)
    assert nothing.top == 12
    assert nothing.p > 0.05
    mi[np.ix_(block, block)] += 1
    everything = enrichment(mi, known)
    assert everything.known == 12
    assert everything.expected == pytest.approx(12 * (14 * 15 / 2) / (54 * 55 / 2))
    assert everything.p == pytest.approx(1 / 2001)


def test_rank_share_is_small_for_the_largest_pair() -> None:
    mi = np.zeros((30, 30))
    mi[3, 20] = mi[20, 3] = 1.0
    pairs = 24 * 25 / 2
    assert rank_share(mi, (3, 20)) == pytest.approx(1 / pairs)
    assert rank_share(mi, (3, 21)) == 1.0
