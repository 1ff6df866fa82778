"""`mdmi-fast couple`: learn how tokens of one pass change each other, from sequences that the model decodes itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import DATA_HELP, add_model, add_seed, add_threads, amount, kind_of, positive, share
from mdmi_fast.files import check_folder
from mdmi_fast.models.loading import registered, resolve

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.coupling import CouplingProgress, CouplingReport, LearnedCoupling, Share, Trajectories
    from mdmi_fast.models import MaskedModel

_GENERAL = ("rank", "distances")
"""Options of the general architecture only."""
_AT_ONCE = 256
"""Sequences of one file of trajectories, what a restart may repeat."""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "couple",
        help="learn how tokens drawn in one pass change each other",
        description="Decode sequences one position a pass, and learn from what the model says before and after every token: "
        "a coupling, with which decode draws the tokens of a pass one after the other, each corrected by those "
        "before. No probe is needed. An interrupted run goes on with the sequences that it has.",
    )
    add_model(parser)
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help=f"sequences of one length, of which those without a masked position are masked whole: {DATA_HELP}",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="of the coupling")
    parser.add_argument(
        "--temperature", type=amount, default=1.0, metavar="T", help="of the draws, as for decode (default: 1)"
    )
    parser.add_argument(
        "--order",
        choices=("random", "entropy"),
        default="random",
        help="in which positions are decoded; entropy: the lowest first (default: random)",
    )
    parser.add_argument(
        "--layers", type=_widths, metavar="W,W", help="widths of the layers (default: the architecture's)"
    )
    parser.add_argument(
        "--architecture",
        choices=("general", *registered("mdmi_fast.couplings")),
        help="of the coupling (default: that of the model's task, else general)",
    )
    general = parser.add_argument_group("of the general architecture")
    general.add_argument("--rank", type=positive, metavar="N", help="numbers of a shift (default: 48)")
    general.add_argument("--distances", type=positive, metavar="K", help="farthest pair that is corrected (default: 8)")
    parser.add_argument(
        "--states", type=positive, default=16_000, metavar="N", help="states to ask about (default: 16000)"
    )
    parser.add_argument("--steps", type=positive, default=3_000, metavar="N", help="of training (default: 3000)")
    parser.add_argument(
        "--most-drawn", type=positive, default=16, metavar="N", help="tokens drawn from a state (default: 16)"
    )
    parser.add_argument("--lr", type=amount, default=2e-3, metavar="RATE", help="learning rate (default: 0.002)")
    parser.add_argument("--held-out", type=share, default=0.1, metavar="SHARE", help="of the sequences (default: 0.1)")
    add_seed(parser, of="weights, draws and states")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder(options.out)
    if options.temperature == 0:
        raise UsageError("--temperature must be above 0: without draws nothing depends on them")
    kind = kind_of(options.model)
    architecture = options.architecture or (kind if kind in registered("mdmi_fast.couplings") else "general")
    named = [name for name in _GENERAL if getattr(options, name) is not None]
    if architecture != "general" and named:
        raise UsageError(f"--{named[0]} belongs to --architecture general")
    import torch

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.coupling import train_coupling
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    trajectories = _trajectories(options, model)
    torch.manual_seed(options.seed)
    coupling = _network(architecture, options, model)
    print(f"{coupling.summary()}; {len(trajectories.tokens)} sequences")
    with bar(total=options.steps + options.steps // 3, unit="step", description="training") as progress:

        def on_progress(now: CouplingProgress) -> None:
            progress.set_postfix(stage=now.stage, loss=f"{now.loss:.4f}")
            progress.update(100)

        coupling, report = train_coupling(
            coupling,
            model,
            trajectories,
            states=options.states,
            steps=options.steps,
            most_drawn=options.most_drawn,
            learning_rate=options.lr,
            held_out=options.held_out,
            seed=options.seed,
            on_progress=on_progress,
        )
    coupling.provenance = {
        "model": options.model,
        "data": Path(options.data).name,
        "sequences": len(trajectories.tokens),
        "order": options.order,
        "temperature": options.temperature,
        "explained": report.explained.value,
    }
    coupling.save_pretrained(options.out)
    print(f"\n{options.out}, on held-out sequences:\n{as_table(report)}")
    return 0


def _network(architecture: str, options: argparse.Namespace, model: MaskedModel) -> LearnedCoupling:
    from mdmi_fast.coupling import PairwiseCoupling

    names = ("layers", *_GENERAL) if architecture == "general" else ("layers",)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if architecture == "general":
        return PairwiseCoupling(model.hidden_size, model.vocab_size, **given)
    made: LearnedCoupling = resolve("mdmi_fast.couplings", architecture)(**given)
    return made


def _trajectories(options: argparse.Namespace, model: MaskedModel) -> Trajectories:
    """Those that the folder holds already, and the others decoded now."""
    import torch

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.coupling import Trajectories, draw_trajectories

    start = _masked(options, model)
    parts = []
    with bar(total=len(start), unit="sequence", description="decoding") as progress:
        for number, part in enumerate(start.split(_AT_ONCE)):
            file = options.out / f"trajectories-{number:05}.safetensors"
            if file.exists():
                found = Trajectories.load(file)
                given = found.tokens.masked_fill(found.order >= 0, model.mask_token_id)
                if given.shape != part.shape or not given.equal(part):
                    raise InputError(f"{file}: is of other sequences than {options.data}; choose another --out")
            else:
                generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
                found = draw_trajectories(
                    model, part, order=options.order, temperature=options.temperature, generator=generator
                )
                found.save(file)
            parts.append(found)
            progress.update(len(part))
    tokens, order = (torch.cat(field) for field in ([part.tokens for part in parts], [part.order for part in parts]))
    return Trajectories(tokens, order, model.mask_token_id)


def _masked(options: argparse.Namespace, model: MaskedModel) -> Tensor:
    """[W, N] int64: the sequences of the file as they are to be filled."""
    import torch

    from mdmi_fast.cli._sequences import read_sequences

    found = read_sequences(options.data, model_name=options.model, model=model)
    length = len(found[0].tokens)
    for sequence in found:
        if len(sequence.tokens) != length or sequence.attention_mask is not None:
            raise InputError(
                f"{sequence.where}: must be of {length} tokens without padding as the first sequence, "
                f"got {len(sequence.tokens)}"
            )
    tokens = torch.tensor([sequence.tokens for sequence in found])
    whole = (tokens != model.mask_token_id).all(dim=-1, keepdim=True)
    return tokens.masked_fill(whole, model.mask_token_id)


def as_table(report: CouplingReport) -> str:
    """For a person."""

    def line(name: str, share: Share) -> str:
        return f"{name:28} {share.value:7.1%}  [{share.low:.1%}, {share.high:.1%}]"

    lines = [f"{'explained of the change':28}          95% interval", line("all", report.explained)]
    lines += [line(f"{drawn} drawn", share) for drawn, share in report.by_drawn.items()]
    lines.append(line("with states of others", report.control))
    lines.append(f"{report.states} states, {report.divergence:.4f} nats a position; strength {report.strength:g}")
    return "\n".join(lines)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(positive(width) for width in text.split(","))
