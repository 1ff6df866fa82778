"""The antibody estimator of Sapiens and its learning curve: `python benchmarks/estimator_antibody.py FOLDER`.

Makes FOLDER/chains.fasta (real heavy chains), FOLDER/states.json (met while sampling), FOLDER/labels (both forms) and
FOLDER/estimator and FOLDER/estimator_entropy, trained on all of them; what exists is not made again, an interrupted
labelling goes on. Needs the models of `mdmi-fast models fetch sapiens`. A fifth of the states is never trained on; the
others are taken in doubling numbers. What limits r can be read from three columns: r on unseen states against r on the
states it was trained on (too few of them), that one against 1 (what the network and the hidden states can tell), and the
least r that the labels may have with exact ones (their error). Results go to benchmarks/results/estimator_antibody.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import PairwiseMIEstimator, load_model, train_estimator
from mdmi_fast.estimator import evaluate_splits
from mdmi_fast.estimator.data import Example, read_examples
from mdmi_fast.files import replace_file
from mdmi_fast.labels import Form, stream_labels, write_labels
from mdmi_fast.tasks.protein.chains import fetch_chains, read_fasta, write_fasta
from mdmi_fast.tasks.protein.states import decoding_states, split

MODEL, EPSILON, SMALLEST = "sapiens:heavy", 0.01, 16
DRAWN = 400
"""States; the first of them are labelled."""
FORMS: tuple[Form, ...] = ("joint", "entropy")
NETWORK: dict[str, Any] = {
    "layers": (128, 64),
    "combine": "interaction",
    "rank": 64,
    "marginals": "summary",
    "output": "bounded",
}
TRAINING: dict[str, Any] = {"epochs": 40, "patience": 40, "batch_size": 4, "learning_rate": 3e-3}


def make_labels(folder: Path, model: Any, count: int) -> None:
    chains = folder / "chains.fasta"
    if not chains.exists():
        write_fasta(fetch_chains(), chains)
    drawn = folder / "states.json"
    if not drawn.exists():
        train, _ = split(read_fasta(chains), longest=model.max_length - 2)
        padded = decoding_states(model, model.tokenizer, train, DRAWN, seed=0)
        with replace_file(drawn) as temporary:
            temporary.write_text(json.dumps([state[state != model.pad_token_id].tolist() for state in padded]))
    states = [torch.tensor(state) for state in json.loads(drawn.read_text())[:count]]
    write_labels(
        model, states, folder / "labels", forms=FORMS, epsilon=EPSILON, shard_size=20, provenance={"model": MODEL}
    )


def least_r_of_labels(folder: Path, form: Form) -> float:
    """Of the labels with exact ones, were every label as wrong as its bound allows."""
    states = list(stream_labels(folder))
    mi, bound = (torch.cat([getattr(state, field)[form] for state in states]).double() for field in ("mi", "bound"))
    return float((1 - bound.square().mean() / mi.var()).clamp(min=0).sqrt())


def curve(labels: list[Example], model: Any, form: Form, out: Path, label_r: float) -> list[dict[str, Any]]:
    """One row a number of states; the estimator of all of them is saved."""
    unseen, seen = labels[: len(labels) // 5], labels[len(labels) // 5 :]
    counts = [SMALLEST << step for step in range(12) if SMALLEST << step < len(seen)] + [len(seen)]
    rows = []
    for count in counts:
        torch.manual_seed(0)
        start = time.process_time()
        estimator = PairwiseMIEstimator(model.hidden_size, **NETWORK)
        estimator, _ = train_estimator(estimator, model, seen[:count], **TRAINING)
        seconds = time.process_time() - start
        sets = {"unseen": unseen, "seen": seen[: min(count, len(unseen))]}
        splits = evaluate_splits(estimator, model, sets, all_states=True).reports
        reports = splits["unseen"]
        row = {
            "form": form,
            "states": count,
            "pairs": sum(len(state.mi) for state in seen[:count]),
            "unseen_states": len(unseen),
            "cpu_seconds": round(seconds),
        }
        row |= {f"r {name}": f"{report.pearson:.4f}" for name, report in reports.items() if name != "constant"}
        own = reports["estimator"]
        row |= {
            "r of labels, least": f"{label_r:.4f}",
            "r on its own states": f"{splits['seen']['estimator'].pearson:.4f}",
        }
        row |= {"spearman": f"{own.spearman:.4f}", "mean_absolute_error": f"{own.mean_absolute_error:.5f}"}
        row |= {"partner_rank": f"{own.partner_rank:.4f}", "false_independence": f"{own.false_independence:.4f}"}
        rows.append(row)
        print(row, flush=True)
    estimator.provenance = {"model": MODEL, "form": form, "epsilon": EPSILON, "states": len(seen), "held_out": rows[-1]}
    estimator.save_pretrained(out)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--states", type=int, default=240, help=f"to label, at most {DRAWN}")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=FORMS, help="to train on; both are labelled")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "estimator_antibody.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    model: Any = load_model(MODEL)
    make_labels(options.folder, model, options.states)
    rows = []
    for form in options.forms:
        name = "estimator" if form == "joint" else f"estimator_{form}"
        labels, label_r = options.folder / "labels", least_r_of_labels(options.folder / "labels", form)
        rows += curve(read_examples(labels, form, model=model), model, form, options.folder / name, label_r)
    command = f"python benchmarks/estimator_antibody.py FOLDER --states {options.states}"
    with options.results.open("w", newline="") as file:
        table = csv.DictWriter(file, [*rows[0], "command"])
        table.writeheader()
        table.writerows({**row, "command": command} for row in rows)


if __name__ == "__main__":
    main()
