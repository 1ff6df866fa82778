"""Does a chain get the same answer in every batch? The library's way of running a network against one padded batch.

mdmi-fast models fetch sapiens && python benchmarks/batch_invariance.py --out benchmarks/results/batch_invariance.csv

Random chains of 105 to 136 residues, half of them masked, of which every answer is compared with that of the chain
alone: logits bit for bit, and what `decode` makes of it (top-8, temperature 1, a seed a chain). `batch_invariant=False`
calls transformers once a batch, padded on the right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import TopK, decode

PAD_COLUMNS = 9


def states(model: Any, count: int) -> list[Tensor]:
    """Random chains, half of them masked, each [N]."""
    letters = model.tokenizer.letters
    lengths = torch.randint(105, 137, (count,)).tolist()
    picks = [torch.randint(len(letters), (length,)).tolist() for length in lengths]
    texts = ["".join("_" if n % 2 else letters[k] for n, k in enumerate(pick)) for pick in picks]
    return [model.tokenizer.encode([text])[0] for text in texts]


def cases(count: int) -> dict[str, tuple[list[list[int]], int, int]]:
    """name -> (batches of numbers of chains, columns of padding on the left, on the right)."""
    order = list(range(count))
    shuffled = torch.randperm(count).tolist()

    def batches(numbers: list[int], size: int) -> list[list[int]]:
        return [numbers[start : start + size] for start in range(0, count, size)]

    return {
        "alone": (batches(order, 1), 0, 0),
        "alone, padded on the left": (batches(order, 1), PAD_COLUMNS, 0),
        "alone, padded on the right": (batches(order, 1), 0, PAD_COLUMNS),
        "batches of 2": (batches(order, 2), 0, 0),
        "batches of 7": (batches(order, 7), 0, 0),
        "batches of 64": (batches(order, 64), 0, 0),
        "batches of 64, shuffled": (batches(shuffled, 64), 0, 0),
    }


def put_together(model: Any, chains: list[Tensor], left: int, right: int) -> Tensor:
    width = max(map(len, chains)) + left + right
    tokens = torch.full((len(chains), width), model.pad_token_id)
    for row, chain in enumerate(chains):
        tokens[row, left : left + len(chain)] = chain
    return tokens


def answers(model: Any, chains: list[Tensor], case: tuple[list[list[int]], int, int]) -> tuple[list[Any], float]:
    """(logits, decoded tokens) of every chain without its padding, and CPU seconds of the forward passes."""
    batches, left, right = case
    found: list[Any] = [None] * len(chains)
    seconds = 0.0
    for numbers in batches:
        tokens = put_together(model, [chains[number] for number in numbers], left, right)
        inside = tokens != model.pad_token_id
        start = time.process_time()
        logits = model(tokens, inside).logits
        seconds += time.process_time() - start
        seeds = torch.tensor(numbers)
        filled = decode(model, tokens, TopK(8), attention_mask=inside, temperature=1.0, seeds=seeds).tokens
        for row, number in enumerate(numbers):
            places = slice(left, left + len(chains[number]))
            found[number] = logits[row, places], filled[row, places]
    return found, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sapiens:heavy")
    parser.add_argument("--count", type=int, default=200, help="chains")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for invariant in (True, False):
        model: Any = load_model(options.model, batch_invariant=invariant)
        torch.manual_seed(0)
        chains = states(model, options.count)
        expected: list[Any] = []
        for name, case in cases(options.count).items():
            found, seconds = answers(model, chains, case)
            expected = expected or found
            differences = [(a - b)[a.isfinite()].abs().max() for (a, _), (b, _) in zip(found, expected, strict=True)]
            decoded = [not torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True)]
            rows.append(
                {
                    "model": options.model,
                    "threads": torch.get_num_threads(),
                    "batch_invariant": invariant,
                    "case": name,
                    "chains": options.count,
                    "other_logits": sum(bool(difference > 0) for difference in differences),
                    "largest_difference": f"{float(max(differences)):.2g}",
                    "other_tokens": sum(decoded),
                    "cpu_ms_per_chain": round(seconds / options.count * 1e3, 2),
                }
            )
            print(rows[-1], flush=True)
    write_table(options.out, rows[0], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
