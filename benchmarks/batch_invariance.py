"""How far a network's answer depends on the batch: alone, among others of its length, and padded.

mdmi-fast models fetch sapiens && python benchmarks/batch_invariance.py --out benchmarks/results/batch_invariance.csv

Largest difference of logits from those of each chain alone, and milliseconds a chain. `padded` puts chains of
105 to 136 residues together.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import load_model
from mdmi_fast.files import replace_file


def states(model: Any, lengths: list[int]) -> Tensor:
    """Random chains, half of them masked."""
    letters = model.tokenizer.letters
    picks = [torch.randint(len(letters), (length,)).tolist() for length in lengths]
    texts = ["".join("_" if n % 2 else letters[k] for n, k in enumerate(pick)) for pick in picks]
    return model.tokenizer.encode(texts)


def milliseconds(call: Any, chains: int) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) / chains * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sapiens:heavy")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    alone: Any = load_model(options.model)
    together: Any = load_model(options.model, batch_invariant=False)
    rows = []
    cases = {"one length, short": [8] * 32, "one length": [120] * 32, "padded": list(range(105, 137))}
    for threads, (case, lengths) in product(options.threads, cases.items()):
        torch.set_num_threads(threads)
        tokens = states(alone, lengths)
        inside = tokens != alone.tokenizer.pad_token_id
        expected = torch.cat([alone(row[None]).logits for row in tokens])
        for name, model in (("batch_invariant=True", alone), ("batch_invariant=False", together)):
            difference = (model(tokens).logits - expected)[inside]
            rows.append(
                {
                    "model": options.model,
                    "threads": threads,
                    "case": case,
                    "chains": len(tokens),
                    "option": name,
                    "largest_difference": f"{float(difference[difference.isfinite()].abs().max()):.2g}",
                    "ms_per_chain": round(
                        milliseconds(lambda model=model, tokens=tokens: model(tokens), len(tokens)), 3
                    ),
                }
            )
            print(rows[-1], flush=True)
    if options.out:
        with replace_file(options.out) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
