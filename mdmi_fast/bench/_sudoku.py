"""Real decoding states of the Sudoku network, and estimators to score them with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.bench.measure import WrongAnswer
from mdmi_fast.estimator import PairScorer, PairwiseMIEstimator, load_estimator
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection
from mdmi_fast.tasks.sudoku.model import MASK_TOKEN, load_model
from mdmi_fast.tasks.sudoku.states import decoding_states

BUDGETS = ((0.3, 1.0), (0.02, 0.0))
"""(gamma, entropy_weight) of the demo: solving at temperature 0, sampling at temperature 1."""


@cache
def model() -> MaskedModel:
    return load_model("strong")


@cache
def states(count: int) -> Tensor:
    """[count, 81] boards that the network meets while it decodes."""
    return decoding_states(model(), count, seed=3)


@cache
def estimator(name: str) -> PairScorer:
    """The estimator "shipped", or by its widths a general one, untrained, whose answers are as small as most MI is."""
    if name == "shipped":
        return load_estimator("sudoku")
    torch.manual_seed(0)
    made = PairwiseMIEstimator(model().hidden_size, layers=[int(width) for width in name.split("/")])
    torch.nn.init.constant_(made.last.bias, -6.0)
    return made.eval()


@dataclass(frozen=True)
class Pass:
    """What a policy sees of a batch of boards.

    Attributes:
        tokens: [B, 81].
        mask: [B, 81] bool.
        logits: [B, 81, 10].
        hidden: [B, 81, D].
    """

    tokens: Tensor
    mask: Tensor
    logits: Tensor
    hidden: Tensor


def passes(count: int, *, batch: int) -> list[Pass]:
    """Decoding states, so many at a time."""
    found = []
    for tokens in states(count).split(batch):
        output = model()(tokens)
        found.append(Pass(tokens, tokens == MASK_TOKEN, output.logits, output.hidden))
    return found


@torch.no_grad()
def expected_selection(scorer: PairScorer, state: Pass, gamma: float, entropy_weight: float) -> Tensor:
    """The reference's selection on the scores and entropies of the library, after those were compared with float64.

    Selections are equal bit for bit on the same scores only: rounding may decide whether a position fits.

    Raises:
        WrongAnswer: if a score or an entropy is off.
    """
    scores, entropy = scorer(state.hidden, state.mask), ops.token_stats(state.logits).entropy
    u, v = (half.double() for half in scorer.halves(state.hidden))
    head = scorer.head()
    exact = reference.pairwise_mlp(
        u[:2],
        v[:2],
        [w.double() for w in head.weights],
        [b.double() for b in head.biases],
        head.w_out.double(),
        head.b_out.double(),
        mask=state.mask[:2],
        combine=scorer.combine,
        symmetry=scorer.symmetry,
        activation="softplus",
    )
    wrong = max(
        float((scores[:2] - exact).abs().max()),
        float((entropy - reference.entropy(state.logits.double())).abs().max()),
    )
    if not wrong <= 1e-4:
        raise WrongAnswer(f"scores or entropies differ from the reference by {wrong:.2g}, allowed is 1e-4")
    budget = torch.full((len(entropy),), gamma, dtype=torch.float64)
    return flat(reference.select_budget(entropy, scores, budget, 1.0, entropy_weight, "entropy", state.mask))


def flat(selection: Selection | tuple[Tensor, Tensor]) -> Tensor:
    """Positions and cost as one tensor [B, 82]."""
    selected, spent = selection
    return torch.cat([selected.double(), spent.double().unsqueeze(1)], 1)
