"""States that an estimator was not trained for: under another mask law, and built to make it err."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.estimator.data import Example, examples
from mdmi_fast.labels import Form, LabelSet, label_mi
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model


def shifted_states(model: MaskedModel, tokens: Tensor, *, seed: int = 0) -> Tensor:
    """The same sequences under another mask law: one run of neighbours is masked, the rest is visible.

    Args:
        model: fills what is masked, each position with its most likely token.
        tokens: [S, N] int64.
        seed: of the runs, which cover between a tenth and nine tenths of the positions.

    Returns:
        [S, N] int64. Positions where a state holds a token that the model never writes (start, end, padding) stay.

    Raises:
        ValueError: if fewer than four positions are left.
    """
    places, sequences = _free(model, tokens)
    generator = torch.Generator().manual_seed(seed)
    share = 0.1 + 0.8 * _uniform(generator, tokens.device, len(tokens))
    length = (share * len(places)).long().clamp(min=2)
    start = (_uniform(generator, tokens.device, len(tokens)) * (len(places) - length + 1)).long()
    index = torch.arange(len(places), device=tokens.device)
    run = (index >= start.unsqueeze(1)) & (index < (start + length).unsqueeze(1))
    return _placed(tokens, places, sequences.masked_fill(run, model.mask_token_id), model)


def adversarial_states(model: MaskedModel, tokens: Tensor, *, seed: int = 0) -> Tensor:
    """States built to make an estimator err, of four kinds in turn, beginning with that of number `seed`.

    Permuted columns (what stood at a position stands at another, in all states alike); one motif repeated over the
    sequence; all visible tokens equal; two halves that repeat each other and are masked alike, so that every masked
    position must agree with its twin.

    Args:
        model: fills what is masked, each position with its most likely token.
        tokens: [S, N] int64.
        seed: of the permutation and of the masks of the last kind.

    Returns:
        [S, N] int64, as `shifted_states`.

    Raises:
        ValueError: as `shifted_states`.
    """
    places, sequences = _free(model, tokens)
    generator = torch.Generator().manual_seed(seed)
    masked = tokens[:, places] == model.mask_token_id
    order = torch.randperm(len(places), generator=generator, device="cpu").to(tokens.device)
    half, motif = len(places) // 2, max(1, len(places) // 8)
    index = torch.arange(len(places), device=tokens.device)
    twins = _uniform(generator, tokens.device, len(tokens), half) < 0.5
    twins[:, 0] = True  # one pair at least
    twins = torch.cat([twins, twins, twins.new_zeros(len(tokens), len(places) - 2 * half)], 1)
    kinds: list[tuple[Tensor, Tensor]] = [
        (sequences[:, order], masked[:, order]),
        (sequences[:, index % motif], masked),
        (sequences.mode(1, keepdim=True).values.expand_as(sequences), masked),
        (sequences[:, index % half], twins),
    ]
    built = torch.stack([filled.masked_fill(mask, model.mask_token_id) for filled, mask in kinds])
    rows = torch.arange(len(tokens), device=tokens.device)
    return _placed(tokens, places, built[(rows + seed) % len(kinds), rows], model)


def _uniform(generator: torch.Generator, device: torch.device, *shape: int) -> Tensor:
    """Numbers in [0, 1), float32, the same on every device."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


BUILT = {"shifted": shifted_states, "adversarial": adversarial_states}
"""The splits that are built from states of the first, by name."""


def build_split(
    name: str,
    model: MaskedModel,
    states: Sequence[Tensor],
    *,
    form: Form = "joint",
    epsilon: float = 0.0,
    seed: int = 0,
) -> list[Example]:
    """Build a split from states of any lengths, and label it.

    Args:
        name: of `BUILT`.
        model: to be probed.
        states: [N] int64 each, masked where they hold the mask token.
        form: of the labels, as for `label_mi`, like epsilon.
        epsilon: nats that a label may be wrong by.
        seed: of what is drawn.

    Raises:
        ValueError: as `shifted_states`.
    """
    found: list[Example] = []
    for length in sorted({len(state) for state in states}):
        group = torch.stack([state for state in states if len(state) == length])
        tokens = BUILT[name](model, group, seed=seed + len(found))
        labels = label_mi(model, tokens, form=form, epsilon=epsilon)
        found += examples(LabelSet(tokens, tokens == model.mask_token_id, labels.mi, labels.entropy))
    return found


@torch.no_grad()
def _free(model: MaskedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that may be rewritten, [n], and what stands there, [S, n], with masked tokens filled in."""
    logits = call_model("splits", model, tokens).logits
    masked = tokens == model.mask_token_id
    known = tokens.masked_fill(masked, 0)
    # A visible token that the model would never write (start, end, padding) is part of the form, not of the text.
    form = logits.gather(-1, known.unsqueeze(-1)).squeeze(-1) == -torch.inf
    form |= tokens == check.attribute(model, "pad_token_id")
    places = (~(form & ~masked)).all(0).nonzero().flatten()
    if len(places) < 4:
        raise ValueError(f"splits: states must have at least four positions that are free in all, got {len(places)}")
    if model.mask_token_id < logits.shape[-1]:
        logits = logits.clone()
        logits[..., model.mask_token_id] = -torch.inf
    return places, logits.argmax(-1).where(masked, tokens)[:, places]


def _placed(tokens: Tensor, places: Tensor, states: Tensor, model: MaskedModel) -> Tensor:
    """The states put where they belong between the fixed tokens; two positions at least are masked in each."""
    for state in states:
        visible = (state != model.mask_token_id).nonzero().flatten()
        missing = 2 - (len(state) - len(visible))
        if missing > 0:
            state[visible[:missing]] = model.mask_token_id
    result = tokens.clone()
    result[:, places] = states
    return result
