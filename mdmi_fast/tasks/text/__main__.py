"""Commands around the character model: python -m mdmi_fast.tasks.text corpus | train | prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mdmi_fast.errors import run_program
from mdmi_fast.files import check_file, check_folder, read_text, replace_file
from mdmi_fast.tasks.text.corpus import TASKS, fetch_text, prompts, windows
from mdmi_fast.tasks.text.model import TOKENIZER, train_model

HELD_OUT = 200_000
"""Letters at the end of the text that no model is trained on."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mdmi_fast.tasks.text", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="fetch the text")
    corpus.add_argument("--packages", nargs="*", type=Path, default=(), help="the .deb files, instead of downloading")
    train = commands.add_parser("train", help="train a model")
    train.add_argument("--minutes", type=float, default=10.0, help="of CPU time (default: 10)")
    asked = commands.add_parser("prompts", help="held-out windows to fill, for `mdmi-fast label` and `decode`")
    asked.add_argument("--task", choices=TASKS, required=True)
    asked.add_argument("--count", type=int, required=True)
    for command in (train, asked):
        command.add_argument("--text", type=Path, required=True, help="written by the command corpus")
        command.add_argument("--seed", type=int, default=0)
    for command in (corpus, train, asked):
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    (check_folder if options.command == "train" else check_file)(options.out)
    if options.command == "corpus":
        text = fetch_text(packages=options.packages)
        with replace_file(options.out) as temporary:
            temporary.write_text(text)
        print(f"{len(text):,} letters in {options.out}")
        return
    text = read_text(options.text)
    if options.command == "train":

        def report(step: int, loss: float) -> None:
            print(f"step {step:6}  loss {loss:.3f} nats a letter", flush=True)

        train_model(text[:-HELD_OUT], options.out, seconds=60 * options.minutes, seed=options.seed, on_report=report)
        return
    texts = prompts(options.task, windows(text[-HELD_OUT:], options.count, seed=options.seed), seed=options.seed)
    with replace_file(options.out) as temporary, temporary.open("w") as file:
        file.writelines(json.dumps({"tokens": row}) + "\n" for row in TOKENIZER.encode(texts).tolist())


if __name__ == "__main__":
    sys.exit(run_program("python -m mdmi_fast.tasks.text", main))
