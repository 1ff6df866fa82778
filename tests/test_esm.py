"""ESM-C and fair-esm. The two packages cannot be installed together, and esm pins an old transformers: it has a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from esm.data import Alphabet
from esm.model.esm2 import ESM2
from torch import Tensor, nn

from mdmi_fast import MaskedModel, load_model
from mdmi_fast.models.esm import ESMCModel, FairESMModel

MASK, PAD = 32, 1


class StandInESMC(nn.Module):
    """The interface of esm.models.esmc.ESMC 3.2.1: 64 logits, normed embeddings, hidden states that are not normed."""

    class Tokenizer:
        mask_token_id, pad_token_id = MASK, PAD
        all_special_ids = (2, 3, 1, 0, 32, 31)

        def __len__(self) -> int:
            return 33

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = self.Tokenizer()
        self.embed = nn.Embedding(64, 8)
        self.transformer = nn.Module()
        self.transformer.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.sequence_head = nn.Linear(8, 64)

    def forward(self, sequence_tokens: Tensor, sequence_id: Tensor | None = None) -> Any:
        visible = sequence_tokens != PAD if sequence_id is None else sequence_id
        x = self.embed(sequence_tokens)
        states = []
        for block in self.transformer.blocks:  # type: ignore[union-attr]
            mean = (x * visible[..., None]).sum(1, keepdim=True) / visible.sum(1)[:, None, None]
            x = x + block(x + mean)
            states.append(x)
        normed = self.norm(x)
        return SimpleNamespace(
            sequence_logits=self.sequence_head(normed), embeddings=normed, hidden_states=torch.stack(states)
        )


def tiny_esm2() -> tuple[ESM2, Alphabet]:
    torch.manual_seed(0)
    alphabet = Alphabet.from_architecture("ESM-1b")
    return ESM2(num_layers=2, embed_dim=8, attention_heads=2, alphabet=alphabet).eval(), alphabet


TOKENS = torch.tensor([[0, 4, MASK, 6, 2, PAD], [0, MASK, 2, PAD, PAD, PAD]])


def make(kind: str, **options: Any) -> Any:
    return ESMCModel(StandInESMC(), **options) if kind == "esmc" else FairESMModel(*tiny_esm2(), **options)


@pytest.mark.parametrize("kind", ["esmc", "fair-esm"])
def test_is_a_masked_model_that_padding_does_not_change(kind: str) -> None:
    model = make(kind)
    assert isinstance(model, MaskedModel)
    output = model(TOKENS)
    alone = model(TOKENS[1:, :3])
    assert torch.equal(output.logits[1:, :3], alone.logits)
    assert torch.equal(output.hidden[1:, :3], alone.hidden)
    padded = make(kind, batch_invariant=False)
    padded.load_state_dict(model.state_dict())
    assert torch.allclose(padded(TOKENS).hidden, output.hidden, atol=1e-6)


def test_the_tokens_of_esmc_that_stand_for_nothing_are_never_decoded() -> None:
    model = make("esmc")
    assert (model.vocab_size, model.hidden_size) == (64, 8)
    impossible = (model(TOKENS).logits[0, 0] == -torch.inf).nonzero().squeeze(-1).tolist()
    assert impossible == [0, 1, 2, 3, 31, 32, *range(33, 64)]


def test_the_hidden_state_of_esmc_is_the_normed_one_unless_a_layer_is_chosen() -> None:
    network = StandInESMC()
    raw = network(TOKENS[:1, :5])
    assert torch.equal(ESMCModel(network)(TOKENS[:1, :5]).hidden, raw.embeddings)
    both = ESMCModel(network, layers=(0, -1))
    assert both.hidden_size == 16
    assert torch.equal(both(TOKENS[:1, :5]).hidden, torch.cat([raw.hidden_states[0], raw.embeddings], dim=-1))


def test_layers_of_fair_esm_count_from_the_embeddings_and_from_the_end() -> None:
    network, alphabet = tiny_esm2()
    with torch.no_grad():
        raw = network(TOKENS[:1, :5], repr_layers=[0, 1, 2])["representations"]
    model = FairESMModel(network, alphabet, layers=(0, -1))
    assert torch.equal(model(TOKENS[:1, :5]).hidden, torch.cat([raw[0], raw[2]], dim=-1))


def test_tokens_of_fair_esm_that_are_no_residue_are_never_decoded() -> None:
    network, alphabet = tiny_esm2()
    never = FairESMModel(network, alphabet).forbidden_tokens.tolist()
    assert [alphabet.get_tok(token) for token in never] == ["<cls>", "<pad>", "<eos>", "<unk>", "<null_1>", "<mask>"]


def test_a_table_of_positions_of_fair_esm_has_an_end() -> None:
    from argparse import Namespace

    from esm.model.esm1 import ProteinBertModel

    alphabet = Alphabet.from_architecture("ESM-1b")
    sizes = {"layers": 1, "embed_dim": 8, "ffn_embed_dim": 8, "attention_heads": 2, "max_positions": 20}
    switches = {"emb_layer_norm_before": True, "token_dropout": True, "final_bias": True}
    model = FairESMModel(
        ProteinBertModel(Namespace(arch="roberta_large", **sizes, **switches), alphabet).eval(), alphabet
    )
    assert model.max_length == 20
    assert model(torch.full((1, 20), 5)).logits.isfinite().any()
    with pytest.raises(ValueError, match="at most 20 tokens, got 21"):
        model(torch.full((1, 21), 5))
    assert FairESMModel(*tiny_esm2()).max_length is None


@pytest.mark.parametrize(("kind", "known"), [("esmc", r"-1\.\.1"), ("fair-esm", r"-3\.\.2")])
def test_unknown_layers_name_those_that_exist(kind: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"layers must lie in {known}, got"):
        make(kind, layers=7)


@pytest.mark.parametrize(
    ("name", "package"), [("esmc:esmc_300m", "pip install esm"), ("fair-esm:x", "pip install fair-esm")]
)
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("esm", "esm.models", "esm.models.esmc", "esm.pretrained"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=package):
        load_model(name)


def test_the_real_esmc_fits_where_it_is_installed() -> None:
    """Run by hand: pip install --no-deps esm==3.2.1.post1, instead of fair-esm, and what it imports."""
    esmc = pytest.importorskip("esm.models.esmc")
    from esm.tokenization import EsmSequenceTokenizer

    network = esmc.ESMC(64, 1, 2, EsmSequenceTokenizer(), use_flash_attn=False).eval()
    model = ESMCModel(network, layers=(-1, 1))
    output, alone = model(TOKENS), model(TOKENS[1:, :3])
    assert torch.equal(output.logits[1:, :3], alone.logits)
    assert output.hidden.shape == (2, 6, 128)


@pytest.mark.parametrize("content", [b"", b"no weights", b"PK\x03\x04 cut"])
def test_a_damaged_file_of_weights_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "esm2.pt"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"fair-esm: {path} cannot be loaded: the file is damaged or holds something else$"
    ):
        load_model(f"fair-esm:{path}")
