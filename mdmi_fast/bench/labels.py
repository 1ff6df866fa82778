"""Labels by probing: the passes that a proven bound leaves out, what is paid besides the passes, and a large vocabulary.

The reduction of the answers to labels is measured in `kl` (mixture_stats).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mdmi_fast.bench import _sudoku as sudoku
from mdmi_fast.bench.child import in_child, peak_growth
from mdmi_fast.bench.measure import Figure, Unavailable, Workload, threads
from mdmi_fast.labels import MILabels, label_mi
from mdmi_fast.models import MaskedOutput
from mdmi_fast.tasks.sudoku.model import DIGITS, MASK_TOKEN

EPSILON = 0.01
_MOST_PASSES, _MOST_TIME = 30.0, 1.15
_GIB = 2**30

Inputs = tuple[Tensor, Tensor]
"""States [S, 81], and as many boards as labelling them within the bound makes passes."""


def workloads(quick: bool = False) -> list[Workload]:
    count = 4 if quick else 16

    def make() -> Inputs:
        states = sudoku.states(count)
        passes = int(label_mi(sudoku.model(), states, epsilon=EPSILON).passes.sum())
        return states, states.repeat(-(-passes // count), 1)[:passes]

    return [
        Workload(
            name=_case(count),
            make=make,
            ways={
                "label_mi within the bound": lambda inputs: label_mi(sudoku.model(), inputs[0], epsilon=EPSILON),
                "the bare forwards": lambda inputs: [sudoku.model()(batch) for batch in inputs[1].split(512)],
                "every probe": lambda inputs: label_mi(sudoku.model(), inputs[0]),
            },
            expected=lambda inputs: label_mi(sudoku.model(), inputs[0]).mi,
            read=_mi,
            tolerance=EPSILON,
            share_of=("the bare forwards", _MOST_TIME),
            unchecked=("the bare forwards",),
        )
    ]


def others(quick: bool = False) -> Iterator[Figure]:
    states = sudoku.states(4 if quick else 100)
    probes = int((1 + DIGITS * (states == MASK_TOKEN).sum(-1)).sum())
    measure = "passes, share of 1 + M V"
    for directions in ("both", "one"):
        found = label_mi(sudoku.model(), states, epsilon=EPSILON, directions=directions)
        passes, worst = int(found.passes.sum()), float(found.bound.max())
        case = _case(len(states)) + (", one direction" if directions == "one" else "")
        note = f"{passes:,} of {probes:,}; largest bound {worst:.2g} nats"
        yield Figure(case, measure, 100 * passes / probes, "%", _MOST_PASSES, "<=", note=note)
    yield from _large(*((40, 500, 4, 4, 8) if quick else (500, 10_000, 64, 12, 16)))


def _large(length: int, vocabulary: int, window: int, masked: int, samples: int) -> Iterator[Figure]:
    """A sequence with a large vocabulary; a few of its positions are labelled, the others would cost the same each."""
    case = f"{length} tokens, {vocabulary:,} values, window {window}, {samples} samples"
    full = 1 + length * vocabulary
    try:
        passes, seconds, peak = in_child(_label_large, length, vocabulary, window, masked, samples)
    except Unavailable as reason:
        yield Figure(case, "passes, share of full probing", math.nan, "%", note=str(reason))
        return
    each = seconds / passes
    wanted = 1 + length * samples
    note = f"{wanted:,} of {full:,}"
    yield Figure(case, "passes, share of full probing", 100 * wanted / full, "%", note=note)
    note = f"full probing {full * each / 3600:.0f} h; from {passes} passes of {1e3 * each:.0f} ms"
    yield Figure(
        case, "time of a sequence", 1e6 * wanted * each, "us", ours=wanted * each, other=full * each, note=note
    )
    stack = 4.0 * vocabulary * length * vocabulary
    note = f"the answers to one position's probes at once, [K, M, V]: {stack / _GIB:.0f} GiB"
    yield Figure(case, "memory above the model", peak / 2**20, "MiB", note=note)


def _label_large(length: int, vocabulary: int, window: int, masked: int, samples: int) -> tuple[int, float, int]:
    """In a child: passes, seconds and bytes of labelling some positions of a random sequence."""
    with threads(1):
        torch.manual_seed(0)
        model = _Transformer(length, vocabulary).eval()
        tokens = torch.randint(vocabulary, (length,))
        tokens[:masked] = model.mask_token_id
        taken: list[float] = []
        passes: list[int] = []

        def run() -> None:
            start = time.perf_counter()
            found = label_mi(model, tokens, window=window, samples=samples, batch_size=8)
            taken.append(time.perf_counter() - start)
            passes.append(int(found.passes))

        peak = peak_growth(run)
        return passes[0], taken[0], peak


class _Transformer(nn.Module):
    """Two layers of 128 with random weights."""

    def __init__(self, length: int, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.mask_token_id, self.vocab_size, self.hidden_size = vocabulary, vocabulary, width
        self.embed = nn.Embedding(vocabulary + 1, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        hidden = self.layers(self.embed(tokens) + self.place.weight[: tokens.shape[1]])
        return MaskedOutput(self.head(hidden), hidden)


def _case(count: int) -> str:
    return f"{count} Sudoku states, epsilon {EPSILON:g}"


def _mi(inputs: Inputs, found: MILabels) -> Tensor:
    return found.mi
