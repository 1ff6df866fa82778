"""Antibody models whose weights come inside Python packages: Sapiens (RoBERTa, 0.57M) and AntiBERTy (BERT, 25.8M).

`fetch` downloads a pinned package with pip, checks its checksum, and turns the weights into what transformers reads,
in the cache folder of the user. Nothing of the package is installed or run: it pins versions of torch or fairseq that
are years old.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor
from typing_extensions import Unpack

from mdmi_fast.files import cache_folder, check_folder, replace_file
from mdmi_fast.models.huggingface import HuggingFaceModel, LoadOptions
from mdmi_fast.models.huggingface import load_model as load_huggingface
from mdmi_fast.tasks.protein.letters import LetterTokenizer

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"

Weights = dict[str, Tensor]


class _Package(NamedTuple):
    """A pinned package and what is made of it: folder -> (member of the wheel, conversion)."""

    requirement: str
    sha256: str
    members: Mapping[str, str]
    convert: Callable[[IO[bytes]], tuple[Weights, dict[str, Any]]]
    tokenizer: LetterTokenizer


def _convert_sapiens(file: IO[bytes]) -> tuple[Weights, dict[str, Any]]:
    """A fairseq checkpoint, renamed to RobertaForMaskedLM."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(file, map_location="cpu", weights_only=True)["model"]
    names = {
        "decoder.sentence_encoder.embed_tokens": "roberta.embeddings.word_embeddings",
        "decoder.sentence_encoder.embed_positions": "roberta.embeddings.position_embeddings",
        "decoder.sentence_encoder.emb_layer_norm": "roberta.embeddings.LayerNorm",
        "decoder.sentence_encoder.layers": "roberta.encoder.layer",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense",
        "self_attn_layer_norm": "attention.output.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
        "decoder.lm_head.weight": "lm_head.decoder.weight",
        "decoder.lm_head": "lm_head",
    }
    weights = {}
    for name, value in found.items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = value
    weights["lm_head.decoder.bias"] = weights["lm_head.bias"]
    tokens, width = weights["roberta.embeddings.word_embeddings.weight"].shape
    weights["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)
    return weights, {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": tokens,
        "hidden_size": width,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": len(weights["roberta.embeddings.position_embeddings.weight"]),
        "type_vocab_size": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }


def _convert_antiberty(file: IO[bytes]) -> tuple[Weights, dict[str, Any]]:
    """A BertForMaskedLM with further heads, which are left out."""
    found = torch.load(file, map_location="cpu", weights_only=True)
    kept = ("bert.embeddings.", "bert.encoder.", "cls.predictions.")
    weights = {name: value for name, value in found.items() if name.startswith(kept) and "position_ids" not in name}
    return weights, {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 25,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }


PACKAGES = {
    "sapiens": _Package(
        "sapiens==1.0.5",
        "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b",
        {"heavy": "sapiens/models/v1/checkpoint_vh.pt", "light": "sapiens/models/v1/checkpoint_vl.pt"},
        _convert_sapiens,
        LetterTokenizer(RESIDUES, first=4, start=0, end=2, mask=24, pad=1),
    ),
    "antiberty": _Package(
        "antiberty==0.1.3",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
        {"model": "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"},
        _convert_antiberty,
        LetterTokenizer(RESIDUES, first=5, start=2, end=3, mask=4, pad=0),
    ),
}
"""What `fetch` knows. Both packages are under the MIT licence."""


def model_folder(name: str) -> Path:
    """Where a fetched model lies."""
    return cache_folder() / "models" / name


def is_fetched(name: str) -> bool:
    return all((model_folder(name) / part / "config.json").exists() for part in PACKAGES[name].members)


def fetch(name: str, *, wheel: Path | None = None) -> Path:
    """Download, check and convert a model; what was fetched before is kept.

    Args:
        name: a key of PACKAGES.
        wheel: the package's file, downloaded elsewhere, instead of asking pip.

    Returns:
        The folder of the model.

    Raises:
        ValueError: for an unknown name, or a file whose checksum is another.
        OSError: if pip cannot download the package, or the cache folder cannot be written.
    """
    package = _package(name)
    folder = model_folder(name)
    if is_fetched(name):
        return folder
    check_folder(folder)
    with tempfile.TemporaryDirectory() as temporary:
        path = wheel if wheel is not None else _download(package.requirement, Path(temporary))
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != package.sha256:
            raise ValueError(f"{path.name}: expected a file of SHA-256 {package.sha256}, got {found}")
        with zipfile.ZipFile(path) as archive:
            for part, member in package.members.items():
                with archive.open(member) as file:
                    weights, config = package.convert(file)
                with replace_file(folder / part / "model.safetensors") as target:
                    target.write_bytes(save({key: value.clone() for key, value in weights.items()}, {"format": "pt"}))
                # The configuration comes last: where it is, the weights are whole.
                with replace_file(folder / part / "config.json") as target:
                    target.write_text(json.dumps(config, indent=2) + "\n")
    return folder


def load_sapiens(chain: str = "heavy", **options: Unpack[LoadOptions]) -> HuggingFaceModel:
    """Sapiens, a model of human antibody chains: `load_model("sapiens:heavy")` or "sapiens:light".

    At most 144 (heavy) tokens. Prihoda and others, mAbs 14:1 (2022), https://doi.org/10.1080/19420862.2021.2020203.

    Args:
        chain: "heavy" or "light".
        **options: see `mdmi_fast.models.huggingface.load_model`.

    Raises:
        FileNotFoundError: if it was not fetched: `mdmi-fast models fetch sapiens`.
        ValueError: for another chain.
    """
    return _load("sapiens", chain, options)


def load_antiberty(**options: Unpack[LoadOptions]) -> HuggingFaceModel:
    """AntiBERTy, a model of antibody chains of several species: `load_model("antiberty")`.

    Ruffolo, Gray and Sulam, https://arxiv.org/abs/2112.07782.

    Args:
        **options: as for `load_sapiens`.

    Raises:
        FileNotFoundError: if it was not fetched: `mdmi-fast models fetch antiberty`.
    """
    return _load("antiberty", "model", options)


def _load(name: str, part: str, options: LoadOptions) -> HuggingFaceModel:
    package = _package(name)
    if part not in package.members:
        raise ValueError(f"{name}: the models are {', '.join(package.members)}, got {part!r}")
    folder = model_folder(name) / part
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{name} is not there yet: run `mdmi-fast models fetch {name}`")
    return load_huggingface(str(folder), tokenizer=package.tokenizer, **options)


def _package(name: str) -> _Package:
    if name not in PACKAGES:
        raise ValueError(f"models: can fetch {', '.join(PACKAGES)}, got {name!r}")
    return PACKAGES[name]


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    done = subprocess.run([*command, str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise OSError(
            f"pip could not download {requirement}: {lines[-1]}. Without a network, download the file elsewhere "
            f"(pip download --no-deps {requirement}) and name it with --wheel"
        )
    return wheels[0]
