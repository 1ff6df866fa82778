"""Ground-truth pairwise mutual information by probing the model itself (rows S1, S2 of the source).

One pass with nothing added gives the marginals; one pass for every masked position i and value v, with v written at
i, gives q_v = p(x_j | X_i = v). With p_v = p(X_i = v), the same passes yield three readings of I(X_i; X_j | visible):

- "joint":   H(sum_v p_v q_v) - sum_v p_v H(q_v), the mutual information of the joint p(x_i) p(x_j | x_i). Never negative.
- "entropy": H(x_j) - sum_v p_v H(q_v), the published form. Negative where revealing a token makes the model less sure.
- "kl":      sum_v p_v KL(q_v || p(x_j)). Never negative.

They agree exactly when sum_v p_v q_v = p(x_j), that is when the model's conditionals are consistent; a trained
network's are not, so the readings differ, and so do the two directions of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch

from mdmi_fast import ops
from mdmi_fast.models import MaskedModel

Form = Literal["joint", "entropy", "kl"]
FORMS: tuple[Form, ...] = get_args(Form)


class MILabels(NamedTuple):
    """Pairwise mutual information of masked positions, in nats.

    Attributes:
        mi: [B, N, N] float32, the mean of both directions; 0 on the diagonal and where an end is not masked.
        entropy: [B, N] float32, H(X_i | visible) of masked positions, 0 elsewhere.
        bound: [B, N, N] float32, no entry of `mi` is further than this from what full probing gives.
        passes: [B] int64, forward passes spent on each sequence.
        asymmetry: [B] float32, the mean over masked pairs of |one direction - the other|.
    """

    mi: torch.Tensor
    entropy: torch.Tensor
    bound: torch.Tensor
    passes: torch.Tensor
    asymmetry: torch.Tensor


class Probe(NamedTuple):
    """What one probing run found; row i of a directed matrix is what writing X_i tells of every x_j.

    Attributes:
        directed: form -> [B, N, N] float32. Only "joint" where the run left passes out (epsilon > 0).
        mask: [B, N] bool.
        entropy: [B, N] float32, 0 where not masked.
        bound: [B, N] float32, the error of every entry of row i in "joint" form.
        passes: [B] int64.
    """

    directed: dict[Form, torch.Tensor]
    mask: torch.Tensor
    entropy: torch.Tensor
    bound: torch.Tensor
    passes: torch.Tensor

    def labels(self, form: Form) -> MILabels:
        """The symmetric labels of one form."""
        one_way = self.directed[form]
        other_way = one_way.transpose(-1, -2)
        pairs = masked_pairs(self.mask)
        gap = ((one_way - other_way).abs() * pairs).sum(dim=(-1, -2)) / pairs.sum(dim=(-1, -2)).clamp(min=1)
        bound = (self.bound.unsqueeze(-1) + self.bound.unsqueeze(-2)) / 2 * pairs
        return MILabels((one_way + other_way) / 2, self.entropy, bound, self.passes, gap)


def masked_pairs(mask: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [..., N, N] bool: True where both ends are masked and differ."""
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    return pairs & ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)


def label_mi(
    model: MaskedModel,
    tokens: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    form: Form = "joint",
    epsilon: float = 0.0,
    batch_size: int = 512,
    progress: Callable[[int], None] | None = None,
) -> MILabels:
    """Label every masked pair of every sequence with its mutual information, symmetrised by the mean.

    Args:
        model: the frozen model.
        tokens: [B, N] or [N] int64.
        mask: bool of the same shape, True = masked; those positions are replaced by the mask token. None takes the
            positions that already hold it.
        form: which reading to return, see the module's text.
        epsilon: nats that an entry may be wrong by, see `probe_mi`; only for "joint", the form whose error is proven.
        batch_size: sequences in one forward pass.
        progress: called with the number of passes just finished.

    Returns:
        MILabels, without the batch dimension when tokens had none.

    Raises:
        ValueError: for an unknown form, shapes that do not fit, or epsilon > 0 with another form than "joint".
    """
    if form not in FORMS:
        raise ValueError(f"label_mi: form must be one of {', '.join(FORMS)}, got {form!r}")
    if epsilon > 0 and form != "joint":
        raise ValueError(f"label_mi: epsilon > 0 needs form='joint', whose error is proven, got form={form!r}")
    batched = tokens.ndim == 2
    if not batched:
        tokens, mask = tokens.unsqueeze(0), None if mask is None else mask.unsqueeze(0)
    labels = probe_mi(model, tokens, mask, epsilon=epsilon, batch_size=batch_size, progress=progress).labels(form)
    return labels if batched else MILabels(*(field.squeeze(0) for field in labels))


@torch.no_grad()
def probe_mi(
    model: MaskedModel,
    tokens: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    epsilon: float = 0.0,
    batch_size: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Probe:
    """Probe every masked position with every value that matters, at 1 + M V passes for M masked positions at most.

    With epsilon > 0 two kinds of passes are left out, each with a proof for the "joint" form:

    - position i is not probed at all when H_i <= epsilon: I(X_i; X_j) <= H(X_i), so 0 is wrong by at most epsilon;
    - only values carrying 1 - delta of p(X_i) are probed and their weights rescaled. With T the event that X_i is in
      the tail, I(X_i; X_j) lies between (1 - delta) I_kept and h(delta) + (1 - delta) I_kept + delta ln V, where h is
      the binary entropy (chain rule, I(T; X_j) <= h(delta)). As I_kept <= ln V, I_kept is wrong by at most
      h(delta) + delta ln V; delta is the largest tail for which that stays within epsilon.

    Args:
        model: the frozen model.
        tokens: [B, N] int64.
        mask: [B, N] bool, or None for the positions that hold the mask token.
        epsilon: nats that an entry of the "joint" form may be wrong by.
        batch_size: sequences in one forward pass.
        progress: called with the number of passes just finished.

    Raises:
        ValueError: for shapes that do not fit, a negative or NaN epsilon, or a model that answers NaN.
    """
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise ValueError(f"probe_mi: tokens must be [B, N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    if mask is None:
        mask = tokens == model.mask_token_id
    elif mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"probe_mi: mask must be {tuple(tokens.shape)} bool like tokens, got {tuple(mask.shape)} {mask.dtype}"
        )
    if not epsilon >= 0:
        raise ValueError(f"probe_mi: epsilon must be >= 0 nats, got {epsilon}")
    if batch_size < 1:
        raise ValueError(f"probe_mi: batch_size must be at least 1, got {batch_size}")

    tokens = tokens.masked_fill(mask, model.mask_token_id)
    base = torch.cat([model(part).logits for part in tokens.split(batch_size)]) if len(tokens) else None
    forms: tuple[Form, ...] = FORMS if epsilon == 0 else ("joint",)
    directed = {form: torch.zeros(*tokens.shape, tokens.shape[1], device=tokens.device) for form in forms}
    if base is None:
        nothing = torch.zeros(tokens.shape)
        return Probe(directed, mask, nothing, nothing, torch.zeros(0, dtype=torch.int64))
    entropy = ops.entropy(base).masked_fill(~mask, 0.0)
    if bool(entropy.isnan().any()):
        row, position = entropy.isnan().nonzero()[0].tolist()
        raise ValueError(f"probe_mi: the model's logits at sequence {row}, position {position} give no distribution")

    keep, weights, bound = _plan(base, mask, entropy, epsilon)
    passes = 1 + keep.sum(dim=(1, 2))
    if progress is not None:
        progress(len(tokens))
    for rows, positions, ranks, values in _batches(keep, batch_size):
        probes = tokens[rows[ranks]]
        probes[torch.arange(len(probes)), positions[ranks]] = values
        answers = torch.cat([model(part).logits for part in probes.split(batch_size)])
        if progress is not None:
            progress(len(probes))
        _reduce(directed, answers, weights, base, rows, positions, ranks, values)
    for matrix in directed.values():
        matrix *= masked_pairs(mask)
    return Probe(directed, mask, entropy, bound, passes)


def _plan(
    base: torch.Tensor, mask: torch.Tensor, entropy: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which (row, position, value) to probe [B, N, V] bool, their weights [B, N, V], the error [B, N] of each row."""
    vocabulary = base.shape[-1]
    probability = base.double().softmax(dim=-1)
    ascending, order = probability.sort(dim=-1)
    tail = ascending.cumsum(dim=-1)
    error = _binary_entropy(tail) + tail * math.log(vocabulary)
    dropped = (error <= epsilon) & (tail < 0.5)
    drop = torch.zeros_like(dropped).scatter(-1, order, dropped) | (probability == 0)
    keep = ~drop & (mask & (entropy > epsilon)).unsqueeze(-1)
    weights = probability * keep
    weights = (weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)).float()
    bound = torch.where(entropy > epsilon, (error * dropped).amax(dim=-1).float(), entropy)
    return keep, weights, bound.masked_fill(~mask, 0.0)


def _binary_entropy(p: torch.Tensor) -> torch.Tensor:
    q = (1 - p).clamp(min=0)
    return -torch.special.xlogy(p, p) - torch.special.xlogy(q, q)


def _batches(
    keep: torch.Tensor, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Cut the plan into runs of whole (row, position) groups of about batch_size probes.

    Yields rows [G], positions [G] of the groups, then ranks [Q] (which group) and values [Q] of the probes.
    """
    counts = keep.sum(dim=-1)
    groups = counts.nonzero()
    if not len(groups):
        return
    sizes = counts[groups[:, 0], groups[:, 1]]
    run = (sizes.cumsum(0) - 1) // max(batch_size, int(sizes.max()))
    for part in groups.split(torch.bincount(run).tolist()):
        if len(part):
            rows, positions = part.unbind(dim=1)
            ranks, values = keep[rows, positions].nonzero().unbind(dim=1)
            yield rows, positions, ranks, values


def _reduce(
    directed: dict[Form, torch.Tensor],
    answers: torch.Tensor,
    weights: torch.Tensor,
    base: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ranks: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Turn the answers [Q, N, V] to the probes of G whole groups into G rows of every directed matrix."""
    counts = torch.bincount(ranks, minlength=len(rows))
    slot = torch.arange(len(ranks), device=ranks.device) - (counts.cumsum(0) - counts)[ranks]
    width = int(counts.max())
    length, vocabulary = answers.shape[1:]
    logits = answers.new_zeros(width, len(rows), length, vocabulary)
    logits[slot, ranks] = answers
    share = weights.new_zeros(width, len(rows))
    share[slot, ranks] = weights[rows[ranks], positions[ranks], values]
    share = share.unsqueeze(-1).expand(width, len(rows), length)
    conditional = ops.expected_entropy(logits, share)
    for form, matrix in directed.items():
        if form == "joint":
            matrix[rows, positions] = (ops.mixture_entropy(logits, share) - conditional).clamp(min=0)
        elif form == "entropy":
            matrix[rows, positions] = ops.entropy(base[rows]) - conditional
        else:
            matrix[rows, positions] = ops.expected_kl(logits, share, base[rows])
