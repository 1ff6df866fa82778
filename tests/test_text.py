"""The character model: letters, windows, training, and the commands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mdmi_fast import TopK, decode, load_model
from mdmi_fast.cli._options import load_decoded
from mdmi_fast.models.base import AttentiveOutput
from mdmi_fast.tasks.text import __main__ as commands
from mdmi_fast.tasks.text.corpus import LETTERS, TASKS, WINDOW, fetch_text, prompts, windows
from mdmi_fast.tasks.text.model import TOKENIZER, train_model
from mdmi_fast.tasks.text.ngram import NGram

TEXT = "and god said, let there be light: and there was light. " * 40


def test_windows_come_from_the_text_and_prompts_hide_half() -> None:
    found = windows(TEXT, 5, seed=0)
    assert found == windows(TEXT, 5, seed=0)
    assert all(len(window) == WINDOW and window in TEXT for window in found)
    middle, scattered, whole = (prompts(task, found, seed=0) for task in TASKS)
    assert whole == found
    assert all(text[16:48] == "_" * 32 and text.count("_") == 32 for text in middle)
    assert all(text.count("_") == 32 for text in scattered)
    assert len({text.index("_") for text in scattered}) > 1


def test_a_trained_model_is_saved_loaded_and_decoded_with(tmp_path: Path) -> None:
    reports: list[tuple[int, float]] = []
    train_model(TEXT, tmp_path, seconds=0.3, batch_size=2, on_report=lambda *report: reports.append(report))
    model: Any = load_model(f"text:{tmp_path}")
    assert (model.mask_token_id, model.vocab_size, model.max_length) == (1, 2 + len(LETTERS), None)
    asked = TOKENIZER.encode(prompts("infill", windows(TEXT, 2, seed=1), seed=0))
    filled = TOKENIZER.decode(decode(model, asked, TopK(8)).tokens)
    assert all(len(text) == WINDOW and "_" not in text for text in filled)
    assert isinstance(load_decoded(f"text:{tmp_path}", ["attention-graph:0.1"])(asked), AttentiveOutput)


@pytest.mark.slow
def test_the_packages_hold_the_whole_text() -> None:
    """Needs apt-get and a Debian mirror; 2 MB."""
    try:
        text = fetch_text()
    except OSError as error:
        pytest.skip(f"offline, or no Debian: {error}")
    assert text.startswith("in the beginning god created the heaven and the earth. and the earth was")
    assert len(text) > 4_000_000
    assert set(text) == set(LETTERS)


def test_a_missing_package_manager_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="apt-get is missing"):
        fetch_text()


def test_prompts_are_of_held_out_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "prompts.jsonl"
    text.write_text("a" * 1000 + "b" * commands.HELD_OUT)
    arguments = ["prompts", "--text", str(text), "--task", "complete", "--count", "3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["text", *arguments])
    commands.main()
    rows = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
    assert [set(row) for row in rows] == [{1, 3}] * 3  # the mask token and "b"


def test_an_n_gram_is_a_distribution_that_interpolates_by_hand() -> None:
    text = "abacabad"
    judge = NGram(text, 3)
    for history in ("", "a", "ab", "zz", "ba"):
        total = sum(math.exp(judge.log_p(history + letter, len(history))) for letter in "abcd")
        assert total == pytest.approx(1.0)
    one = {letter: (text.count(letter) + 4 * 0.25) / (8 + 4) for letter in "abcd"}
    # After "a": b twice, c and d once, so 4 letters of 3 kinds.
    assert math.exp(judge.log_p("ab", 1)) == pytest.approx((2 + 3 * one["b"]) / (4 + 3))
    # After "ca": b once.
    two = (2 + 3 * one["b"]) / (4 + 3)
    assert math.exp(judge.log_p("cab", 2)) == pytest.approx((1 + 1 * two) / (1 + 1))
    # The letters from a place on whose gram holds it.
    assert judge.surprise(["abac"], [[2]])[0] == pytest.approx(-(judge.log_p("abac", 2) + judge.log_p("abac", 3)) / 2)
    with pytest.raises(ValueError, match="NGram: n must be at least 1 and text not empty"):
        NGram("", 2)
