"""The examples of foreign loops run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], check=True, capture_output=True, text=True)
    return done.stdout


def test_an_engine_that_hands_over_logits_a_position() -> None:
    assert "4 sequences of 16 filled in" in run("engine_logits.py")


def test_a_hugging_face_loop() -> None:
    pytest.importorskip("transformers")
    printed = run("huggingface_loop.py").splitlines()
    assert [line.split("(")[0] for line in printed] == ["TopK", "EntropyBound", "AttentionGraph"]
