"""Text filled in few passes: the tokens of a pass drawn independently, coupled, and with two controls of the coupling.

The commands before this one are in mdmi_fast/tasks/text/README.md.

python benchmarks/text_coupling.py --text kjv.txt --model text:model --estimator estimator --coupling coupling \\
    --out benchmarks/results/text_coupling.csv

The controls: "other states" knows tokens and distances, but reads the hidden states of the window before; "dealt out" gives
every position the correction that was meant for the same turn of the window before.

Temperature 1, the same windows and seeds for every row. Differences are taken window by window: from one by one, and from
the independent drawing of the same rule. Diversity stands beside, because a sharper draw would please both judges:
distinct 3-grams of all letters filled, their entropy, and the divergence (Jensen-Shannon, nats) of their 2-grams from those of the
original text. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import PairwiseCoupling, decode, load_coupling, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.coupling.learned import NetworkPass
from mdmi_fast.decoding import EntropyBound, MIBudget, MIThreshold, Policy, Random, Sequential, TopK
from mdmi_fast.decoding.policies import Step
from mdmi_fast.statistics import Floats, mean_interval
from mdmi_fast.tasks.likelihood import surprise
from mdmi_fast.tasks.text.__main__ import HELD_OUT
from mdmi_fast.tasks.text.corpus import prompts, windows
from mdmi_fast.tasks.text.ngram import NGram


class OtherStates(PairwiseCoupling):
    """The same tokens and distances, but the hidden states of the window before."""

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> NetworkPass:
        return super().begin(step, hidden.roll(1, 0), order)


class DealtOut(PairwiseCoupling):
    """The corrections of the window before."""

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> NetworkPass:
        return RolledPass(self, hidden, order)


class RolledPass(NetworkPass):
    def correction(self, k: int) -> Tensor | None:
        found = super().correction(k)
        return None if found is None else found.roll(1, 0)


def rules(mi: Any) -> dict[str, Policy]:
    found: dict[str, Policy] = {f"MI threshold {tau:g}": MIThreshold(mi, tau) for tau in (0.02, 0.05, 0.1, 0.2)}
    found |= {f"MI budget {gamma:g}, no entropy": MIBudget(mi, gamma, entropy_weight=0.0) for gamma in (0.3, 1, 3)}
    found |= {"entropy bound 8": EntropyBound(8), "random-4": Random(4), "random-8": Random(8)}
    return found | {f"top-{k}": TopK(k) for k in (4, 8, 16)}


def diversity(texts: Sequence[str], originals: Sequence[str]) -> dict[str, float]:
    """Of whole windows, filled and original."""

    def grams(n: int, of: Sequence[str]) -> Counter[str]:
        return Counter(text[i : i + n] for text in of for i in range(len(text) - n + 1))

    def shares(counts: Counter[str]) -> dict[str, float]:
        return {key: count / counts.total() for key, count in counts.items()}

    threes, ones = grams(3, texts), shares(grams(1, texts))
    ours, theirs = shares(grams(2, texts)), shares(grams(2, originals))
    mean = {key: (ours.get(key, 0.0) + theirs.get(key, 0.0)) / 2 for key in {**ours, **theirs}}
    halves = [sum(p * math.log(p / mean[key]) for key, p in side.items()) / 2 for side in (ours, theirs)]
    return {
        "distinct_3grams": round(len(threes) / threes.total(), 4),
        "letter_entropy": round(-sum(p * math.log(p) for p in ones.values()), 4),
        "divergence_of_2grams": round(sum(halves), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--estimator", required=True, help="its folder")
    parser.add_argument("--coupling", required=True, help="its folder")
    parser.add_argument("--tasks", nargs="+", default=["infill", "complete", "whole"])
    parser.add_argument("--count", type=int, default=200, help="windows a row")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model: Any = load_model(options.model)
    mi = load_estimator(options.estimator)
    drawings: dict[str, Any] = {
        "independent": None,
        "coupled": load_coupling(options.coupling),
        "other states": OtherStates.from_pretrained(options.coupling),
        "dealt out": DealtOut.from_pretrained(options.coupling),
    }
    corpus = options.text.read_text()
    judge = NGram(corpus[:-HELD_OUT])
    texts = windows(corpus[-HELD_OUT:], options.count, seed=1)
    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        asked = ["_" * len(text) for text in texts] if task == "whole" else prompts(task, texts, seed=1)
        places = [[i for i, letter in enumerate(prompt) if letter == "_"] for prompt in asked]

        def fill(policy: Policy, of: Any) -> tuple[list[str], float, float, dict[str, Floats]]:
            start = time.process_time()
            result = decode(
                model,
                model.tokenizer.encode(asked),  # noqa: B023 - called in this round only
                policy,
                temperature=1.0,
                generator=torch.Generator().manual_seed(0),
                coupling=of,
            )
            seconds = (time.process_time() - start) / len(texts)
            filled = model.tokenizer.decode(result.tokens)
            told = {"": surprise(model, filled, places), "ngram_": judge.surprise(filled, places)}  # noqa: B023
            return filled, float(result.passes.double().mean()), seconds, told

        first = fill(Sequential(), None)
        row: dict[str, Any] = {"task": task, "rule": "one by one", "drawing": "independent"}
        rows.append(row | _figures(first, first[3], first[3]) | diversity(first[0], texts))
        for name, policy in rules(mi).items():
            independent: Any = None
            for drawing, of in drawings.items():
                filled = fill(policy, of)
                independent = independent or filled
                row = {"task": task, "rule": name, "drawing": drawing}
                row |= _figures(filled, first[3], independent[3]) | diversity(filled[0], texts)
                rows.append(row)
                print(row, flush=True)
        nothing = {"task": task, "rule": "original text", "drawing": ""}
        original = {"": surprise(model, texts, places), "ngram_": judge.surprise(texts, places)}
        rows.append(nothing | _figures((texts, 0.0, 0.0, original), first[3], original) | diversity(texts, texts))
        write_table(options.out, rows[0], (row.values() for row in rows))  # what there is so far


def _figures(
    filled: tuple[Sequence[str], float, float, dict[str, Floats]],
    one_by_one: dict[str, Floats],
    independent: dict[str, Floats],
) -> dict[str, Any]:
    texts, passes, seconds, told = filled
    row: dict[str, Any] = {
        "windows": len(texts),
        "passes": round(passes, 2),
        "cpu_seconds_per_window": round(seconds, 4),
    }
    for judge, own in told.items():
        row[f"{judge}nats_per_letter"] = round(mean_interval(own).value, 4)
        for key, base in (("minus_sequential", one_by_one), ("minus_independent", independent)):
            estimate = mean_interval(own - base[judge])
            row[f"{judge}{key}"] = round(estimate.value, 4)
            row[f"{judge}{key}_low"] = round(estimate.low, 4)
            row[f"{judge}{key}_high"] = round(estimate.high, 4)
    return row


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
