"""Sample antibody heavy chains with every policy and score them: passes against quality, temperature 1.

python -m mdmi_fast.tasks.protein chains --out chains.fasta
python benchmarks/protein.py sample --chains chains.fasta --estimator ESTIMATOR --work WORK
python benchmarks/protein.py judge --chains chains.fasta --work WORK
python benchmarks/protein.py score --chains chains.fasta --work WORK --out benchmarks/results/protein.csv

`sample` works in blocks of 20 chains, keeps each block in a file of WORK and skips those that exist: it can be
stopped and started; so can `judge`, which asks the second model. `score` reads the chains that all rows have. It also
writes, for every row with mutual information, the difference from its rivals (`rivals`) on the same prompts. Seconds
are CPU time of one thread: others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdmi_fast import load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import EntropyBound, MIBudget, Policy, Probing, Random, Sequential, Shuffled, TopK, decode
from mdmi_fast.estimator import PairScorer
from mdmi_fast.files import replace_file
from mdmi_fast.statistics import Interval, mean_interval
from mdmi_fast.tasks.likelihood import surprise
from mdmi_fast.tasks.protein.chains import Chain, read_fasta
from mdmi_fast.tasks.protein.scores import Reference, diversity
from mdmi_fast.tasks.protein.states import TASKS, Task, prompts, split

MODEL, JUDGE = "sapiens:heavy?batch_invariant=false", "antiberty"
BLOCK = 20


def rows(mi: PairScorer | None) -> dict[str, Policy]:
    """Every policy by name, without an estimator those that need none; but see `slow_rows`."""
    found: dict[str, Policy] = {"sequential": Sequential(), "all at once": TopK(1000)}
    found |= {f"top-{k}": TopK(k) for k in (4, 8, 12, 24)}
    found |= {f"entropy bound {g:g}": EntropyBound(g) for g in (4, 8, 16, 32)}
    if mi is None:
        return found
    found |= {f"MI budget {g:g}": MIBudget(mi, g) for g in (8, 16, 32)}
    for gamma in (0.03, 0.1, 0.3, 1, 3):
        found[f"MI budget {gamma:g}, no entropy"] = MIBudget(mi, gamma, entropy_weight=0.0)
    for gamma in (0.1, 0.3, 1):
        found[f"shuffled MI budget {gamma:g}, no entropy"] = MIBudget(Shuffled(mi), gamma, entropy_weight=0.0)
    return found


def slow_rows() -> dict[str, Policy]:
    """For a subset: one by one in random order, and MI from the model itself, some thousand passes a chain."""
    probing = Probing(epsilon=0.01, batch_size=128)
    found: dict[str, Policy] = {"random order": Random(1)}
    return found | {f"probed MI budget {g:g}, no entropy": MIBudget(probing, g, entropy_weight=0.0) for g in (0.3, 1)}


def sample(options: argparse.Namespace) -> None:
    model: Any = load_model(MODEL)
    _, judged = split(read_fasta(options.chains), longest=model.max_length - 2)
    policies = slow_rows() if options.slow else rows(load_estimator(options.estimator) if options.estimator else None)
    for block in range(options.blocks):
        for task in options.tasks:
            asked = prompts(task, judged[BLOCK * block :], BLOCK, seed=block)
            for name, policy in policies.items():
                path = options.work / f"{task}-{name}-{block}.json"
                if not path.exists() and options.only in name:
                    with replace_file(path) as temporary:
                        temporary.write_text(json.dumps(_decode(model, asked, policy, seed=block)))
                    print(path.name, flush=True)


def _decode(model: Any, asked: list[str], policy: Policy, *, seed: int) -> dict[str, Any]:
    tokens = model.tokenizer.encode(asked)
    start = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    result = decode(model, tokens, policy, temperature=1.0, generator=generator)
    seconds = [(time.process_time() - start) / len(asked)] * len(asked)
    chains = model.tokenizer.decode(result.tokens)
    return {"prompts": asked, "chains": chains, "passes": result.passes.tolist(), "seconds": seconds}


def judge(options: argparse.Namespace) -> None:
    """Surprise of chains under the second model, kept in files of WORK; all rows get their first 100 first."""
    model: Any = load_model(MODEL)
    second = load_model(JUDGE)
    _, judged = split(read_fasta(options.chains), longest=model.max_length - 2)
    for stop in range(5 * BLOCK, options.most + 1, 5 * BLOCK):
        for task in options.tasks:
            for name, sampled in _samples(options.work, task, judged).items():
                path = _judged_path(options.work, task, name)
                known = json.loads(path.read_text()) if path.exists() else []
                chains = sampled["chains"][:stop]
                if (options.rows and name not in options.rows) or len(known) >= len(chains):
                    continue
                places = [[i for i, r in enumerate(prompt) if r == "_"] for prompt in sampled["prompts"]]
                rest = slice(len(known), len(chains))
                known += surprise(second, chains[rest], places[rest], passes=options.passes).tolist()
                with replace_file(path) as temporary:
                    temporary.write_text(json.dumps(known))
                print(path.name, len(known), flush=True)


def score(options: argparse.Namespace) -> None:
    model: Any = load_model(MODEL)
    others, judged = split(read_fasta(options.chains), longest=model.max_length - 2)
    real = Reference([chain.residues for chain in others])
    table, differences = [], []
    for task in options.tasks:
        samples = _samples(options.work, task, judged)
        own = Reference(samples["sequential"]["chains"])
        surprises = {name: _judged(options.work, task, name) for name in samples}
        passes = {name: float(np.mean(sampled["passes"])) for name, sampled in samples.items()}
        for name in sorted(samples, key=lambda name: (passes[name], name)):
            table.append(_row(task, name, samples[name], surprises[name], real, own))
            print(table[-1], flush=True)
            for rival in rivals(name, passes):
                differences.append(
                    {"task": task, "policy": name, "passes": round(passes[name], 2)}
                    | {"against": rival, "passes_against": round(passes[rival], 2)}
                    | _difference(samples[name], samples[rival], surprises[name], surprises[rival], real)
                )
    _write(options.out, table)
    _write(options.out.with_stem(f"{options.out.stem}_differences"), differences)


def rivals(name: str, passes: dict[str, float]) -> list[str]:
    """What a row with mutual information is measured against: one by one, and of each family without it, and of its
    control, the row whose passes are nearest (as a ratio)."""
    if "MI budget" not in name or name.startswith("shuffled"):
        return []

    def ratio(other: str) -> float:
        return abs(math.log(passes[other] / passes[name]))

    families = ("entropy bound", "top-", "shuffled")
    return ["sequential", *(min((o for o in passes if o.startswith(family)), key=ratio) for family in families)]


def _row(task: str, name: str, sampled: dict[str, Any], values: Any, real: Reference, own: Reference) -> dict[str, Any]:
    chains = sampled["chains"]
    distinct, identity = diversity(chains)
    row: dict[str, Any] = {
        "task": task,
        "policy": name,
        "chains": len(chains),
        "passes": round(float(np.mean(sampled["passes"])), 2),
        "cpu_seconds_per_chain": round(float(np.mean(sampled["seconds"])), 3),
        "judged": len(values),
    }
    row |= _columns("antiberty_nats", mean_interval(values) if len(values) else _UNJUDGED)
    for prefix, reference in (("real", real), ("own", own)):
        for key, estimate in reference.compare(chains)._asdict().items():
            row |= _columns(f"{prefix}_{key}", estimate)
    return row | {"distinct": round(distinct, 3), "identity": round(identity, 4)}


def _difference(
    first: dict[str, Any], second: dict[str, Any], values: Any, other_values: Any, real: Reference
) -> dict[str, Any]:
    """`first` minus `second`, of the prompts that both answered."""
    count, judged = min(len(first["chains"]), len(second["chains"])), min(len(values), len(other_values))
    row: dict[str, Any] = {"chains": count, "judged": judged}
    row |= _columns("antiberty_nats", mean_interval(values[:judged] - other_values[:judged]) if judged else _UNJUDGED)
    found = real.compare(first["chains"][:count], minus=second["chains"][:count])
    for key, estimate in found._asdict().items():
        row |= _columns(f"real_{key}", estimate)
    return row


_UNJUDGED = Interval(math.nan, math.nan, math.nan)


def _columns(name: str, estimate: Interval) -> dict[str, float]:
    names = (name, f"{name}_low", f"{name}_high")
    return {key: round(value, 5) for key, value in zip(names, estimate, strict=True)}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_table(path, rows[0], rows)


def _samples(work: Path, task: Task, chains: list[Chain]) -> dict[str, dict[str, list[Any]]]:
    """name -> the chains of a row, as many as all have but the slow ones; real chains are a row too."""
    found: dict[str, dict[str, list[Any]]] = {}
    for path in sorted(work.glob(f"{task}-*.json"), key=lambda p: int(p.stem.rsplit("-", 1)[1])):
        name = path.stem[len(task) + 1 :].rsplit("-", 1)[0]
        block = json.loads(path.read_text())
        found[name] = {key: found[name][key] + block[key] for key in block} if name in found else block
    count = min(len(row["chains"]) for name, row in found.items() if name not in slow_rows())
    found = {name: {key: values[:count] for key, values in row.items()} for name, row in found.items()}
    # Real chains as if they had been sampled: where a perfect sampler of a perfect model would be.
    asked = found["sequential"]["prompts"]
    real = [chains[number % len(chains)].residues for number in range(count)]
    return found | {"real chains": {"prompts": asked, "chains": real, "passes": [0] * count, "seconds": [0] * count}}


def _judged_path(work: Path, task: Task, name: str) -> Path:
    return work / f"judged-{task}-{name}.json"


def _judged(work: Path, task: Task, name: str) -> Any:
    path = _judged_path(work, task, name)
    return np.array(json.loads(path.read_text()) if path.exists() else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sampling = commands.add_parser("sample")
    sampling.set_defaults(run=sample)
    sampling.add_argument("--estimator", help="folder of one for sapiens:heavy; without it the rows that need none")
    sampling.add_argument("--blocks", type=int, default=25, help=f"of {BLOCK} chains")
    sampling.add_argument("--slow", action="store_true", help="the rows of a subset instead, see `slow_rows`")
    judging = commands.add_parser("judge")
    judging.set_defaults(run=judge)
    judging.add_argument("--most", type=int, default=500, help="chains a row")
    judging.add_argument("--passes", type=int, default=4, choices=range(1, 5), help="a chain, 4 to judge every residue")
    judging.add_argument("--rows", nargs="+", help="names of rows (default: all)")
    scoring = commands.add_parser("score")
    scoring.set_defaults(run=score)
    scoring.add_argument("--out", type=Path, required=True, help="CSV to write; differences go to one beside it")
    sampling.add_argument("--only", default="", help="rows whose name contains this")
    for command in (sampling, judging, scoring):
        command.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
        command.add_argument("--chains", type=Path, required=True)
        command.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
