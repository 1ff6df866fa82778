"""How long a warmed decoding step takes for one sequence, and how much of it is the model.

python benchmarks/latency.py [--threads N]        # two minutes

A step is what `decode` does from one call of the model to the next: the model's forward, and around it statistics,
mutual information, selection and writing. The model is a stand-in, a transformer of 4 layers and width 256 with random
weights over 33 tokens, some positions surer than others, as protein models have it; the estimator (256/128) is random too. Only the clock
is meant. Writes benchmarks/results/latency.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from mdmi_fast import EntropyBound, MIBudget, PairwiseMIEstimator, decode, set_num_threads
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import Policy
from mdmi_fast.models import MaskedOutput

RESULTS = Path(__file__).parent / "results"
WIDTH, V = 256, 33
STEPS = {64: 200, 256: 100, 1024: 30}
"""Steps that are timed, for each N."""


class Enough(Exception):  # noqa: N818 - it ends a decode that has shown what was asked for
    """As many steps as asked for were timed."""


class StandIn(nn.Module):
    """A transformer that notes when it starts and ends, and stops after so many calls."""

    mask_token_id, vocab_size, hidden_size = V - 1, V, WIDTH

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.place = nn.Embedding(V, WIDTH), nn.Embedding(max(STEPS), WIDTH)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head, self.sureness = nn.Linear(WIDTH, V), nn.Linear(WIDTH, 1)
        self.clock: list[tuple[float, float]] = []
        self.calls = 0

    @torch.no_grad()
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        start = time.perf_counter()
        if self.calls == 0:
            raise Enough
        self.calls -= 1
        hidden = self.layers(self.embed(tokens) + self.place.weight[: tokens.shape[1]])
        logits = self.head(hidden) * (3 * self.sureness(hidden)).exp()
        self.clock.append((start, time.perf_counter()))
        return MaskedOutput(logits, hidden)


def measure(model: StandIn, policy: Policy, length: int) -> tuple[Tensor, Tensor]:
    """(seconds of the model, seconds of the rest) of as many steps as STEPS says."""
    forward: list[float] = []
    rest: list[float] = []
    seed = 0
    while len(forward) < STEPS[length]:
        model.clock, model.calls = [], STEPS[length] + 2 - len(forward)
        tokens = torch.full((1, length), model.mask_token_id)
        with contextlib.suppress(Enough):
            decode(model, tokens, policy, temperature=1.0, seeds=torch.tensor([seed]))
        # The first step of the first decode warms up; the last one has no next to end at.
        steps = list(zip(model.clock, model.clock[1:], strict=False))[int(seed == 0) :]
        if not steps:
            raise RuntimeError(f"{policy}: decodes {length} positions in too few passes, there is no step to time")
        forward += [end - start for (start, end), _ in steps]
        rest += [following - end for (_, end), (following, _) in steps]
        seed += 1
    return torch.tensor(forward[: STEPS[length]]), torch.tensor(rest[: STEPS[length]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    set_num_threads(threads)
    torch.manual_seed(0)
    model, estimator = StandIn().eval(), PairwiseMIEstimator(WIDTH, layers=(256, 128)).eval()
    machine = f"{platform.machine()}, torch {torch.__version__}, {threads} thread(s)"
    rows = []
    for length in STEPS:
        policies: dict[str, Policy] = {
            "entropy bound 2": EntropyBound(2.0),
            "MI budget 2": MIBudget(estimator, 2.0),
            "MI budget 2, no entropy": MIBudget(estimator, 2.0, entropy_weight=0.0),
        }
        for name, policy in policies.items():
            forward, rest = measure(model, policy, length)
            step = forward + rest
            figures = [1000 * float(x.quantile(q)) for x in (step, forward, rest) for q in (0.5, 0.99)]
            rows.append(
                [
                    length,
                    name,
                    len(step),
                    *(f"{figure:.3f}" for figure in figures),
                    f"{100 * float(rest.sum() / step.sum()):.1f}",
                    machine,
                ]
            )
            print(
                f"N {length:>4}  {name:<32} step p50 {figures[0]:8.2f} p99 {figures[1]:8.2f} ms, model {figures[2]:8.2f}, "
                f"rest p50 {figures[4]:7.3f} p99 {figures[5]:7.3f} ms"
            )
    write_table(
        RESULTS / "latency.csv",
        [
            "n",
            "policy",
            "steps",
            "step_p50_ms",
            "step_p99_ms",
            "model_p50_ms",
            "model_p99_ms",
            "rest_p50_ms",
            "rest_p99_ms",
            "rest_share_percent",
            "machine",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
