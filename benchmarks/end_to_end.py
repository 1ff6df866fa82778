"""Decoding from end to end: every rule against one position at a time, at equal quality, in passes and on the clock.

python -m mdmi_fast.tasks.protein chains --out chains.fasta      # and an estimator: mdmi_fast/tasks/protein/README.md
python benchmarks/end_to_end.py quality --chains chains.fasta --estimator ESTIMATOR --work WORK
python benchmarks/end_to_end.py clock --chains chains.fasta --estimator ESTIMATOR --work WORK

`quality` needs no idle machine. It chooses of every rule the setting with the fewest passes that loses at most 1% on
calibration sequences (where none does, the one that loses least), and decodes other sequences with it. `clock` times the chosen
policies in turns, on an idle machine, and writes benchmarks/results/decoding_end_to_end.csv from both. Both keep in WORK what is
done and may be stopped at any time.

Without --chains and --estimator the antibody model is left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import Selection, TokenStats, decode, load_estimator, load_model, set_num_threads
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import MISource, Policy, parse_policy
from mdmi_fast.decoding.calibrate import YARDSTICK, Measured, Quality, Target, Tried, choose
from mdmi_fast.decoding.quality import pseudo_likelihood
from mdmi_fast.decoding.randomness import draw_seeds
from mdmi_fast.files import replace_file
from mdmi_fast.models import MaskedModel, MaskedOutput, RestrictedModel
from mdmi_fast.tasks.protein.chains import read_fasta
from mdmi_fast.tasks.protein.states import prompts, split
from mdmi_fast.tasks.sudoku.demo import make_task
from mdmi_fast.tasks.sudoku.puzzles import is_valid_board

RESULTS = Path(__file__).parent / "results" / "decoding_end_to_end.csv"
EQUAL = Target.of("at most 1% loss")
BATCH, ROUNDS = 32, 5
BOARDS = (
    *("topk:2", "topk:3", "topk:4", "topk:6", "topk:8"),
    *(f"confidence:{threshold:g}" for threshold in (0.99, 0.95, 0.9, 0.8, 0.6)),
    *(f"confidence-factor:{factor:g}" for factor in (0.1, 0.3, 1, 2)),
    *(f"confidence-budget:{epsilon:g}" for epsilon in (0.02, 0.05, 0.1, 0.2, 0.5, 1)),
    *(f"entropy-bound:{gamma:g}" for gamma in (0.02, 0.05, 0.1, 0.2, 0.5, 1)),
    *("stability:0.001,confidence=0.9", "stability:0.01,confidence=0.9", "stability:0.01,confidence=0.7"),
    *(f"mi-budget:{gamma:g}" for gamma in (0.1, 0.3, 0.6, 1, 2)),
    *(f"mi-threshold:{tau:g}" for tau in (0.005, 0.02, 0.05, 0.1)),
    *("coloring:0.005", "coloring:0.02", "coloring:0.05", "coloring:0.05,replan=2"),
)
"""Settings for boards, careful ones of a rule first."""
SAMPLED = tuple(f"mi-budget:{gamma:g},entropy_weight=0" for gamma in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
"""Tried too where boards are generated."""
ANTIBODY = (
    *("topk:4", "topk:8", "confidence:0.6", "confidence-budget:1", "confidence-budget:3", "entropy-bound:1"),
    *("entropy-bound:4", "entropy-bound:8", "mi-budget:8", "mi-budget:0.01,entropy_weight=0"),
    *(
        "mi-budget:0.1,entropy_weight=0",
        "mi-budget:0.3,entropy_weight=0",
        "attention-graph:0.01",
        "attention-graph:0.03",
    ),
)
"""Settings for half a chain, whose entropies are larger than those of a puzzle."""


class Data(NamedTuple):
    """Sequences to decode, padding False in `visible`, and how good an answer is."""

    tokens: Tensor
    visible: Tensor | None
    quality: Quality


class Case(NamedTuple):
    """A task of one model: sequences to choose settings with and others to measure on; so many of them are timed."""

    model: MaskedModel
    mi: MISource
    temperature: float
    settings: Sequence[str]
    calibration: Data
    measured: Data
    timed: int


def boards(kind: str, regime: str, calibration: int, measured: int) -> Case:
    def data(count: int, split: Any) -> Data:
        return Data(
            make_task(kind, count, split=split).tokens, None, lambda tokens, asked, rows: is_valid_board(tokens)
        )

    model, temperature = load_model(f"sudoku:{regime}"), make_task(kind, 1).temperature
    estimator, settings = load_estimator(f"sudoku:{regime}"), (*BOARDS, *SAMPLED) if temperature > 0 else BOARDS
    on_the_clock = 64 if kind == "solve" else 32
    return Case(
        model, estimator, temperature, settings, data(calibration, "validation"), data(measured, "test"), on_the_clock
    )


def antibodies(chains: Path, estimator: Path) -> Case:
    """Real chains of which a random half is sampled again; quality is the model's own pseudo-likelihood."""
    model: Any = load_model("sapiens:heavy", attention="eager")
    for_states, judged = split(read_fasta(chains), longest=model.max_length - 2)

    def data(found: Any, count: int) -> Data:
        tokens = model.tokenizer.encode(prompts("complete", found, count, seed=1))
        visible = tokens != model.pad_token_id

        def quality(decoded: Tensor, asked: Tensor, rows: Tensor) -> Tensor:
            draw = torch.Generator().manual_seed(0)
            shown = visible[rows]
            return pseudo_likelihood(model, decoded, asked, attention_mask=shown, positions=4, generator=draw)

        return Data(tokens, visible, quality)

    return Case(model, load_estimator(str(estimator)), 1.0, ANTIBODY, data(for_states, 32), data(judged, 64), 8)


def cases(options: argparse.Namespace) -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {
        "sudoku:strong, solve": lambda: boards("solve", "strong", 200, 500),
        "sudoku:weak, solve": lambda: boards("solve", "weak", 200, 500),
        "sudoku:strong, generate": lambda: boards("generate", "strong", 100, 300),
    }
    if options.chains is not None:
        found["sapiens:heavy, fill half"] = lambda: antibodies(options.chains, options.estimator)
    return found


def rule_of(policy: str) -> str:
    """What is chosen from: a rule, or one without entropy."""
    return policy.partition(":")[0] + (", no entropy" if "entropy_weight=0" in policy else "")


def chosen_of(tried: list[Tried]) -> list[str]:
    """Of every rule the setting with the fewest passes at equal quality, or else the one that loses least."""
    rules: dict[str, list[Tried]] = {}
    for one in tried[1:]:
        rules.setdefault(rule_of(one.policy), []).append(one)
    return [(choose(of, EQUAL) or min(of, key=lambda one: one.loss.value)).policy for of in rules.values()]


def run(case: Case, data: Data, policies: Sequence[str], seed: int, folder: Path) -> list[Tried]:
    """What policies do, "sequential" first; every batch is kept in a file of the folder and not decoded again."""
    generator = torch.Generator().manual_seed(seed)
    seeds = draw_seeds(len(data.tokens), generator, torch.device("cpu"))
    found: list[Tried] = []
    yardstick: Measured | None = None
    for spec in (YARDSTICK, *policies):
        measured, path = Measured(), folder / f"{spec}.json"
        batches: list[Any] = json.loads(path.read_text()) if path.exists() else []
        for rows in torch.arange(len(data.tokens)).split(BATCH)[len(batches) :]:
            visible = None if data.visible is None else data.visible[rows]
            policy = parse_policy(spec, case.mi)
            result = decode(
                case.model,
                data.tokens[rows],
                policy,
                temperature=case.temperature,
                seeds=seeds[rows],
                attention_mask=visible,
            )
            asked = data.tokens[rows] == case.model.mask_token_id
            quality = data.quality(result.tokens, asked, rows).double()
            batches.append([result.passes.tolist(), quality.tolist()])
            with replace_file(path) as temporary:
                temporary.write_text(json.dumps(batches))
        for passes, quality in batches:
            measured.passes.append(torch.tensor(passes, dtype=torch.float64))
            measured.quality.append(torch.tensor(quality, dtype=torch.float64))
        yardstick = yardstick or measured
        found.append(measured.report(spec, yardstick, given_up=False, generator=generator))
        one = found[-1]
        print(
            f"{folder.name}: {spec:<40}{one.passes:7.2f} passes, quality {one.quality.value:.4f}, loss {one.loss.value:+.2%}",
            flush=True,
        )
    return found


def measured_of(name: str, case: Case, work: Path) -> list[Tried]:
    """The chosen setting of every rule on the sequences to measure on."""
    calibrated = run(case, case.calibration, case.settings, 1, work / f"{name}, calibration")
    return run(case, case.measured, chosen_of(calibrated), 2, work / name)


def quality(options: argparse.Namespace) -> None:
    for name, make in cases(options).items():
        measured_of(name, make(), options.work)


def _figures(one: Tried) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": one.policy, "sequences": one.sequences, "passes": round(one.passes, 2)}
    for name, interval in (("times_fewer", one.speedup), ("quality", one.quality), ("loss", one.loss)):
        row |= {f"{name}{end}": round(value, 4) for end, value in zip(("", "_low", "_high"), interval, strict=True)}
    return row


class Clocked:
    """A policy and its model, with the time that each takes."""

    def __init__(self, policy: Policy, model: MaskedModel) -> None:
        self.policy, self.network = policy, model
        self.mask_token_id, self.vocab_size, self.hidden_size = model.mask_token_id, model.vocab_size, model.hidden_size
        self.forbidden_tokens = model.forbidden_tokens if isinstance(model, RestrictedModel) else ()
        self.selecting = self.running = 0.0

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        start = time.perf_counter()
        selection = self.policy.select(stats, hidden, mask, step)
        self.selecting += time.perf_counter() - start
        return selection

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        start = time.perf_counter()
        output = self.network(tokens, attention_mask)
        self.running += time.perf_counter() - start
        return output


def timed(case: Case, policies: list[str]) -> Iterator[dict[str, Any]]:
    """Every policy once a round, so that all of them meet the same machine."""
    tokens, visible = (None if x is None else x[: case.timed] for x in case.measured[:2])
    assert tokens is not None  # only the padding may be
    seconds: dict[str, list[float]] = {policy: [] for policy in policies}
    inside: dict[str, Clocked] = {}
    for number in range(1 + ROUNDS):  # the first one warms up
        for spec in policies:
            both = inside[spec] = Clocked(parse_policy(spec, case.mi), case.model)
            start = time.perf_counter()
            seeds = torch.arange(case.timed)
            decode(both, tokens, both, temperature=case.temperature, seeds=seeds, attention_mask=visible)
            if number:
                seconds[spec].append(time.perf_counter() - start)
    first = seconds[policies[0]]
    for spec in policies:
        faster = [theirs / ours for theirs, ours in zip(first, seconds[spec], strict=True)]
        whole = seconds[spec][-1]
        yield {
            "ms_per_sequence": round(1000 * statistics.median(seconds[spec]) / case.timed, 3),
            "times_faster": round(statistics.median(faster), 2),
            "times_faster_least": round(min(faster), 2),
            "times_faster_most": round(max(faster), 2),
            "model_percent": round(100 * inside[spec].running / whole, 1),
            "policy_percent": round(100 * inside[spec].selecting / whole, 1),
        }


def clock(options: argparse.Namespace) -> None:
    where = {"machine": f"{platform.machine()}, {options.threads} thread(s)", "torch": torch.__version__}
    rows = []
    for name, make in cases(options).items():
        case, path = make(), options.work / f"{name}, clock.json"
        measured = measured_of(name, case, options.work)
        if not path.exists():
            found = list(timed(case, [one.policy for one in measured]))
            with replace_file(path) as temporary:
                temporary.write_text(json.dumps(found, indent=1))
        for one, times in zip(measured, json.loads(path.read_text()), strict=True):
            rows.append({"case": name, **_figures(one), **times, **where})
            print(
                f"{name:<26}{one.policy:<38}{one.passes:6.2f} passes {one.quality.value:.4f} ({one.loss.value:+.2%}) "
                f"{times['ms_per_sequence']:8.2f} ms, {times['times_faster']:5.2f} times faster, "
                f"policy {times['policy_percent']}%",
                flush=True,
            )
        write_table(RESULTS, rows[0], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("quality", "clock"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--chains", type=Path)
    parser.add_argument("--estimator", type=Path, help="folder of one for sapiens:heavy")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if (options.chains is None) != (options.estimator is None):
        parser.error("--chains and --estimator go together")
    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    {"quality": quality, "clock": clock}[options.stage](options)


if __name__ == "__main__":
    main()
