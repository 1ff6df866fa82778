"""What each policy draws, against what it should: exact models at temperature 1.

python benchmarks/exact_frontier.py

A policy without chance of its own, on a model small enough to list every state, draws from a joint distribution that can
be computed, not only sampled: from every state that a pass may leave, the product of the marginals of what the next
pass writes. So the total variation to the true joint, the passes and what was spent have no noise. The information
divergence KL(true || drawn) is the total correlation of what was written together; the pairwise mutual information is
what a budget on it counts.

Writes benchmarks/results/exact_frontier.csv and .png.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import (
    ConfidenceBudget,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Sequential,
    TopK,
    ops,
)
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import Policy
from mdmi_fast.files import replace_file
from mdmi_fast.models.exact import JointTable

RESULTS = Path(__file__).parent / "results"
V, N = 3, 6
MASK = V
BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 5.0)

State = tuple[int, ...]


def chain() -> JointTable:
    """A Markov chain: neighbours depend on each other, the ends hardly."""
    steps = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]])
    joint = torch.tensor([0.4, 0.3, 0.3])
    for _ in range(N - 1):
        joint = joint.unsqueeze(-1) * steps
    return JointTable(joint)


def pairs() -> JointTable:
    """Three pairs that nearly agree, each independent of the others: high entropies, little dependence."""
    pair = torch.eye(V, dtype=torch.float64) * 0.8 + 0.2 / V
    first = pair.reshape(V, V, 1, 1, 1, 1)
    return JointTable(first * pair.reshape(1, 1, V, V, 1, 1) * pair.reshape(1, 1, 1, 1, V, V))


def topics() -> JointTable:
    """Positions that a hidden topic of three couples all with all, some sure and some not."""
    generator = torch.Generator().manual_seed(5)
    joint = torch.zeros((V,) * N)
    for weight in (0.5, 0.3, 0.2):
        rows = (2.0 * torch.randn(N, V, generator=generator)).softmax(-1)
        one = torch.tensor(weight)
        for row in rows:
            one = one.unsqueeze(-1) * row
        joint += one
    return JointTable(joint)


class Known:
    """Everything that is known of the states of a table, looked up once. The hidden state of a state is its number."""

    def __init__(self, table: JointTable) -> None:
        self.table = table
        self.numbers: dict[State, int] = {}
        self.logits: list[Tensor] = []
        self.mi: list[Tensor] = []

    def number(self, state: State) -> int:
        if state not in self.numbers:
            tokens = torch.tensor(state)
            self.numbers[state] = len(self.logits)
            self.logits.append(self.table(tokens.unsqueeze(0)).logits[0])
            mi = self.table.mutual_information(tokens)
            self.mi.append(mi.where(mi > 1e-12, 0.0))  # what is left of independent positions is rounding
        return self.numbers[state]

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The source of mutual information of policies."""
        return torch.stack([self.mi[number] for number in hidden[:, 0, 0].long().tolist()])


class Drawn(NamedTuple):
    joint: Tensor
    passes: float
    mi: float
    total_correlation: float


def drawn_by(policy: Policy, known: Known) -> Drawn:
    """The joint distribution that decoding with a policy draws from, and what it costs on average."""
    joint = torch.zeros((V,) * N, dtype=torch.float64)
    states: dict[State, float] = {(MASK,) * N: 1.0}
    passes = mi = correlation = 0.0
    index = 0
    while states:
        order = list(states)
        numbers = [known.number(state) for state in order]
        logits = torch.stack([known.logits[number] for number in numbers])
        hidden = torch.tensor(numbers).view(-1, 1, 1).expand(-1, N, 1).double()
        mask = torch.tensor(order) == MASK
        chosen = policy.select(ops.token_stats(logits), hidden, mask, index).selected
        following: dict[State, float] = {}
        for row, state in enumerate(order):
            at = chosen[row].nonzero().flatten().tolist()
            weight = states[state]
            passes += weight
            mi += weight * sum(float(known.mi[numbers[row]][i, j]) for i, j in itertools.combinations(at, 2))
            if len(at) > 1:
                correlation += weight * known.table.total_correlation(torch.tensor(state), tuple(at))
            for tokens in itertools.product(range(V), repeat=len(at)):
                p = weight
                for position, token in zip(at, tokens, strict=True):
                    p *= float(logits[row, position, token].exp())
                # A draw that the model holds impossible leads nowhere that it can answer for.
                if p == 0.0:
                    continue
                after = list(state)
                for position, token in zip(at, tokens, strict=True):
                    after[position] = token
                if MASK in after:
                    following[tuple(after)] = following.get(tuple(after), 0.0) + p
                else:
                    joint[tuple(after)] += p
        states = following
        index += 1
    return Drawn(joint, passes, mi, correlation)


def policies(known: Known) -> list[tuple[str, float, Policy]]:
    """(family, setting, policy)"""
    found: list[tuple[str, float, Policy]] = [("sequential", 1, Sequential())]
    found += [("top k", k, TopK(k)) for k in range(2, N + 1)]
    for budget in BUDGETS:
        found += [
            ("confidence budget", budget, ConfidenceBudget(budget)),
            ("entropy bound", budget, EntropyBound(budget)),
            ("MI budget, entropy_weight 1", budget, MIBudget(known, budget)),
            ("MI budget, entropy_weight 0", budget, MIBudget(known, budget, entropy_weight=0.0)),
            ("MI threshold", budget, MIThreshold(known, budget)),
        ]
    return found


COLUMNS = ("model", "family", "setting", "passes", "total_variation", "kl", "mi_spent", "total_correlation_spent")


def measure(name: str, table: JointTable) -> list[tuple[str, str, float, float, float, float, float, float]]:
    known = Known(table)
    rows = []
    for family, setting, policy in policies(known):
        drawn = drawn_by(policy, known)
        if abs(float(drawn.joint.sum()) - 1) > 1e-9:
            raise RuntimeError(f"{name}, {family} {setting}: drawn probabilities sum to {float(drawn.joint.sum())}")
        distance = float((drawn.joint - table.joint).abs().sum()) / 2
        kl = float(torch.where(table.joint > 0, table.joint * (table.joint / drawn.joint).log(), 0.0).sum())
        rows.append((name, family, setting, drawn.passes, distance, kl, drawn.mi, drawn.total_correlation))
    return rows


def draw_picture(rows: list[tuple[str, str, float, float, float, float, float, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4.2), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for family in dict.fromkeys(row[1] for row in rows):
            points = sorted({(row[3], row[4]) for row in rows if row[:2] == (name, family)})
            marker = "*" if family == "sequential" else "o"
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1, label=family)
        axis.set(title=name, xlabel="passes")
    axes[0].set_ylabel("total variation, drawn against true joint")
    axes[-1].legend(fontsize=7)
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=120)


def beaten(rows: list[tuple[str, str, float, float, float, float, float, float]], name: str) -> tuple[int, int]:
    """Of the entropy bounds between all at once and one by one: how many an MI budget matches or beats, and how many there are."""
    ours, theirs = (
        {(round(row[3], 6), round(row[4], 6)) for row in rows if row[:2] == (name, family)}
        for family in ("MI budget, entropy_weight 0", "entropy bound")
    )
    theirs = {point for point in theirs if 1 < point[0] < N}
    won = [point for point in theirs if any(passes <= point[0] and tv <= point[1] for passes, tv in ours)]
    return len(won), len(theirs)


def main() -> None:
    rows = []
    for make in (chain, pairs, topics):
        rows += measure(make.__name__, make())
        won, of = beaten(rows, make.__name__)
        print(f"{make.__name__}: {won} of {of} entropy bounds are matched or beaten by an MI budget without entropy")
    for row in rows:
        print(
            f"{row[0]:<8}{row[1]:<30}{row[2]:>6g}{row[3]:>8.3f} passes{row[4]:>9.4f} TV{row[5]:>9.4f} KL{row[6]:>9.4f} MI"
        )
    write_table(
        RESULTS / "exact_frontier.csv",
        COLUMNS,
        ([*row[:2], *(f"{round(value, 9) + 0.0:g}" for value in row[2:])] for row in rows),
    )
    draw_picture(rows, RESULTS / "exact_frontier.png")


if __name__ == "__main__":
    main()
