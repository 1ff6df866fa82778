"""The King James Bible (public domain), fetched from the Debian packages bible-kjv and bible-kjv-text."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;:'?"
WINDOW = 64
"""Letters of one sequence."""
Task = Literal["infill", "complete", "whole"]
TASKS: tuple[Task, ...] = get_args(Task)


def fetch_text(*, packages: Sequence[Path] = ()) -> str:
    """All verses in their order, in lower case, of the letters that the model knows.

    Args:
        packages: the two .deb files, downloaded elsewhere; without them apt-get downloads them.

    Raises:
        OSError: if they cannot be downloaded or read.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not packages:
            _call("apt-get", "download", "bible-kjv", "bible-kjv-text", folder=folder)
            packages = sorted(folder.glob("*.deb"))
        for package in packages:
            _call("dpkg-deb", "--extract", str(package.absolute()), "content", folder=folder)
        # The program finds its data in the folder it is started from.
        verses = _call("../bin/bible", "-f", "Gen1:1-Rev22:21", folder=folder / "content/usr/lib")
    # A line is "Ge1:1 text".
    lines = [line.split(" ", 1)[1] for line in verses.splitlines() if " " in line]
    return re.sub(r"\s+", " ", re.sub(f"[^{re.escape(LETTERS)}]", " ", " ".join(lines).lower()))


def windows(text: str, count: int, *, seed: int) -> list[str]:
    """Pieces of WINDOW letters, from random places.

    Raises:
        ValueError: if the text is not longer than one.
    """
    if len(text) <= WINDOW:
        raise ValueError(f"windows: text must be longer than {WINDOW} letters, got {len(text)}")
    starts = np.random.default_rng(seed).integers(0, len(text) - WINDOW, size=count)
    return [text[start : start + WINDOW] for start in starts]


def prompts(task: Task, texts: Sequence[str], *, seed: int) -> list[str]:
    """Texts with "_" where the model has to decide: "infill" the middle half, "complete" a random half, "whole" nothing
    (for `mdmi-fast label --mask`).
    """
    random = np.random.default_rng(seed)
    found = []
    for text in texts:
        hidden = np.zeros(len(text), dtype=bool)
        if task == "infill":
            hidden[len(text) // 4 : 3 * len(text) // 4] = True
        elif task == "complete":
            hidden = random.permutation(len(text)) < len(text) // 2
        found.append("".join("_" if h else letter for h, letter in zip(hidden, text, strict=True)))
    return found


def _call(*command: str, folder: Path) -> str:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, errors="replace").stdout
    except FileNotFoundError:
        raise OSError(f"{command[0]} is missing: fetch the text on Debian or Ubuntu") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "nothing").strip().splitlines()[-1:]
        raise OSError(f"{' '.join(command)} failed: {' '.join(said)}") from error
