"""How well mutual information tells which cells share a unit, the rules were never given; python benchmarks/sudoku_map_area.py.

The area under the ROC curve of "shares a row, column or box" by mutual information over the pairs of blank cells, by
how many cells are blank, for values probed from the model and predicted by its estimator, and their control: the
prediction from the entropies alone, min(H_i, H_j), which says how far openness explains it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from mdmi_fast import load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.maps import MIMap, mi_map, roc_area
from mdmi_fast.tasks.sudoku.boards import rule_matrix
from mdmi_fast.tasks.sudoku.states import decoding_states

RESULTS = Path(__file__).parent / "results" / "sudoku_map_area.csv"
STATES, BLANKS = 240, ((10, 27), (28, 45), (46, 63), (64, 81))


def main() -> None:
    torch.set_num_threads(1)
    model, estimator, rules = load_model("sudoku"), load_estimator("sudoku"), rule_matrix()
    areas: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for state in decoding_states(model, STATES, seed=11):
        blanks = int((state == model.mask_token_id).sum())
        kind = next((kind for kind in BLANKS if kind[0] <= blanks <= kind[1]), None)
        if kind is None:
            continue
        probed = mi_map(model, state)
        predicted = mi_map(model, state, estimator=estimator)
        bound = torch.minimum(probed.entropy.unsqueeze(0), probed.entropy.unsqueeze(1))
        openness = MIMap(bound, probed.entropy, probed.tokens, probed.mask, probed.labels, "min(H_i, H_j)")
        for name, found in (("probed", probed), ("predicted", predicted), ("min(H_i, H_j)", openness)):
            areas.setdefault((name, kind), []).append(roc_area(found, rules))
    rows = [
        (
            name,
            f"{kind[0]} to {kind[1]}",
            len(values),
            f"{statistics.mean(values):.4f}",
            f"{statistics.stdev(values):.4f}",
        )
        for (name, kind), values in sorted(areas.items())
    ]
    print(f"{'MI':<16}{'blank cells':<14}{'boards':>7}{'area':>9}{'sd':>9}")
    for name, kind_text, count, mean, sd in rows:
        print(f"{name:<16}{kind_text:<14}{count:>7}{mean:>9}{sd:>9}")
    write_table(RESULTS, ["mi", "blank_cells", "boards", "roc_area", "sd"], rows)


if __name__ == "__main__":
    main()
