"""Sample antibody heavy chains with every policy and score them: passes against quality, temperature 1.

python -m mdmi_fast.tasks.protein chains --out chains.fasta
python benchmarks/protein.py sample --chains chains.fasta --estimator ESTIMATOR --work WORK
python benchmarks/protein.py score --chains chains.fasta --work WORK --out benchmarks/results/protein.csv

`sample` works in blocks of 100 chains, keeps each block in a file of WORK and skips those that exist: it can be
stopped and started. `score` reads what is there. Seconds are CPU time of one thread: others may use the machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdmi_fast import load_estimator, load_model
from mdmi_fast.decode import EntropyBound, MIBudget, Policy, Probing, Random, Sequential, Shuffled, TopK, decode
from mdmi_fast.estimator import PairScorer
from mdmi_fast.files import replace_file
from mdmi_fast.tasks.likelihood import Estimate, mean_estimate, surprise
from mdmi_fast.tasks.protein.chains import Chain, read_fasta
from mdmi_fast.tasks.protein.scores import Reference, diversity
from mdmi_fast.tasks.protein.states import TASKS, Task, prompts, split

MODEL, JUDGE = "sapiens:heavy", "antiberty"
BLOCK = 100


def rows(mi: PairScorer | None) -> dict[str, Policy]:
    """Every policy by name, without an estimator those that need none; the oracle is apart, see `oracles`."""
    found: dict[str, Policy] = {"sequential": Sequential(), "random order": Random(1), "all at once": TopK(1000)}
    found |= {f"top-{k}": TopK(k) for k in (4, 8, 12, 24)}
    found |= {f"random-{k}": Random(k) for k in (8, 24)}
    found |= {f"entropy bound {g:g}": EntropyBound(g) for g in (2, 4, 8, 16, 32)}
    if mi is None:
        return found
    found |= {f"MI budget {g:g}": MIBudget(mi, g) for g in (4, 8, 16, 32)}
    for gamma in (0.01, 0.03, 0.1, 0.3, 1, 3, 10):
        found[f"MI budget {gamma:g}, no entropy"] = MIBudget(mi, gamma, entropy_weight=0.0)
    for gamma in (0.1, 0.3, 1):
        found[f"shuffled MI budget {gamma:g}, no entropy"] = MIBudget(Shuffled(mi), gamma, entropy_weight=0.0)
    return found


def oracles() -> dict[str, Policy]:
    """MI from the model itself, some thousand passes a chain: for a subset."""
    probing = Probing(epsilon=0.01, batch_size=128)
    return {f"probed MI budget {g:g}, no entropy": MIBudget(probing, g, entropy_weight=0.0) for g in (0.3, 1)}


def sample(options: argparse.Namespace) -> None:
    model: Any = load_model(MODEL)
    _, judged = split(read_fasta(options.chains), longest=model.max_length - 2)
    policies = oracles() if options.oracle else rows(load_estimator(options.estimator) if options.estimator else None)
    count = options.oracle or BLOCK
    for block in range(options.blocks):
        for task in options.tasks:
            asked = prompts(task, judged[BLOCK * block :], count, seed=block)
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
    seconds = time.process_time() - start
    chains = model.tokenizer.decode(result.tokens)
    return {"prompts": asked, "chains": chains, "passes": result.passes.tolist(), "seconds": seconds}


def score(options: argparse.Namespace) -> None:
    model: Any = load_model(MODEL)
    judge = load_model(JUDGE) if options.most else None
    _, judged = split(read_fasta(options.chains), longest=model.max_length - 2)
    real = Reference([chain.residues for chain in judged])
    found = []
    for task in options.tasks:
        samples = _samples(options.work, task)
        if "sequential" not in samples:
            continue
        samples["real chains"] = _real(task, judged, len(samples["sequential"]["chains"]))
        own = Reference(samples["sequential"]["chains"])
        for name, sampled in samples.items():
            places = [[i for i, r in enumerate(prompt) if r == "_"] for prompt in sampled["prompts"]]
            values = _judged(
                options.work / f"judged-{task}-{name}.json", judge, sampled["chains"], places, options.most
            )
            found.append(_row(task, name, sampled, values, real, own))
            print(found[-1], flush=True)
            with replace_file(options.out) as temporary, temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(found[0]))
                writer.writeheader()
                writer.writerows(found)


def _row(task: str, name: str, sampled: dict[str, Any], values: Any, real: Reference, own: Reference) -> dict[str, Any]:
    chains = sampled["chains"]
    distinct, identity = diversity(chains)
    row: dict[str, Any] = {
        "task": task,
        "policy": name,
        "chains": len(chains),
        "passes": round(float(np.mean(sampled["passes"])), 2),
        "cpu_seconds_per_chain": round(sampled["seconds"] / len(chains), 3),
    }
    unjudged = Estimate(math.nan, math.nan, math.nan)
    estimates = {"antiberty_nats": mean_estimate(values) if len(values) > 1 else unjudged}
    for prefix, reference in (("real", real), ("own", own)):
        estimates |= {f"{prefix}_{key}": value for key, value in reference.compare(chains)._asdict().items()}
    for key, estimate in estimates.items():
        row |= {
            key: round(estimate.value, 5),
            f"{key}_low": round(estimate.low, 5),
            f"{key}_high": round(estimate.high, 5),
        }
    return row | {"judged": len(values), "distinct": round(distinct, 3), "identity": round(identity, 4)}


def _samples(work: Path, task: Task) -> dict[str, dict[str, Any]]:
    """name -> all blocks of a row together."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(work.glob(f"{task}-*.json"), key=lambda p: int(p.stem.rsplit("-", 1)[1])):
        name = path.stem[len(task) + 1 :].rsplit("-", 1)[0]
        block = json.loads(path.read_text())
        found[name] = {key: found[name][key] + block[key] for key in block} if name in found else block
    return found


def _real(task: Task, chains: list[Chain], count: int) -> dict[str, Any]:
    """Real chains as if they had been sampled: where a perfect sampler of a perfect model would be."""
    asked = [
        text for block in range(count // BLOCK) for text in prompts(task, chains[BLOCK * block :], BLOCK, seed=block)
    ]
    residues = [chains[(BLOCK * (n // BLOCK) + n % BLOCK) % len(chains)].residues for n in range(len(asked))]
    return {"prompts": asked, "chains": residues, "passes": [0] * len(asked), "seconds": 0.0}


def _judged(path: Path, judge: Any, chains: list[str], places: list[list[int]], most: int) -> Any:
    """Surprise of the first chains, kept in a file: judging is the slow part."""
    known = json.loads(path.read_text()) if path.exists() else []
    wanted = min(most, len(chains))
    for start in range(len(known), wanted, 20):  # a multiple of the places that `surprise` alternates between
        stop = min(start + 20, wanted)
        known += surprise(judge, chains[start:stop], places[start:stop]).tolist()
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(known))
    return np.array(known[:wanted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sampling = commands.add_parser("sample")
    sampling.set_defaults(run=sample)
    sampling.add_argument("--estimator", help="folder of one for sapiens:heavy; without it the rows that need none")
    sampling.add_argument("--blocks", type=int, default=5, help="of 100 chains")
    sampling.add_argument("--only", default="", help="rows whose name contains this")
    sampling.add_argument("--oracle", type=int, metavar="CHAINS", help="the probed rows instead, on so many chains")
    scoring = commands.add_parser("score")
    scoring.set_defaults(run=score)
    scoring.add_argument("--out", type=Path, required=True, help="CSV to write")
    scoring.add_argument(
        "--most", type=int, default=500, help="chains a row that antiberty judges, which is slow; 0 for none"
    )
    for command in (sampling, scoring):
        command.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
        command.add_argument("--chains", type=Path, required=True)
        command.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
