"""ESM-C (package `esm`) and ESM-1 and ESM-2 (package `fair-esm`): the two share an import name, one can be installed.

ESM-2 and ESM-C load from transformers as well: `load_model("hf:facebook/esm2_t6_8M_UR50D")`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdmi_fast.models._transformers import nameless
from mdmi_fast.models.call import evaluating
from mdmi_fast.models.identity import check_loaded
from mdmi_fast.models.limits import length_limit
from mdmi_fast.models.sequences import SequenceModel, check_layers


class ESMCModel(SequenceModel):
    """ESM-C as a `MaskedModel`: of its 64 logits those beside the tokenizer's 33 tokens stand for nothing.

    Args:
        network: an `esm.models.esmc.ESMC`.
        layers: whose states are the hidden state: -1 for `.embeddings`, the normed last one, else 0, 1 ... as in
            `.hidden_states`, which are not normed; several are joined.
        batch_invariant: see `SequenceModel`.

    Raises:
        ValueError: for an unknown layer, or weights that were not loaded.
    """

    def __init__(self, network: nn.Module, *, layers: int | Sequence[int] = -1, batch_invariant: bool = True) -> None:
        check_loaded("ESMCModel", network)
        tokenizer: Any = network.tokenizer
        embedding: Any = network.embed
        count = len(network.transformer.blocks)  # type: ignore[union-attr, arg-type]
        chosen = _layers(layers, range(-1, count), "ESMCModel")
        super().__init__(
            vocab_size=embedding.num_embeddings,
            hidden_size=embedding.embedding_dim * len(chosen),
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            forbidden_tokens={*tokenizer.all_special_ids, *nameless(tokenizer, embedding.num_embeddings)},
            batch_invariant=batch_invariant,
        )
        self.network, self.tokenizer, self.layers = network, tokenizer, chosen
        self.never = self.never.to(embedding.weight.device)

    def run(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        output = self.network(sequence_tokens=tokens, sequence_id=attention_mask)
        states = [output.embeddings if layer == -1 else output.hidden_states[layer] for layer in self.layers]
        return output.sequence_logits, torch.cat(states, dim=-1)


class FairESMModel(SequenceModel):
    """A model of fair-esm as a `MaskedModel`.

    Args:
        network: an `esm.model.esm2.ESM2`, or another whose output has "logits" and "representations".
        alphabet: its `esm.data.Alphabet`.
        layers: whose states are the hidden state: -1 for the last, 0 for the embeddings; several are joined.
        batch_invariant: see `SequenceModel`.

    Raises:
        ValueError: for an unknown layer, or weights that were not loaded.
    """

    def __init__(
        self, network: nn.Module, alphabet: Any, *, layers: int | Sequence[int] = -1, batch_invariant: bool = True
    ) -> None:
        check_loaded("FairESMModel", network)
        count: Any = network.num_layers
        chosen = _layers(layers, range(-count - 1, count + 1), "FairESMModel")
        # Everything that is no residue or gap, so also the "<null_1>" that fills the vocabulary up.
        special = [token for token in range(len(alphabet)) if alphabet.get_tok(token) not in alphabet.standard_toks]
        device = next(network.parameters()).device
        with evaluating(network):
            limit = length_limit(network, lambda n: network(torch.full((1, n), alphabet.mask_idx, device=device)))
        super().__init__(
            vocab_size=len(alphabet),
            hidden_size=network.embed_tokens.embedding_dim * len(chosen),  # type: ignore[union-attr, operator, arg-type]
            mask_token_id=alphabet.mask_idx,
            pad_token_id=alphabet.padding_idx,
            forbidden_tokens=special,
            max_length=limit,
            batch_invariant=batch_invariant,
        )
        self.network, self.alphabet, self.never = network, alphabet, self.never.to(device)
        self.layers = tuple(layer % (count + 1) for layer in chosen)

    def run(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        output = self.network(tokens, repr_layers=list(self.layers))
        states = [output["representations"][layer] for layer in self.layers]
        return output["logits"], torch.cat(states, dim=-1)


def load_esmc(
    name: str = "esmc_300m",
    *,
    layers: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    batch_invariant: bool = True,
) -> ESMCModel:
    """Load ESM-C by the package `esm`, `load_model("esmc:esmc_300m")`; its weights come from the Hugging Face hub.

    Args:
        name: "esmc_300m" or "esmc_600m".
        layers: see `ESMCModel`.
        dtype: of the weights; None: as the package decides.
        device: where to.
        batch_invariant: see `SequenceModel`.

    Raises:
        ImportError: without `esm`, or where `fair-esm` lies in its place.
        ValueError: for an unknown layer.
    """
    try:
        from esm.models.esmc import ESMC
    except ImportError:
        raise ImportError("esmc: models need the package esm (not fair-esm): pip install esm") from None
    network = ESMC.from_pretrained(name, device=torch.device(device))
    network = (network if dtype is None else network.to(dtype)).eval().requires_grad_(False)
    return ESMCModel(network, layers=layers, batch_invariant=batch_invariant).to(device)


def load_fair_esm(
    name: str,
    *,
    layers: int | Sequence[int] = -1,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    batch_invariant: bool = True,
) -> FairESMModel:
    """Load a model of fair-esm, `load_model("fair-esm:esm2_t6_8M_UR50D")`; its weights are downloaded.

    Args:
        name: of the model, or a .pt file.
        layers: see `FairESMModel`.
        dtype: of the weights; None: as they were saved.
        device: where to.
        batch_invariant: see `SequenceModel`.

    Raises:
        ImportError: without `fair-esm`, or where `esm` lies in its place.
        OSError: if the weights are neither here nor can be downloaded.
        ValueError: for an unknown layer, or a damaged file.
    """
    try:
        from esm.pretrained import load_model_and_alphabet
    except ImportError:
        raise ImportError("fair-esm: models need the package fair-esm (not esm): pip install fair-esm") from None
    try:
        network, alphabet = load_model_and_alphabet(name)
    except OSError as error:
        raise OSError(
            f"fair-esm: {name} cannot be loaded: {error}; a .pt file fetched elsewhere can be named"
        ) from error
    except (RuntimeError, EOFError, KeyError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"fair-esm: {name} cannot be loaded: the file is damaged or holds something else") from error
    network = network.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return FairESMModel(network, alphabet, layers=layers, batch_invariant=batch_invariant).to(device)


def _layers(layers: int | Sequence[int], known: range, name: str) -> tuple[int, ...]:
    chosen = check_layers(name, layers)
    if not chosen or not set(chosen) <= set(known):
        raise ValueError(f"{name}: layers must lie in {known.start}..{known.stop - 1}, got {chosen}")
    return chosen
