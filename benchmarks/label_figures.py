"""What a folder of labels says: passes against full probing, and what the forms add up to, by the share masked.

python benchmarks/label_figures.py FOLDER --values 9 [--out FILE.csv]     (FOLDER as written by mdmi-fast label)
"""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path

import torch

from mdmi_fast.files import open_output
from mdmi_fast.labels import LabelledState, stream_labels
from mdmi_fast.labels.store import INDEX_FILE

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)
NEGATIVE = -1e-4  # nats; float32 sums of a few terms are further from 0 than that only if they mean it


def row(states: list[LabelledState], name: str, values: int) -> dict[str, object]:
    """One line of the table."""
    passes = sum(state.passes for state in states)
    full = sum(1 + values * len(state.positions) for state in states)
    entropy = float(sum(state.entropy.double().sum() for state in states))
    line: dict[str, object] = {
        "masked": name,
        "states": len(states),
        "pairs": sum(len(state.pairs) for state in states),
        "passes": passes,
        "share_of_full_probing": f"{passes / full:.4f}",
        "entropy_per_state": f"{entropy / len(states):.3f}",
    }
    for form in states[0].mi:
        mi = torch.cat([state.mi[form] for state in states]).double()
        line[f"{form}_sum_over_entropy"] = f"{float(mi.sum()) / max(entropy, 1e-9):.4f}"
        line[f"{form}_negative"] = f"{float((mi < NEGATIVE).double().mean()):.4f}"
        line[f"{form}_below_0.01"] = f"{float((mi < 0.01).double().mean()):.4f}"
        line[f"{form}_largest_bound"] = f"{float(torch.cat([state.bound[form] for state in states]).max()):.4g}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--values", type=int, required=True, help="V of 1 + M V: tokens that may stand at a position")
    parser.add_argument("--out", type=Path, default=Path("/dev/stdout"), help="a CSV file")
    options = parser.parse_args()
    states = [state for state in stream_labels(options.folder) if len(state.positions) >= 2]
    lines = []
    for low, high in itertools.pairwise(EDGES):
        part = [state for state in states if low < len(state.positions) / len(state.tokens) <= high]
        if part:
            lines.append(row(part, f"{low:.0%} to {high:.0%}", options.values))
    lines.append(row(states, "all", options.values))
    with open_output(options.out) as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        file.write(f"# {(options.folder / INDEX_FILE).read_text().replace(chr(10), ' ')}\n")


if __name__ == "__main__":
    main()
