"""What the Triton kernels compile to, for every target and without a GPU.

    python -m benchmarks.static_report                  # every kernel as chosen: benchmarks/results/triton_static.csv
    python -m benchmarks.static_report --variants       # alternatives of the pair kernel: .../triton_variants.csv

Nothing here is a measured speed. `bound` is the larger of two times of one round of the main loop: that of its products on the tensor
cores at their dense peak, and that of issuing all its instructions; `most` is the share of the tensor cores' peak that this
leaves, before waiting for memory and barriers. Run it at idle priority: it takes minutes of CPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernel_cases, offline
from mdmi_fast.backends.triton._common import Tile
from mdmi_fast.backends.triton.tiles import PairTile
from mdmi_fast.backends.triton.tuner import tuner
from mdmi_fast.bench.report import write_table

RESULTS = Path(__file__).parent / "results"

# Dense half-precision FLOP and instructions of a warp (wave) that one multiprocessor (compute unit) does in a clock, from the
# vendors' data sheets: A100, H100, B200, MI300X.
FLOP_A_CLOCK = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192, "gfx942": 2048}
ISSUED_A_CLOCK = {"sm_80": 4, "sm_90": 4, "sm_100": 4, "gfx942": 1}

# i, j, k, n, warps, stages
VARIANTS = [
    (8, 16, 64, 256, 8, 3),
    (8, 16, 64, 256, 8, 2),
    (8, 16, 32, 256, 8, 3),
    (8, 16, 128, 256, 8, 2),
    (8, 16, 64, 128, 8, 3),
    (8, 16, 64, 128, 4, 3),
    (8, 8, 64, 256, 4, 3),
    (8, 8, 64, 128, 4, 3),
    (8, 8, 64, 128, 8, 3),
    (16, 16, 64, 128, 8, 3),
    (16, 16, 32, 128, 8, 2),
    (16, 16, 64, 256, 8, 2),
]
NETWORKS = [(512, 256), (256, 128)]


def loop_flop(loop: dict[str, int], warps: int, tile_flop: float) -> float:
    """Of the products in one round of the loop; by the instructions' shapes where their names tell them."""
    flop = 0.0
    for name, count in loop.items():
        if name.startswith("HMMA.16816"):
            flop += count * warps * 2 * 16 * 8 * 16
        elif shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
            flop += count * warps / 4 * 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
        elif shape := re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)", name):
            flop += count * warps * 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
    return flop or tile_flop


def described(target: str, case: str, launch: offline.Launch, code: offline.Code) -> dict[str, Any]:
    """A row of the table."""
    net, warps = launch.constants.get("NET"), launch.tile.warps
    in_loop = sum(n for name, n in code.loop.items() if offline.is_product(name, target))
    row = {
        "triton": triton.__version__,
        "target": target,
        "case": case,
        "kernel": launch.name,
        "i": net.BLOCK_I if net else "",
        "j": net.BLOCK_J if net else "",
        "k": net.BLOCK_K if net else launch.constants.get("BLOCK_K", ""),
        "n": net.BLOCK_N if net else "",
        "warps": warps,
        "stages": launch.tile.stages,
        "registers": code.registers,
        "spilled": code.spilled,
        "shared_bytes": code.shared,
        "loop_instructions": code.loop.total(),
        "loop_tensor_core": in_loop,
        "products_per_other": round(in_loop / (code.loop.total() - in_loop), 4) if in_loop else "",
        "flop_per_byte": "",
        "bound": "",
        "most": "",
        "mix": " ".join(f"{name}:{n}" for name, n in code.loop.most_common(8)),
    }
    if in_loop and launch.name == "_pairwise_mlp_fwd_kernel" and net.PRECISION == "ieee":
        pairs = net.BLOCK_I * net.BLOCK_J
        flop = loop_flop(code.loop, warps, 2.0 * pairs * net.BLOCK_K * net.BLOCK_N)
        product, issue = flop / FLOP_A_CLOCK[target], code.loop.total() * warps / ISSUED_A_CLOCK[target]
        row["flop_per_byte"] = pairs  # 2 FLOP a pair for each weight of 2 bytes
        row["bound"] = "tensor cores" if product >= issue else "instructions"
        row["most"] = round(product / max(product, issue), 3)
    return row


def rows(targets: list[str], variants: bool) -> Iterator[dict[str, Any]]:
    for target in targets:
        if variants:
            for widths in NETWORKS:
                launches: list[offline.Launch] = []
                for *sizes, warps, stages in VARIANTS:
                    tile = PairTile(*sizes, Tile(warps, stages))
                    with offline.recorded(target) as found, tuner.forced(tile):
                        kernel_cases.scores(widths)
                    launches += found  # 128 outputs are all of a narrow network: some of its variants are one
                yield from compiled(target, "/".join(map(str, widths)), launches)
            continue
        for size, cases in kernel_cases.CASES.items():
            for case, call in cases.items():
                with offline.recorded(target) as launches:
                    call()
                yield from compiled(target, f"{size} {case}", launches)


def compiled(target: str, case: str, launches: list[offline.Launch]) -> Iterator[dict[str, Any]]:
    for launch in offline.distinct(launches):
        try:
            code = offline.read(offline.compiled(launch), target)
        except triton.CompilationError as error:
            raise SystemExit(f"{target} {case} {launch.name}: {error}") from error
        yield described(target, case, launch, code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="compile the alternatives of the pair kernel")
    parser.add_argument("--target", action="append", choices=list(offline.TARGETS), help="default: all")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/triton_{static,variants}.csv")
    options = parser.parse_args()
    output = options.output or RESULTS / f"triton_{'variants' if options.variants else 'static'}.csv"
    table = []
    for row in rows(options.target or list(offline.TARGETS), options.variants):
        table.append(row)
        short = {k: v for k, v in row.items() if v != "" and k not in ("triton", "mix")}
        print("  ".join(f"{k} {v}" for k, v in short.items()), flush=True)
        write_table(output, row, table)


if __name__ == "__main__":
    main()
