"""When a cache helps: time per sequence of a look-up against computing again; python benchmarks/cache_gain.py.

States are what the Sudoku model meets while it decodes. Computing is one selection within a budget, with mutual
information from the shipped estimator or probed from the model. Redis runs beside it, on a local socket.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mdmi_fast import MIBudget, Probing, load_estimator, load_model, ops
from mdmi_fast.bench.report import write_table
from mdmi_fast.cache import Cache, CachedPolicy, DiskStore, MemoryStore, RedisStore
from mdmi_fast.decoding.policies import Step
from mdmi_fast.tasks.sudoku.states import decoding_states

RESULTS = Path(__file__).parent / "results" / "cache.csv"
BATCH, ROUNDS = 16, 5


def median_us(run: Callable[[], object]) -> float:
    """Microseconds per sequence, the median of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / BATCH * 1e6


def main() -> None:
    torch.set_num_threads(1)
    model = load_model("sudoku")
    tokens = decoding_states(model, BATCH, seed=1)
    output, mask = model(tokens), tokens == model.mask_token_id
    stats, step = ops.token_stats(output.logits), Step(0, model=model, tokens=tokens)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        binary = shutil.which("redis-server")
        server = binary and subprocess.Popen(
            [binary, "--port", "0", "--unixsocket", str(socket), "--save", ""], stdout=subprocess.DEVNULL, cwd=folder
        )
        while server and not socket.exists():
            time.sleep(0.01)
        for name, source in [("estimator", load_estimator("sudoku")), ("probed", Probing())]:
            policy = MIBudget(source, gamma=0.02, entropy_weight=0.0)
            compute = median_us(lambda policy=policy: policy.select(stats, output.hidden, mask, step))
            stores = [MemoryStore(), DiskStore(Path(folder) / name)]
            stores += [RedisStore(f"unix://{socket}", timeout=5.0)] if server else []
            for store in stores:
                cached = CachedPolicy(policy, model, Cache(store))
                cached.select(stats, output.hidden, mask, step)
                hit = median_us(lambda cached=cached: cached.select(stats, output.hidden, mask, step))
                # A look-up pays when hit + (1 - rate) compute < compute.
                rows.append((name, store.name, f"{compute:.1f}", f"{hit:.1f}", f"{min(1.0, hit / compute):.3f}"))
        if server:
            server.kill()
            server.wait()
    print(f"{'MI':<11}{'store':<9}{'compute us':>12}{'hit us':>9}  hit rate from which it pays")
    for row in rows:
        print(f"{row[0]:<11}{row[1]:<9}{row[2]:>12}{row[3]:>9}  {row[4]}")
    write_table(RESULTS, ["mi", "store", "compute_us_per_sequence", "hit_us_per_sequence", "break_even_hit_rate"], rows)


if __name__ == "__main__":
    main()
