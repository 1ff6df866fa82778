"""Does the mutual information of a heavy chain show what is known of it? Probed, everything masked.

python benchmarks/protein_map.py --chains chains.fasta --count 5 --out benchmarks/results/protein_map.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import label_mi, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.tasks.protein.chains import read_fasta
from mdmi_fast.tasks.protein.states import prompts, split
from mdmi_fast.tasks.protein.structure import enrichment, known_pairs, rank_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=0.01, help="nats an entry may be wrong by")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model: Any = load_model("sapiens:heavy", batch_invariant=False)
    _, chains = split(read_fasta(options.chains), longest=model.max_length - 2)
    rows = []
    for chain in chains[: options.count]:
        (prompt,) = prompts("generate", [chain], 1, seed=0)
        tokens = model.tokenizer.encode([prompt])[0]
        mi = label_mi(model, tokens, epsilon=options.epsilon, batch_size=64).mi[1:-1, 1:-1].double().numpy()
        for kind, known in known_pairs(chain).items():
            found = enrichment(mi, known)
            rows.append(
                {
                    "chain": chain.name,
                    "residues": len(chain.residues),
                    "kind": kind,
                    **{key: round(value, 4) for key, value in found._asdict().items()},
                    "rank_of_cysteines": round(rank_share(mi, chain.cysteines), 4),
                }
            )
            print(rows[-1], flush=True)
        write_table(options.out, rows[0], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
