"""Fill windows of text with every policy, temperature 1: passes against surprise under the same model and under a 5-gram.

The commands before this one are in mdmi_fast/tasks/text/README.md.

python benchmarks/text.py --text kjv.txt --model text:model --labels labels --out benchmarks/results/text.csv

The original text is a row too. Every policy fills the same windows with the same seeds, so the difference from one by
one is taken window by window. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import DistanceTable, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import (
    Coloring,
    Confidence,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Policy,
    Random,
    Sequential,
    Shuffled,
    TopK,
    decode,
)
from mdmi_fast.estimator.data import read_examples
from mdmi_fast.statistics import Floats, mean_interval
from mdmi_fast.tasks.likelihood import surprise
from mdmi_fast.tasks.text.__main__ import HELD_OUT
from mdmi_fast.tasks.text.corpus import prompts, windows
from mdmi_fast.tasks.text.ngram import NGram


def policies(mi: Any, table: DistanceTable) -> dict[str, Policy]:
    found: dict[str, Policy] = {"sequential": Sequential(), "random order": Random(1), "all at once": TopK(1000)}
    found |= {f"top-{k}": TopK(k) for k in (2, 4, 8)}
    found |= {f"random-{k}": Random(k) for k in (2, 4, 8)}
    found |= {f"confidence {t:g}": Confidence(t) for t in (0.5, 0.7, 0.9)}
    found |= {f"entropy bound {g:g}": EntropyBound(g) for g in (0.5, 1, 2, 4, 8)}
    found |= {f"MI budget {g:g}": MIBudget(mi, g) for g in (1, 2, 4, 8)}
    for gamma in (0.05, 0.1, 0.3, 1, 3):
        found[f"MI budget {gamma:g}, no entropy"] = MIBudget(mi, gamma, entropy_weight=0.0)
        found[f"table budget {gamma:g}, no entropy"] = MIBudget(table, gamma, entropy_weight=0.0)
    for gamma in (0.1, 0.3, 1):
        found[f"shuffled MI budget {gamma:g}, no entropy"] = MIBudget(Shuffled(mi), gamma, entropy_weight=0.0)
    for tau in (0.005, 0.01, 0.02, 0.05):
        found[f"MI threshold {tau:g}"] = MIThreshold(mi, tau)
        found[f"table threshold {tau:g}"] = MIThreshold(table, tau)
    for tau in (0.01, 0.02):
        found[f"shuffled MI threshold {tau:g}"] = MIThreshold(Shuffled(mi), tau)
    return found | {f"coloring {t:g}": Coloring(mi, t) for t in (0.005, 0.02, 0.05)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--estimator", help="its folder (default: the one trained for the model)")
    parser.add_argument("--labels", required=True, help="that it was trained on, for the table of distances")
    parser.add_argument("--count", type=int, default=200, help="windows a row")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model: Any = load_model(options.model)
    mi = load_estimator(options.estimator or options.model)
    table = DistanceTable.fit(read_examples(Path(options.labels), "joint", model=model), model=model)
    corpus = options.text.read_text()
    judge = NGram(corpus[:-HELD_OUT])
    texts = windows(corpus[-HELD_OUT:], options.count, seed=1)
    rows: list[dict[str, Any]] = []
    for task in ("infill", "complete"):
        asked = prompts(task, texts, seed=1)
        places = [[i for i, letter in enumerate(prompt) if letter == "_"] for prompt in asked]
        one_by_one: Any = None
        found = []
        for name, policy in policies(mi, table).items():
            start = time.process_time()
            result = decode(
                model,
                model.tokenizer.encode(asked),
                policy,
                temperature=1.0,
                generator=torch.Generator().manual_seed(0),
            )
            seconds = (time.process_time() - start) / len(asked)
            filled = model.tokenizer.decode(result.tokens)
            values = {"": surprise(model, filled, places), "ngram_": judge.surprise(filled, places)}
            one_by_one = values if one_by_one is None else one_by_one
            passes = float(result.passes.double().mean())
            found.append(_row(task, name, passes, seconds, values, one_by_one, filled[0]))
            print(found[-1], flush=True)
        original = {"": surprise(model, texts, places), "ngram_": judge.surprise(texts, places)}
        found.append(_row(task, "original text", 0.0, 0.0, original, one_by_one, texts[0]))
        rows += sorted(found, key=lambda row: row["passes"])
    write_table(options.out, rows[0], rows)


def _row(
    task: str,
    name: str,
    passes: float,
    seconds: float,
    values: dict[str, Floats],
    one_by_one: dict[str, Floats],
    example: str,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "task": task,
        "policy": name,
        "windows": len(values[""]),
        "passes": round(passes, 2),
        "cpu_seconds_per_window": round(seconds, 4),
    }
    for judge, own in values.items():
        for key, estimate in (
            ("nats", mean_interval(own)),
            ("minus_sequential", mean_interval(own - one_by_one[judge])),
        ):
            row |= {
                f"{judge}{key}_per_letter": round(estimate.value, 4),
                f"{judge}{key}_low": round(estimate.low, 4),
                f"{judge}{key}_high": round(estimate.high, 4),
            }
    return row | {"example": example}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
