"""Antibody models out of their packages: conversion, checksum, cache, and what is said when something is missing."""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import load_model
from mdmi_fast.cli import main
from mdmi_fast.tasks.protein import models as antibody
from mdmi_fast.tasks.protein.models import PACKAGES, RESIDUES, fetch, is_fetched

CHAIN = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAKDYWGQGTLVTVSS"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def fairseq_weights() -> dict[str, Tensor]:
    """Random weights under the names and in the shapes of the Sapiens checkpoint."""
    d = 128
    found: dict[str, Tensor] = {
        "embed_tokens.weight": torch.randn(25, d),
        "embed_positions.weight": torch.randn(146, d),
    }
    for layer in range(4):
        start = f"layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{start}.self_attn.{name}.weight"] = torch.randn(d, d) / 12
            found[f"{start}.self_attn.{name}.bias"] = torch.randn(d)
        found |= {f"{start}.fc1.weight": torch.randn(256, d) / 12, f"{start}.fc1.bias": torch.randn(256)}
        found |= {f"{start}.fc2.weight": torch.randn(d, 256) / 16, f"{start}.fc2.bias": torch.randn(d)}
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            found |= {f"{start}.{name}.weight": torch.rand(d), f"{start}.{name}.bias": torch.randn(d)}
    found |= {"emb_layer_norm.weight": torch.rand(d), "emb_layer_norm.bias": torch.randn(d)}
    found = {f"decoder.sentence_encoder.{name}": value for name, value in found.items()}
    head = {"weight": torch.randn(25, d), "bias": torch.randn(25), "dense.weight": torch.randn(d, d) / 12}
    head |= {"dense.bias": torch.randn(d), "layer_norm.weight": torch.rand(d), "layer_norm.bias": torch.randn(d)}
    return found | {f"decoder.lm_head.{name}": value for name, value in head.items()}


def expected_logits(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A fairseq RoBERTa encoder (post-norm, learned positions that begin behind the pad token) written out."""

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.layer_norm(x, (128,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    base = "decoder.sentence_encoder"
    positions = torch.arange(len(tokens)) + 2
    x = norm(
        w[f"{base}.embed_tokens.weight"][tokens] + w[f"{base}.embed_positions.weight"][positions],
        f"{base}.emb_layer_norm",
    )
    for layer in range(4):
        name = f"{base}.layers.{layer}"
        q, k, v = (
            linear(x, f"{name}.self_attn.{part}_proj").view(len(tokens), 8, 16).transpose(0, 1) for part in "qkv"
        )
        mixed = ((q @ k.transpose(1, 2) / 4).softmax(-1) @ v).transpose(0, 1).reshape(len(tokens), 128)
        x = norm(x + linear(mixed, f"{name}.self_attn.out_proj"), f"{name}.self_attn_layer_norm")
        inner = torch.nn.functional.gelu(linear(x, f"{name}.fc1"))
        x = norm(x + linear(inner, f"{name}.fc2"), f"{name}.final_layer_norm")
    x = norm(torch.nn.functional.gelu(linear(x, "decoder.lm_head.dense")), "decoder.lm_head.layer_norm")
    return linear(x, "decoder.lm_head")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like Sapiens with random weights, whose checksum is the one expected."""
    path = tmp_path / "sapiens-1.0.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in PACKAGES["sapiens"].members.values():
            with archive.open(member, "w") as file:
                torch.save({"args": argparse.Namespace(arch="roberta_small"), "model": fairseq_weights()}, file)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(PACKAGES, "sapiens", PACKAGES["sapiens"]._replace(sha256=digest))  # type: ignore[arg-type]
    return path


def test_a_converted_checkpoint_answers_as_fairseq_would(wheel: Path) -> None:
    torch.manual_seed(0)
    assert not is_fetched("sapiens")
    fetch("sapiens", wheel=wheel)
    assert is_fetched("sapiens")
    model: Any = load_model("sapiens:light")
    tokens = model.tokenizer.encode([CHAIN[:20] + "_" + CHAIN[21:]])
    member = PACKAGES["sapiens"].members["light"]
    trusted = torch.serialization.safe_globals([argparse.Namespace])
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, trusted:
        weights = torch.load(file, weights_only=True)["model"]
    expected = expected_logits(weights, tokens[0])
    # fp32 sums in another order; logits are of size 10.
    assert torch.allclose(model(tokens).logits[0, :, 4:24], expected[:, 4:24], atol=1e-3)
    assert model.forbidden_tokens.tolist() == [0, 1, 2, 3, 24]
    assert model.max_length == 144


def test_what_was_fetched_is_kept_and_nothing_partial_counts(wheel: Path, cache: Path) -> None:
    folder = fetch("sapiens", wheel=wheel)
    assert folder == cache / "sapiens"
    wheel.unlink()
    assert fetch("sapiens", wheel=wheel) == folder
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]
    (folder / "light" / "config.json").unlink()
    assert not is_fetched("sapiens")


def test_another_file_than_the_pinned_one_is_refused(wheel: Path, tmp_path: Path, cache: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"other\.whl: expected a file of SHA-256"):
        fetch("sapiens", wheel=other)
    assert not cache.exists()


def test_without_a_network_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert main(["models", "fetch", "sapiens"]) == 1
    said = capsys.readouterr().err
    assert "pip could not download sapiens==1.0.5" in said
    assert "--wheel" in said


@pytest.mark.parametrize("name", ["sapiens:heavy", "antiberty"])
def test_a_model_that_was_not_fetched_says_how_to(name: str) -> None:
    kind = name.partition(":")[0]
    with pytest.raises(FileNotFoundError, match=f"run `mdmi-fast models fetch {kind}`"):
        load_model(name)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="can fetch sapiens, antiberty, got 'esm'"):
        fetch("esm")
    with pytest.raises(ValueError, match="sapiens: the models are heavy, light, got 'kappa'"):
        load_model("sapiens:kappa")


def test_the_list_names_every_model_and_what_is_fetched(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch("sapiens", wheel=wheel)
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["sapiens:heavy,", "sapiens:light", "fetched"] for line in lines)
    assert any(line.split()[0] == "antiberty" and "mdmi-fast models fetch antiberty" in line for line in lines)
    assert {"hf", "sudoku"} <= {line.split()[0] for line in lines}


@pytest.mark.slow
def test_the_real_sapiens_knows_antibodies(cache: Path) -> None:
    """Needs the package index; 7 MB."""
    try:
        fetch("sapiens")
    except OSError as error:
        pytest.skip(f"offline: {error}")
    model: Any = load_model("sapiens:heavy")
    tokens = model.tokenizer.encode([CHAIN])[0]
    places = torch.arange(1, len(CHAIN) + 1)
    masked = tokens.repeat(len(CHAIN), 1)
    masked[torch.arange(len(CHAIN)), places] = model.mask_token_id
    guesses = model(masked).logits[torch.arange(len(CHAIN)), places].argmax(-1)
    # A germline-like human chain: nearly every residue follows from the others; random weights get 1 in 20.
    assert float((guesses == tokens[1:-1]).float().mean()) > 0.85


@pytest.mark.parametrize("name", list(PACKAGES))
def test_chains_become_tokens_and_back(name: str) -> None:
    letters = antibody.PACKAGES[name].tokenizer
    tokens = letters.encode([RESIDUES, "AC_D"])
    assert tokens.shape == (2, 22)
    assert len(letters) == 25
    assert letters.decode(tokens) == [RESIDUES, "AC_D"]
    assert int((tokens == letters.mask_token_id).sum()) == 1
    assert int((tokens == letters.pad_token_id).sum()) == 16
    with pytest.raises(ValueError, match="text 1 must consist of 'ACDEFGHIKLMNPQRSTVWY' and '_', got 'X'"):
        letters.encode(["A", "AX"])
    with pytest.raises(ValueError, match="got nothing"):
        letters.encode([""])
