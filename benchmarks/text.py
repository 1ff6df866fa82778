"""Fill windows of text with every policy, temperature 1: passes against pseudo-likelihood under the same model.

python -m mdmi_fast.tasks.text corpus --out kjv.txt
python -m mdmi_fast.tasks.text train --text kjv.txt --minutes 10 --out model
python -m mdmi_fast.tasks.text prompts --text kjv.txt --task complete --count 100 --out states.jsonl
mdmi-fast label --model text:model --data states.jsonl --epsilon 0.01 --out labels
mdmi-fast train --model text:model --labels labels --combine interaction --layers 64,32 --epochs 60 --batch-size 4 \\
    --underestimation 2 --out estimator
python benchmarks/text.py --text kjv.txt --model text:model --estimator estimator --out benchmarks/results/text.csv

The original text is a row too. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import load_estimator, load_model
from mdmi_fast.decode import EntropyBound, MIBudget, MIThreshold, Policy, Random, Sequential, TopK, decode
from mdmi_fast.files import replace_file
from mdmi_fast.tasks.likelihood import mean_estimate, surprise
from mdmi_fast.tasks.text.__main__ import HELD_OUT
from mdmi_fast.tasks.text.corpus import prompts, windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--estimator", required=True)
    parser.add_argument("--count", type=int, default=200, help="windows a row")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model: Any = load_model(options.model)
    mi = load_estimator(options.estimator)
    policies: dict[str, Policy] = {"sequential": Sequential(), "random order": Random(1), "all at once": TopK(1000)}
    policies |= {f"top-{k}": TopK(k) for k in (2, 4, 8)}
    policies |= {f"entropy bound {g:g}": EntropyBound(g) for g in (0.5, 1, 2, 4, 8)}
    policies |= {f"MI budget {g:g}": MIBudget(mi, g) for g in (1, 2, 4, 8)}
    policies |= {f"MI budget {g:g}, no entropy": MIBudget(mi, g, entropy_weight=0.0) for g in (0.05, 0.1, 0.3, 1, 3)}
    policies |= {f"MI threshold {t:g}": MIThreshold(mi, t) for t in (0.005, 0.02, 0.05)}
    texts = windows(options.text.read_text()[-HELD_OUT:], options.count, seed=1)
    rows: list[dict[str, Any]] = []
    for task in ("infill", "complete"):
        asked = prompts(task, texts, seed=1)
        places = [[i for i, letter in enumerate(prompt) if letter == "_"] for prompt in asked]
        rows.append(_row(task, "original text", 0.0, 0.0, surprise(model, texts, places), texts[0]))
        for name, policy in policies.items():
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
            values = surprise(model, filled, places)
            rows.append(_row(task, name, float(result.passes.double().mean()), seconds, values, filled[0]))
            print(rows[-1], flush=True)
            with replace_file(options.out) as temporary, temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def _row(task: str, name: str, passes: float, seconds: float, values: Any, example: str) -> dict[str, Any]:
    nats = mean_estimate(values)
    return {
        "task": task,
        "policy": name,
        "windows": len(values),
        "passes": round(passes, 2),
        "cpu_seconds_per_window": round(seconds, 4),
        "nats_per_letter": round(nats.value, 4),
        "low": round(nats.low, 4),
        "high": round(nats.high, 4),
        "example": example,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
