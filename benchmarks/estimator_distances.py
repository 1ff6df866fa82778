"""What a network gains by distances, and from how many states it learns: beside the table of mean labels.

python benchmarks/estimator_distances.py --name text --model text:FOLDER --labels FOLDER --layers 64,32 \\
    --out benchmarks/results/estimator_distances.csv

The labels are made as in mdmi_fast/tasks/text/README.md and mdmi_fast/tasks/protein/README.md, for more states than the
largest of --states: those beyond it are judged on and never trained on. A fifth of every count chooses the epoch. Rows of
another name that the file holds stay there.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import DistanceTable, PairwiseMIEstimator, evaluate_estimator, load_model, train_estimator
from mdmi_fast.bench.report import write_table
from mdmi_fast.estimator.data import ask_once, read_examples

TRAINING: dict[str, Any] = {
    "epochs": 40,
    "patience": 40,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "held_out": 0.2,
    "seed": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="in the first column")
    parser.add_argument("--model", required=True)
    parser.add_argument("--labels", required=True, type=Path)
    parser.add_argument("--layers", type=lambda text: tuple(map(int, text.split(","))), default=(128, 64))
    parser.add_argument("--states", type=lambda text: [*map(int, text.split(","))], default=[8, 16, 24, 32, 64])
    parser.add_argument("--distances", type=int, default=64)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model)
    states = ask_once(read_examples(options.labels, "joint", model=model), model, torch.device("cpu"), needs_stats=True)
    unseen = states[max(options.states) :]
    rows = []
    if options.out.exists():
        with options.out.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] != options.name]
    for count in options.states:
        table = DistanceTable.fit(states[:count])
        found: dict[str, Any] = {"table": (evaluate_estimator(table, model, unseen), 0.0)}
        for kind, distances in (("network", 0), ("network with distances", options.distances)):
            torch.manual_seed(0)
            start = time.process_time()
            network = PairwiseMIEstimator(
                model.hidden_size, options.layers, "interaction", marginals="summary", distances=distances
            )
            network, _ = train_estimator(network, model, states[:count], **TRAINING)
            seconds = time.process_time() - start
            found[kind] = (evaluate_estimator(network, model, unseen), seconds)
        for kind, (report, seconds) in found.items():
            rows.append(
                {
                    "model": options.name,
                    "states": count,
                    "unseen_states": len(unseen),
                    "source": kind,
                    "r": f"{report.pearson:.4f}",
                    "r_low": f"{report.interval[0]:.4f}",
                    "r_high": f"{report.interval[1]:.4f}",
                    "mean_absolute_error": f"{report.mean_absolute_error:.5f}",
                    "strongest_partner_found": f"{report.top_partner:.3f}",
                    "cpu_seconds": f"{seconds:.0f}",
                }
            )
            print(rows[-1], flush=True)
    write_table(options.out, rows[0], (row.values() for row in rows))


if __name__ == "__main__":
    main()
