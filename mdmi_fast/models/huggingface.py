"""Masked language models of transformers: `load_model("hf:NAME_OR_FOLDER")`.

Everything that AutoModelForMaskedLM loads is called alike. Two masked diffusion models come with their own code
(`trust_remote_code=True`) and load as AutoModel:

- LLaDA ("llada"): logits as usual.
- Dream ("Dream"): a causal model trained on; what it says about position i stands at i - 1 (`shift`).

Another model of either kind needs no adapter: say `shift=True` where its logits are shifted. LLaDA pads with its token
for the end of a text, so only an attention mask tells them apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast._moved import renamed
from mdmi_fast.models._head import LastProduct
from mdmi_fast.models._transformers import is_text, loading_errors, special_tokens, token_of
from mdmi_fast.models.base import AttentiveOutput, MaskedOutput, StatsOutput
from mdmi_fast.models.call import check_flag, evaluating
from mdmi_fast.models.identity import check_loaded
from mdmi_fast.models.limits import length_limit
from mdmi_fast.models.sequences import SequenceModel, check_layers

_DIFFUSION = {"llada": False, "Dream": True}
"""config.model_type of diffusion models that load as AutoModel -> whether the logits are shifted."""


class HuggingFaceModel(SequenceModel):
    """A masked LM of transformers as a `MaskedModel`.

    Args:
        network: its output has `logits` and, when asked, `hidden_states`.
        tokenizer: gives the mask token, the pad token and the tokens that are never decoded: its `all_special_ids` and
            what is not among the values of its `get_vocab()` (or, if it has no such method, lies beyond its length).
            Without one they come from the configuration. A pad token that is the token of the beginning, the end or
            an unknown piece of a text too is padding only where an attention mask says so.
        layers: whose states are the hidden state, -1 for the last, 0 for the embeddings; several are joined.
        mask_token_id: instead of the tokenizer's or the configuration's.
        forbidden_tokens: tokens that are never decoded, instead of the special ones.
        shift: the logits of position i stand at i - 1 (see the module's text).
        batch_invariant: see `SequenceModel`.
        attention: answers are an `AttentiveOutput`, averaged over the later half of the layers, for policies that read it
            (`AttentionGraph`). The network must keep attention weights.

    Raises:
        TypeError: for arguments of another kind.
        ValueError: if there is no mask token, no such layer, or the network holds no weights or does not give logits and
            hidden states of every position.
    """

    @renamed(never="forbidden_tokens")
    def __init__(
        self,
        network: nn.Module,
        tokenizer: Any = None,
        *,
        layers: int | Sequence[int] = -1,
        mask_token_id: int | None = None,
        forbidden_tokens: Iterable[int] | None = None,
        shift: bool = False,
        batch_invariant: bool = True,
        attention: bool = False,
    ) -> None:
        config: Any = network.config
        name = type(network).__name__
        check_loaded(name, network)
        mask = _first(mask_token_id, token_of(tokenizer, "mask"), token_of(config, "mask"))
        if mask is None:
            raise ValueError(
                f"{name}: {'the tokenizer' if tokenizer is not None else 'the configuration'} knows "
                'no mask token; say which one it is with mask_token_id=N (in the name of a model: "?mask_token_id=N")'
            )
        known = _n_embedded(network) or check.whole(name, "mask_token_id", mask, 0) + 1
        if not 0 <= check.whole(name, "mask_token_id", mask, 0) < known:
            raise ValueError(f"{name}: mask_token_id must lie in 0..{known - 1}, got {mask}")
        chosen = check_layers(name, layers)
        with evaluating(network):
            logits, states = _probe(network, mask, chosen)
            # A token that no network takes for padding: positions are not counted at padding.
            text = next(token for token in (mask, 0, 1) if token != token_of(config, "pad"))
            limit = length_limit(network, lambda n: network(input_ids=torch.full((1, n), text, device=logits.device)))
        if forbidden_tokens is None:
            forbidden_tokens = special_tokens(tokenizer, config, logits.shape[-1])
        pad = _first(token_of(tokenizer, "pad"), token_of(config, "pad"))
        super().__init__(
            vocab_size=logits.shape[-1],
            hidden_size=sum(states[layer].shape[-1] for layer in chosen),
            mask_token_id=mask,
            pad_token_id=pad,
            pad_is_text=is_text(pad, tokenizer, config),
            forbidden_tokens=forbidden_tokens,
            max_length=limit,
            batch_invariant=batch_invariant,
        )
        self.network, self.tokenizer, self.never = network, tokenizer, self.never.to(logits.device)
        self.layers, self.shift = chosen, check_flag(name, "shift", shift)
        self._attentive = check_flag(name, "attention", attention)
        with evaluating(network):
            self.head = LastProduct.of(network, mask)

    def run(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        output = self._output(tokens, attention_mask)
        return self._aligned(output.logits), self._hidden(output)

    @torch.no_grad()
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        """As of every `SequenceModel`; an `AttentiveOutput` where attention was asked for."""
        if not self._attentive:
            return super().forward(tokens, attention_mask)
        visible = self._checked(tokens, attention_mask)
        length = tokens.shape[-1]

        def answer(part: Tensor, shown: Tensor | None) -> tuple[Tensor, ...]:
            output = self._output(part, shown, output_attentions=True)
            weights = _kept(output.attentions)
            attention = torch.stack(weights[len(weights) // 2 :]).mean(dim=(0, 2))
            logits = self._aligned(output.logits).index_fill(-1, self.forbidden_tokens, -torch.inf)
            return logits, self._hidden(output), F.pad(attention, (0, length - part.shape[1]))

        logits, hidden, attention = self._put_together(answer, tokens, attention_mask)
        # Columns count from the first visible position of a sequence.
        column = (visible.cumsum(dim=1) - 1).clamp(min=0).unsqueeze(1).expand(-1, length, -1)
        attention = attention.gather(-1, column).masked_fill(~visible.unsqueeze(1), 0.0)
        return AttentiveOutput(logits, hidden, attention)

    @torch.no_grad()
    def token_stats(self, tokens: Tensor, attention_mask: Tensor | None = None) -> StatsOutput:
        """What `ops.token_stats` says of the logits, without holding logits [B, N, V] where the head was found.

        Args:
            tokens: as for the call of the model.
            attention_mask: likewise.

        Raises:
            ValueError: as the call of the model.
        """
        if self.head is None:
            logits, hidden = super().forward(tokens, attention_mask)
            return StatsOutput(ops.token_stats(logits), hidden)
        product, weight = self.head, self.head.layer.weight
        bias = weight.new_zeros(self.vocab_size) if product.bias is None else product.bias
        bias = bias.index_fill(0, self.forbidden_tokens, -torch.inf)

        def answer(part: Tensor, visible: Tensor | None) -> tuple[Tensor, ...]:
            with product.left_out() as tap:
                _, hidden = self.run(part, visible)
            return *ops.linear_token_stats(self._aligned(tap.features), weight, bias), hidden

        *fields, hidden = self._put_together(answer, tokens, attention_mask)
        return StatsOutput(ops.TokenStats(*fields), hidden)

    @torch.no_grad()
    def attentions(self, tokens: Tensor) -> Tensor:
        """Attention weights of every layer: [layers, B, heads, N, N], of sequences without padding.

        Raises:
            ValueError: if the network keeps none: load it with attention="eager".
        """
        with evaluating(self):
            return torch.stack(_kept(self.network(input_ids=tokens, output_attentions=True).attentions))

    def _output(self, tokens: Tensor, attention_mask: Tensor | None, **options: bool) -> Any:
        return self.network(
            input_ids=tokens,
            attention_mask=None if attention_mask is None else attention_mask.long(),
            output_hidden_states=True,
            **options,
        )

    def _hidden(self, output: Any) -> Tensor:
        return self._aligned(torch.cat([output.hidden_states[layer] for layer in self.layers], dim=-1))

    def _aligned(self, x: Tensor) -> Tensor:
        """What is said of a position, at that position [B, N, ...]."""
        return torch.cat([x[:, :1], x[:, :-1]], dim=1) if self.shift else x


class LoadOptions(TypedDict, total=False):
    """Options of loaders that know the tokenizer themselves; see `load_model`."""

    layers: int | Sequence[int]
    dtype: torch.dtype | None
    device: str | torch.device
    attention: str | None
    compile: bool
    batch_invariant: bool


@renamed(never="forbidden_tokens")
def load_model(
    name: str,
    *,
    layers: int | Sequence[int] = -1,
    tokenizer: Any = True,
    mask_token_id: int | None = None,
    forbidden_tokens: Iterable[int] | None = None,
    shift: bool | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    attention: str | None = None,
    compile: bool = False,  # noqa: A002 - what torch calls it
    trust_remote_code: bool = False,
    revision: str | None = None,
    batch_invariant: bool = True,
) -> HuggingFaceModel:
    """Load a masked LM of transformers, `load_model("hf:NAME_OR_FOLDER")`.

    Args:
        name: a folder, or a name on the Hugging Face hub (or in its local cache).
        layers: see `HuggingFaceModel`.
        tokenizer: True for the model's own (none where a folder holds none), None for none, the name or folder of
            another, or an object with the attributes that `HuggingFaceModel` reads.
        mask_token_id: see `HuggingFaceModel`.
        forbidden_tokens: see `HuggingFaceModel`.
        shift: see the module's text; None decides by the kind of model.
        dtype: of the weights; None: as they were saved.
        device: where to.
        attention: transformers' attn_implementation, such as "sdpa", "flash_attention_2", or "eager": for `attentions`, and
            for policies that read the attention, which answers then carry.
        compile: pass the network through torch.compile.
        trust_remote_code: run code that comes with the model. It can do anything: read it first.
        revision: of a name on the hub.
        batch_invariant: see `SequenceModel`.

    Raises:
        ImportError: without transformers.
        OSError: if there is no such model, a file of it is missing, or there is no network to fetch it.
        ValueError: as `HuggingFaceModel`; for a model that is no masked LM, a damaged file, or code that is not trusted.

    Warns:
        UserWarning: for weights that the model lacks.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("hf: models need transformers: pip install 'mdmi-fast[hf]'") from None
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    folder = Path(name).expanduser()
    if folder.is_dir():
        name = str(folder)
    elif name[0] in "./~" or name.count("/") > 1:
        raise FileNotFoundError(f"hf: there is no folder {name}")
    with loading_errors(name):
        config = transformers.AutoConfig.from_pretrained(name, **common)
    diffusion = config.model_type in _DIFFUSION
    loader = transformers.AutoModel if diffusion else transformers.AutoModelForMaskedLM
    if not diffusion and type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING and not _has_code(config):
        raise ValueError(f"hf: {name} is a model of type {config.model_type!r}, of which no masked LM is known")
    chosen: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with loading_errors(name):
        network, told = loader.from_pretrained(
            name, dtype="auto" if dtype is None else dtype, output_loading_info=True, **common, **chosen
        )
    if tokenizer is True:
        tokenizer = name if _has_tokenizer(folder) else None
    elif isinstance(tokenizer, str) and not _has_tokenizer(Path(tokenizer)):
        raise FileNotFoundError(f"hf: folder {tokenizer} holds no tokenizer")
    if isinstance(tokenizer, str):
        with loading_errors(tokenizer):
            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer, **common)
    if told["missing_keys"]:
        warnings.warn(
            f"hf: {name} holds no weights for {', '.join(sorted(told['missing_keys'])[:3])} ({len(told['missing_keys'])} "
            "in all): they are random, so this is no trained masked LM",
            stacklevel=2,
        )
    model = HuggingFaceModel(
        network.eval().requires_grad_(False).to(device),
        tokenizer,
        layers=layers,
        mask_token_id=mask_token_id,
        forbidden_tokens=forbidden_tokens,
        shift=_DIFFUSION.get(config.model_type, False) if shift is None else shift,
        batch_invariant=batch_invariant,
        attention=attention == "eager",
    ).to(device)
    if compile:
        model.network.compile(dynamic=True)
    return model


def _n_embedded(network: nn.Module) -> int | None:
    """How many tokens a network has vectors for; None where it does not show them."""
    try:
        return int(network.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _kept(attentions: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Attention weights [B, heads, N, N] of every layer.

    Raises:
        ValueError: if the network keeps none.
    """
    kept = [weights for weights in attentions or () if weights is not None]
    if not attentions or len(kept) < len(attentions):
        raise ValueError('HuggingFaceModel: this attention keeps no weights; load the model with attention="eager"')
    return kept


def _has_code(config: Any) -> bool:
    """Whether a model brings the code of its masked LM."""
    return "AutoModelForMaskedLM" in (check.attribute(config, "auto_map") or {})


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer; a name on the hub is taken to.

    Asked without one, transformers makes an empty tokenizer for some architectures, whose tokens mean nothing.
    """
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return not folder.is_dir() or any((folder / file).exists() for file in files)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


@torch.no_grad()
def _probe(network: nn.Module, mask: int, layers: tuple[int, ...]) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits and hidden states of a sequence of three tokens, so that what is missing is said when a model is loaded."""
    device = next(network.parameters()).device
    name = type(network).__name__
    tokens = torch.tensor([[0, mask, 1]], device=device)
    try:
        output = network(input_ids=tokens, output_hidden_states=True)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name}: cannot read a sequence of three tokens: {error}") from error
    if check.attribute(output, "logits") is None:
        raise ValueError(f"{name}: gives no logits; load a model with a masked-LM head")
    states = check.attribute(output, "hidden_states")
    if not states:
        raise ValueError(
            f"{name}: gives no hidden_states when asked for output_hidden_states=True; an estimator has nothing to "
            "read. Wrap the network so that its output carries them"
        )
    if not layers or not all(-len(states) <= layer < len(states) for layer in layers):
        raise ValueError(f"{name}: layers must lie in {-len(states)}..{len(states) - 1} (0: embeddings), got {layers}")
    for what, field in (("logits", output.logits), *((f"hidden states {layer}", states[layer]) for layer in layers)):
        if field.ndim != 3 or field.shape[:2] != tokens.shape:
            raise ValueError(
                f"{name}: {what} must be of every position, [1, 3, ...] for three tokens, got {check.describe(field)}"
            )
    return output.logits, states
