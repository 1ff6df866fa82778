"""Models by name: the options a name may carry, and what is said of names that mean nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from typing_extensions import Unpack

from mdmi_fast import load_model
from mdmi_fast.models import loading
from mdmi_fast.models.huggingface import LoadOptions
from mdmi_fast.models.loading import find_for_model


class Entry:
    """An entry point of a loader."""

    def __init__(self, loader: Any) -> None:
        self.load = lambda: loader


def load_anything(
    name: str,
    *,
    layers: int | Sequence[int] = -1,
    forbidden_tokens: Iterable[int] | None = None,
    mask_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    compile: bool = False,  # noqa: A002 - as the loaders call it
    revision: str | None = None,
) -> dict[str, Any]:
    return {name: value for name, value in locals().items() if value is not None}


def load_handing_on(part: str = "heavy", **options: Unpack[LoadOptions]) -> dict[str, Any]:
    return {"part": part, **options}


@pytest.fixture(autouse=True)
def loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"any": load_anything, "handing-on": load_handing_on, "plain": lambda: {"plain": True}}
    monkeypatch.setattr(loading, "registered", lambda group: {name: Entry(loader) for name, loader in found.items()})


def test_options_in_a_name_are_read_as_the_loader_annotates_them() -> None:
    spec = "any:a/b?layers=-1,-2&forbidden_tokens=3&mask_token_id=4&dtype=bfloat16&compile=true&revision=v2"
    assert load_model(spec) == {
        "name": "a/b",
        "layers": (-1, -2),
        "forbidden_tokens": (3,),
        "mask_token_id": 4,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "compile": True,
        "revision": "v2",
    }
    assert load_model("any:x?layers=0")["layers"] == 0  # type: ignore[index]
    assert load_model("any:x?compile=false", compile=True)["compile"] is True  # type: ignore[index]


def test_options_that_a_loader_hands_on_are_known_by_their_types() -> None:
    assert load_model("handing-on:light?batch_invariant=false&dtype=float16") == {
        "part": "light",
        "batch_invariant": False,
        "dtype": torch.float16,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "any:x?depth=3",
            "any: options are KEY=VALUE and any takes layers, forbidden_tokens, mask_token_id, .*; got 'depth=3'",
        ),
        ("any:x?compile", "got 'compile'"),
        ("any:x?compile=yes", "any: option compile must be true or false, got 'yes'"),
        ("any:x?dtype=bf16", "any: option dtype must be a dtype of torch such as .*, got 'bf16'"),
        ("any:x?dtype=nn", "option dtype must be a dtype of torch"),
        ("any:x?layers=last", "any: option layers must be whole numbers with commas between them, got 'last'"),
        ("any:x?mask_token_id=1,2", "any: option mask_token_id must be a whole number, got '1,2'"),
        ("any:x?device=gpu", "any: device 'gpu' cannot be used: "),
        ("handing-on?tokenizer=x", "handing-on takes layers, dtype, device, attention, compile, batch_invariant; got"),
        ("plain:x", "load_model: there is one plain only, without a name behind it, got 'plain:x'"),
        ("plain?a=1", "plain takes none; got 'a=1'"),
        ("any", "any needs to know which, any:NAME, got 'any'"),
        ("any:", "any needs to know which, any:NAME, got 'any:'"),
        ("./folder", "nothing is registered as './folder'; known: any, handing-on, plain; .* is hf:./folder"),
        ("bert-base", "is hf:bert-base"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(spec)


def test_a_device_that_is_not_there_is_named_whoever_gives_it() -> None:
    missing = "cuda" if not torch.cuda.is_available() else "xpu"
    with pytest.raises(ValueError, match=f"any: device '{missing}' cannot be used"):
        load_model("any:x", device=missing)


def test_what_is_registered_for_a_model_goes_before_what_is_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"sapiens.heavy": Entry("exact"), "sudoku": Entry("kind")}
    monkeypatch.setattr(loading, "registered", lambda group: found)
    assert find_for_model("group", "sapiens:heavy?dtype=float16") == "exact"
    assert find_for_model("group", "sudoku:weak") == "kind"
    assert find_for_model("group", "sapiens:light") is None
