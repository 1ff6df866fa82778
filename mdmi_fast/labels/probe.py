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
        """The symmetric labels of one form.

        Raises:
            ValueError: if the run did not read this form.
        """
        if form not in self.directed:
            raise ValueError(f"Probe: this run read only {', '.join(self.directed)}, got form={form!r}")
        one_way = self.directed[form]
        other_way = one_way.transpose(-1, -2)
        pairs = masked_pairs(self.mask)
        gap = (one_way - other_way).abs().masked_fill(one_way == other_way, 0.0)  # inf - inf is no gap
        gap = gap.sum(dim=(-1, -2)) / pairs.sum(dim=(-1, -2)).clamp(min=1)
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
    attention_mask: torch.Tensor | None = None,
    batch_size: int = 512,
    progress: Callable[[int], None] | None = None,
) -> MILabels:
    """Label every masked pair of every sequence with its mutual information, symmetrised by the mean.

    I_ij = (I(X_i -> x_j) + I(X_j -> x_i)) / 2, each direction as the module's text says for the form.

    Args:
        model: the frozen model.
        tokens: [B, N] or [N] int64.
        mask: bool of the same shape, True = masked; those positions are replaced by the mask token. None takes the
            positions that already hold it.
        form: which reading to return, see the module's text.
        epsilon: nats that an entry may be wrong by, see `probe_mi`; only for "joint", the form whose error is proven.
        attention_mask: bool of the same shape, False at padding, which is never labelled; None: no padding.
        batch_size: sequences in one forward pass; how many logits are held at once follows from it.
        progress: called with the number of passes just finished.

    Returns:
        MILabels, without the batch dimension when tokens had none.

    Raises:
        ValueError: for an unknown form, shapes that do not fit, epsilon > 0 with another form than "joint", or a model
            that answers NaN.

    Numerics:
        Entropies and sums over values in float32 (float64 where the logits are). A label of the "kl" form is inf where
        a probe makes possible what was not.

    Example:
        >>> import torch
        >>> from mdmi_fast import label_mi
        >>> from mdmi_fast.models.exact import JointTable
        >>> twins = JointTable(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))  # two fair bits that agree: ln 2
        >>> label_mi(twins, torch.tensor([2, 2])).mi
        tensor([[0.0000, 0.6931],
                [0.6931, 0.0000]])
    """
    if form not in FORMS:
        raise ValueError(f"label_mi: form must be one of {', '.join(FORMS)}, got {form!r}")
    if epsilon > 0 and form != "joint":
        raise ValueError(f"label_mi: epsilon > 0 needs form='joint', whose error is proven, got form={form!r}")
    single = tokens.ndim == 1
    if single:
        tokens = tokens.unsqueeze(0)
        mask, attention_mask = (None if m is None else m.unsqueeze(0) for m in (mask, attention_mask))
    probe = probe_mi(
        model,
        tokens,
        mask,
        epsilon=epsilon,
        attention_mask=attention_mask,
        batch_size=batch_size,
        progress=progress,
    )
    labels = probe.labels(form)
    return MILabels(*(field.squeeze(0) for field in labels)) if single else labels


@torch.no_grad()
def probe_mi(
    model: MaskedModel,
    tokens: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    epsilon: float = 0.0,
    attention_mask: torch.Tensor | None = None,
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
        attention_mask: [B, N] bool, False at padding, which is never probed; None: no padding.
        batch_size: sequences in one forward pass.
        progress: called with the number of passes just finished.

    Returns:
        Probe, with every form the passes can tell: all three, or "joint" alone where epsilon > 0.

    Raises:
        ValueError: for shapes that do not fit, a negative or NaN epsilon, or a model that answers NaN.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"probe_mi: tokens must be [B, N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    for name, given in (("mask", mask), ("attention_mask", attention_mask)):
        if given is not None and (given.shape != tokens.shape or given.dtype != torch.bool):
            raise ValueError(
                f"probe_mi: {name} must be {tuple(tokens.shape)} bool like tokens, "
                f"got shape {tuple(given.shape)} {given.dtype}"
            )
    if not epsilon >= 0:
        raise ValueError(f"probe_mi: epsilon must be >= 0 nats, got {epsilon}")
    if batch_size < 1:
        raise ValueError(f"probe_mi: batch_size must be at least 1, got {batch_size}")

    if mask is None:
        mask = tokens == model.mask_token_id
    if attention_mask is not None:
        mask = mask & attention_mask
    tokens = tokens.masked_fill(mask, model.mask_token_id)
    forms: tuple[Form, ...] = FORMS if epsilon == 0 else ("joint",)
    directed = {form: torch.zeros(*tokens.shape, tokens.shape[1], device=tokens.device) for form in forms}
    if not len(tokens):
        nothing = torch.zeros(tokens.shape, device=tokens.device)
        return Probe(directed, mask, nothing, nothing, tokens.new_zeros(0))
    base = _logits(model, tokens, attention_mask, batch_size)
    entropy = ops.entropy(base).masked_fill(~mask, 0.0)
    _refuse_nan(entropy)

    keep, weights, bound = _plan(base, mask, entropy, epsilon)
    passes = 1 + keep.sum(dim=(1, 2))
    if progress is not None:
        progress(len(tokens))
    for rows, positions, ranks, values in _batches(keep, batch_size):
        probes = tokens[rows[ranks]]
        probes.scatter_(1, positions[ranks].unsqueeze(-1), values.unsqueeze(-1))
        answers = _logits(model, probes, None if attention_mask is None else attention_mask[rows[ranks]], batch_size)
        if progress is not None:
            progress(len(probes))
        _reduce(directed, answers, weights, base, rows, positions, ranks, values)
    pairs = masked_pairs(mask)
    for matrix in directed.values():
        _refuse_nan(matrix.masked_fill_(~pairs, 0.0))
    return Probe(directed, mask, entropy, bound, passes)


def _logits(
    model: MaskedModel, tokens: torch.Tensor, attention_mask: torch.Tensor | None, batch_size: int
) -> torch.Tensor:
    """Logits [Q, N, V] of Q sequences, batch_size in one forward pass."""
    if attention_mask is None:
        return torch.cat([model(part).logits for part in tokens.split(batch_size)])
    parts = zip(tokens.split(batch_size), attention_mask.split(batch_size), strict=True)
    return torch.cat([model(part, visible).logits for part, visible in parts])


def _refuse_nan(values: torch.Tensor) -> None:
    """Raise ValueError that names the first sequence and position [B, N, ...] whose value is NaN."""
    if bool(values.isnan().any()):
        row, position = values.isnan().nonzero()[0, :2].tolist()
        raise ValueError(
            f"probe_mi: the model's logits give no distribution (NaN, +inf, or -inf everywhere) at or given "
            f"sequence {row}, position {position}"
        )


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
    # With one possible value nothing can be learned in "joint" form; the others still read how the model drifts.
    probed = mask & (entropy > epsilon) if epsilon > 0 else mask
    keep = ~drop & probed.unsqueeze(-1)
    weights = probability * keep
    weights = (weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)).float()
    bound = torch.where(probed, (error * dropped).amax(dim=-1).float(), entropy)
    return keep, weights, bound.masked_fill(~mask, 0.0)


def _binary_entropy(p: torch.Tensor) -> torch.Tensor:
    entropy: torch.Tensor = torch.special.entr(p) + torch.special.entr((1 - p).clamp(min=0))
    return entropy


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
