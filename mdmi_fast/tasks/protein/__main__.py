"""Commands around the antibody models: python -m mdmi_fast.tasks.protein chains | states | prompts | fasta."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mdmi_fast.errors import run_program
from mdmi_fast.files import check_file, replace_file, wrong_encoding
from mdmi_fast.models import load_model
from mdmi_fast.tasks.protein.chains import fetch_chains, own_chains, read_fasta, write_fasta
from mdmi_fast.tasks.protein.states import TASKS, decoding_states, prompts, split


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mdmi_fast.tasks.protein", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chains = commands.add_parser("chains", help="fetch and translate real human heavy chains")
    chains.add_argument("--package", type=Path, help="the .deb file, instead of downloading it")
    chains.add_argument("--out", type=Path, required=True, help="FASTA file to write")
    states = commands.add_parser("states", help="states to label, as met while sampling")
    asked = commands.add_parser("prompts", help="chains to fill, for `mdmi-fast decode`")
    for command in (states, asked):
        command.add_argument("--model", default="sapiens:heavy")
        command.add_argument(
            "--chains", type=Path, help="written by the command chains (default: fetched once, and kept)"
        )
        command.add_argument("--count", type=int, required=True)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, required=True, help="JSON lines to write")
    asked.add_argument("--task", choices=TASKS, required=True)
    fasta = commands.add_parser("fasta", help="turn decoded JSON lines into FASTA on standard output")
    fasta.add_argument("--model", default="sapiens:heavy")
    fasta.add_argument("decoded", type=Path, help="written by `mdmi-fast decode`")
    options = parser.parse_args()
    check_file(vars(options).get("out"))
    if options.command == "chains":
        found = fetch_chains(package=options.package)
        write_fasta(found, options.out)
        print(f"{len(found)} distinct heavy chains in {options.out}")
        return
    model: Any = load_model(options.model)
    if options.command == "fasta":
        for number, tokens in enumerate(_read(options.decoded, model)):
            (chain,) = model.tokenizer.decode(torch.tensor([tokens]))
            print(f">{number}\n{chain}")
        return
    real = own_chains() if options.chains is None else read_fasta(options.chains)
    train, judge = split(real, longest=model.max_length - 2)
    if options.command == "states":
        drawn = decoding_states(model, model.tokenizer, train, options.count, seed=options.seed)
        _write(options.out, drawn.tolist())
    else:
        texts = prompts(options.task, judge, options.count, seed=options.seed)
        _write(options.out, (model.tokenizer.encode([text])[0].tolist() for text in texts))


def _read(path: Path, model: Any) -> list[list[int]]:
    """The tokens of every line.

    Raises:
        ValueError: naming the line that holds none.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines(), 1):
        try:
            tokens = json.loads(line)["tokens"]
            known = {*range(model.vocab_size), model.mask_token_id}
            if not tokens or any(type(token) is not int or token not in known for token in tokens):
                raise ValueError(f"tokens must be some of 0..{model.vocab_size - 1}, at least one")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = wrong_encoding(line) or (error if isinstance(error, ValueError) else "it has no tokens")
            raise ValueError(f'{path}:{number}: expected an object {{"tokens": [...]}}: {reason}') from error
        found.append(tokens)
    return found


def _write(path: Path, rows: Iterable[list[int]]) -> None:
    with replace_file(path) as temporary, temporary.open("w") as file:
        file.writelines(json.dumps({"tokens": row}) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(run_program("python -m mdmi_fast.tasks.protein", main))
