"""The decoding loop: run the model, let a policy choose positions, write tokens, until nothing is masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decode.policies import Policy, Step
from mdmi_fast.decode.randomness import draw_seeds, uniform
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import TokenStats


class PassRecord(NamedTuple):
    """One pass of a trace.

    Attributes:
        step: number of the pass.
        sequences: [R] int64, the sequences still being decoded.
        selected: [R, N] bool, what was unmasked.
        tokens: [R, N] int64, the state after the pass.
        entropy: [R, N] float32, nats, before the pass; 0 where not masked.
        spent: [R] float64, as the policy counted it.
    """

    step: int
    sequences: Tensor
    selected: Tensor
    tokens: Tensor
    entropy: Tensor
    spent: Tensor


class DecodeResult(NamedTuple):
    """What decoding gave.

    Attributes:
        tokens: [B, N] int64 without a masked position.
        passes: [B] int64, forward passes each sequence took part in.
        trace: one record a pass, or None if it was not asked for.
    """

    tokens: Tensor
    passes: Tensor
    trace: list[PassRecord] | None


@torch.no_grad()
def decode(
    model: MaskedModel,
    tokens: Tensor,
    policy: Policy,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    seeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    trace: bool = False,
    progress: Callable[[int], object] | None = None,
) -> DecodeResult:
    """Fill every masked position of a batch.

    A sequence's result depends on itself and its seed, not on the batch: sequences leave the batch when they are done.

    Args:
        model: the masked model.
        tokens: [B, N] int64, `model.mask_token_id` where masked.
        policy: which positions to unmask in a pass.
        temperature: 0 writes the most probable token; above, tokens are drawn from softmax(logits / temperature).
            Policies always see the model's own logits.
        generator: where the sequences' seeds come from, one after the other; None: torch's own generator.
        seeds: [B] int64, one a sequence, instead of a generator.
        attention_mask: [B, N] bool, False at padding; padding is not decoded.
        trace: keep a record of every pass.
        progress: called with the number of sequences that a pass finished.

    Returns:
        DecodeResult. A sequence without a masked position comes back as it is, after 0 passes.

    Raises:
        ValueError: for shapes that do not fit, a negative or NaN temperature, logits that give no distribution at a
            masked position, or a policy that takes nothing.

    Numerics:
        Probabilities of a draw in float64.

    Example:
        >>> import torch
        >>> from mdmi_fast import MIBudget, Probing, decode
        >>> from mdmi_fast.models.exact import JointTable
        >>> model = JointTable(torch.tensor([[0.6, 0.0], [0.0, 0.4]]))  # two bits that agree
        >>> result = decode(model, torch.tensor([[2, 2], [2, 1]]), MIBudget(Probing(), gamma=0.1))
        >>> result.tokens.tolist(), result.passes.tolist()
        ([[0, 0], [1, 1]], [2, 1])
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"decode: tokens must be [B, N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"decode: temperature must be a finite number >= 0, got {temperature}")
    if attention_mask is not None and (attention_mask.shape != tokens.shape or attention_mask.dtype != torch.bool):
        raise ValueError(
            f"decode: attention_mask must be {tuple(tokens.shape)} bool like tokens, "
            f"got shape {tuple(attention_mask.shape)} {attention_mask.dtype}"
        )
    if seeds is None:
        seeds = draw_seeds(len(tokens), generator, tokens.device)
    elif generator is not None or seeds.shape != tokens.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(f"decode: give either a generator or seeds [{len(tokens)}] int64")

    tokens = tokens.clone()
    masked = tokens == model.mask_token_id
    if attention_mask is not None:
        masked &= attention_mask
    passes = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    records: list[PassRecord] | None = [] if trace else None
    active = masked.any(dim=-1).nonzero().squeeze(-1)
    index = 0
    while len(active):
        state, mask = tokens[active], masked[active]
        visible = None if attention_mask is None else attention_mask[active]
        output = model(state) if visible is None else model(state, visible)
        stats = ops.token_stats(output.logits)
        _check_distributions(stats, mask, active)
        step = Step(index, model=model, tokens=state, seeds=seeds[active], attention_mask=visible)
        selected, spent = policy.select(stats, output.hidden, mask, step)
        if selected.shape != mask.shape or selected.dtype != torch.bool:
            raise ValueError(
                f"decode: the policy {policy!r} must select {tuple(mask.shape)} bool, "
                f"got shape {tuple(selected.shape)} {selected.dtype}"
            )
        selected = selected & mask
        if not bool(selected.any(dim=-1).all()):
            stuck = int(active[~selected.any(dim=-1)][0])
            raise ValueError(f"decode: the policy {policy!r} took no position of sequence {stuck} in pass {index}")
        if temperature == 0:
            chosen = stats.token[selected]
        else:
            luck = uniform(seeds[active], index, 0, state.shape[1])
            chosen = sample(output.logits[selected], luck[selected], temperature)
        state[selected] = chosen
        tokens[active] = state
        left = mask & ~selected
        masked[active] = left
        passes[active] += 1
        if records is not None:
            entropy = stats.entropy.masked_fill(~mask, 0.0)
            records.append(PassRecord(index, active, selected, state, entropy, spent))
        remaining = left.any(dim=-1)
        if progress is not None:
            progress(int((~remaining).sum()))
        active = active[remaining]
        index += 1
    return DecodeResult(tokens, passes, records)


def sample(logits: Tensor, luck: Tensor, temperature: float) -> Tensor:
    """Draw tokens from softmax(logits / temperature) by inverting the cumulative sum, in float64.

    Args:
        logits: [R, V] float, not all -inf.
        luck: [R] float64 in [0, 1).
        temperature: above 0.

    Returns:
        [R] int64, never a token of probability 0.
    """
    logits = logits.double()
    weight = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp()
    cumulative = weight.cumsum(dim=-1)
    target = luck.unsqueeze(-1) * cumulative[:, -1:]
    # The first token whose cumulative weight exceeds the target, which rounding may have carried to the very end: no
    # further than the last token of any weight.
    drawn = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return drawn.minimum(last).squeeze(-1)


def _check_distributions(stats: TokenStats, mask: Tensor, active: Tensor) -> None:
    broken = stats.entropy.isnan() & mask
    if bool(broken.any()):
        row, position = broken.nonzero()[0].tolist()
        raise ValueError(
            f"decode: the model's logits at sequence {int(active[row])}, position {position} give no distribution "
            "(NaN, +inf, or -inf everywhere)"
        )
