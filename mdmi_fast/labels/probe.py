"""Ground-truth pairwise mutual information by probing the model itself (arXiv 2605.20187).

One pass with nothing added gives the marginals; one pass for every masked position i and value v, with v written at
i, gives q_v = p(x_j | X_i = v). With p_v = p(X_i = v), the same passes yield three readings of I(X_i; X_j | visible):

- "joint":   H(sum_v p_v q_v) - sum_v p_v H(q_v), the mutual information of the joint p(x_i) p(x_j | x_i). Never negative.
- "entropy": H(x_j) - sum_v p_v H(q_v), the published form. Negative where revealing a token makes the model less sure.
- "kl":      sum_v p_v KL(q_v || p(x_j)). Never negative.

They agree exactly when sum_v p_v q_v = p(x_j), that is when the model's conditionals are consistent; a trained
network's are not, so the readings differ, and so do the two directions of a pair. How many passes an allowed error saves
is decided, with proof, in `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.labels.forward import Forward, Precision
from mdmi_fast.labels.options import FORMS, Directions, Form, ProbeOptions
from mdmi_fast.labels.plan import Plan, make_plan
from mdmi_fast.labels.readings import Group, Reading, read, read_in_pieces, read_sample
from mdmi_fast.labels.results import MILabels, Probe, join, masked_pairs
from mdmi_fast.models import MaskedModel, MaskedOutput
from mdmi_fast.models.base import InterchangeableModel
from mdmi_fast.models.call import check_model, check_tokens, visible_positions


def label_mi(
    model: MaskedModel,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    form: Form = "joint",
    epsilon: float = 0.0,
    directions: Directions = "both",
    window: int | None = None,
    pairs: Tensor | None = None,
    samples: int | None = None,
    seed: int = 0,
    attention_mask: Tensor | None = None,
    batch_size: int = 512,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> MILabels:
    """Label every masked pair of every sequence with its mutual information, symmetrised by the mean.

    I_ij = (I(X_i -> x_j) + I(X_j -> x_i)) / 2, each direction as the module's text says for the form.

    Args:
        model: the frozen model.
        tokens: [B, N] or [N] int64.
        mask: bool of the same shape, True = masked; those positions are replaced by the mask token. None takes the
            positions that already hold it.
        form: which reading to return, see the module's text. `probe_mi`, which says more of the options, gives all of
            them from the same passes.
        epsilon: nats that an entry may be wrong by.
        directions: "both" ends of a pair are read, or "one" where that saves passes.
        window: only pairs at most so many positions apart.
        pairs: bool [B, N, N] or [N, N], symmetric: only these pairs.
        samples: draw so many values where more are needed.
        seed: of the values drawn.
        attention_mask: bool of the shape of tokens, False at padding, which is never probed; None: as for `decode`.
        batch_size: sequences in one forward pass.
        precision: of the forward pass, "fp32" or "bf16".
        progress: called with the number of passes just finished.

    Returns:
        MILabels, without the batch dimension when tokens had none.

    Raises:
        TypeError: for arguments or an answer of the model of another kind.
        ValueError: for an unknown form, arguments that do not fit, or a model whose answer does not fit or is NaN.

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
    check.dense("label_mi", "tokens", tokens)
    single = tokens.ndim == 1
    if single:
        tokens = tokens.unsqueeze(0)
        # What is no tensor is named by `probe_mi`.
        mask, attention_mask, pairs = (
            m.unsqueeze(0) if isinstance(m, Tensor) else m for m in (mask, attention_mask, pairs)
        )
    probe = probe_mi(
        model,
        tokens,
        mask,
        forms=(form,),
        epsilon=epsilon,
        directions=directions,
        window=window,
        pairs=pairs,
        samples=samples,
        seed=seed,
        attention_mask=attention_mask,
        batch_size=batch_size,
        precision=precision,
        progress=progress,
    )
    labels = probe.labels(form)
    if not single:
        return labels
    return MILabels(*(field.squeeze(0) for field in labels), standard_error=labels.standard_error.squeeze(0))


def probe_mi(
    model: MaskedModel | Forward,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    forms: Sequence[Form] = FORMS,
    epsilon: float = 0.0,
    directions: Directions = "both",
    window: int | None = None,
    pairs: Tensor | None = None,
    samples: int | None = None,
    seed: int = 0,
    attention_mask: Tensor | None = None,
    batch_size: int = 512,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Probe:
    """Probe every masked position with every value that matters, at 1 + M V passes for M masked positions at most.

    Args:
        model: the frozen model; or a `Forward`, whose batches and precision then count.
        tokens: [B, N] int64.
        mask: [B, N] bool, or None for the positions that hold the mask token.
        forms: the readings wanted; one run tells all of them.
        epsilon: nats that an entry of each of these forms may be wrong by.
        directions: "both": labels are the mean over the two ends. "one": one end of a pair is enough where that saves
            passes, so that a label is the reading in the direction taken.
        window: only pairs at most so many positions apart.
        pairs: [B, N, N] bool, symmetric: only these pairs. None: all.
        samples: where more values than this are needed, draw so many from p(X_i) instead (arXiv 2605.20187). What
            they give has a standard error of order 1 / sqrt(samples) and nothing proven; the "joint" form, computed
            as if those were all values, is also low by an amount of order 1 / samples.
        seed: of the values drawn.
        attention_mask: [B, N] bool, False at padding, which is never probed; None: as for `decode`.
        batch_size: sequences in one forward pass; how many logits are held at once follows from it. It is halved when
            memory runs out.
        precision: of the forward pass, "fp32" or "bf16".
        progress: called with the number of passes just finished.

    Returns:
        Probe.

    Raises:
        TypeError: for arguments or an answer of the model of another kind.
        ValueError: for arguments that do not fit, or a model whose answer does not fit or is NaN.
    """
    _check(tokens, mask, attention_mask, pairs)
    options = ProbeOptions(forms, epsilon, directions, window, samples, seed, precision)
    check.whole("probe_mi", "batch_size", batch_size, 1)
    if progress is not None and not callable(progress):
        raise TypeError(f"probe_mi: progress must be a function, got {check.describe(progress)}")
    forward = model if isinstance(model, Forward) else Forward(model, batch_size * tokens.shape[1], precision)
    check_model("probe_mi", forward.model)
    mask_token = forward.model.mask_token_id
    attention_mask = visible_positions("probe_mi", forward.model, tokens, attention_mask)
    if mask is None:
        mask = tokens == mask_token
    if attention_mask is not None:
        mask = mask & attention_mask
    tokens = tokens.masked_fill(mask, mask_token)
    wanted = masked_pairs(mask)
    options = options.fitted(tokens.shape[1], forward.model.vocab_size)
    if options.window is not None:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        wanted &= (place.unsqueeze(-1) - place).abs() <= options.window
    if pairs is not None:
        wanted &= pairs
    parts: list[Probe] = []
    done = 0
    while done < len(tokens) or not parts:
        rows = slice(done, done + forward.batch_size(tokens.shape[1]))
        state = _State(tokens[rows], mask[rows], wanted[rows], None if attention_mask is None else attention_mask[rows])
        with torch.no_grad():
            try:
                base = forward(state.tokens, state.attention_mask)
                entropy, plan = _plan(forward, state, base.logits, options, first=done)
            except torch.OutOfMemoryError:
                forward.shrink(len(state.tokens), tokens.shape[1])
                continue
            parts.append(_probe(forward, state, base, entropy, plan, options, progress, first=done))
        done += max(1, len(state.tokens))
    return join(parts)


class _State(NamedTuple):
    """Some sequences: tokens, mask, attention_mask [B, N], pairs wanted [B, N, N]."""

    tokens: Tensor
    mask: Tensor
    pairs: Tensor
    attention_mask: Tensor | None


def _plan(forward: Forward, state: _State, base: Tensor, options: ProbeOptions, *, first: int) -> tuple[Tensor, Plan]:
    """Entropies [B, N] of the base pass, and what to probe; `first` is the number of the first sequence, for messages."""
    entropy = ops.entropy(base).masked_fill(~state.mask, 0.0)
    _refuse_nan(entropy, first)
    model = forward.model
    alike = [*model.interchangeable_tokens] if isinstance(model, InterchangeableModel) else []
    plan = make_plan(
        base,
        state.tokens,
        state.mask,
        state.pairs,
        visible=state.attention_mask,
        options=options,
        interchangeable=alike,
    )
    return entropy, plan


def _probe(
    forward: Forward,
    state: _State,
    base: MaskedOutput,
    entropy: Tensor,
    plan: Plan,
    options: ProbeOptions,
    progress: Callable[[int], None] | None,
    *,
    first: int,
) -> Probe:
    """Run a plan."""
    tokens = state.tokens
    if progress is not None:
        progress(len(tokens))
    shape = state.pairs.shape
    directed = {form: torch.zeros(shape, dtype=torch.float32, device=tokens.device) for form in options.forms}
    spread = {form: torch.zeros(shape, dtype=torch.float32, device=tokens.device) for form in options.forms}
    groups = _groups(plan)
    done = 0
    while done < len(groups):
        most = forward.batch_size(tokens.shape[1])
        batch = _fill(groups[done:], most)
        try:
            found = _run(forward, state, base.logits, entropy, batch, options)
        except torch.OutOfMemoryError:
            forward.shrink(min(most, sum(len(group.probes) for group in batch)), tokens.shape[1])
            continue
        for group, columns, values, errors in found:
            for form in options.forms:
                directed[form][group.row, group.position, columns] = values[form]
                if errors is not None:
                    spread[form][group.row, group.position, columns] = errors[form]
        if progress is not None:
            progress(sum(len(group.probes) for group in batch))
        done += len(batch)
    for form in options.forms:
        for matrix in (directed[form], spread[form]):
            _refuse_nan(matrix.masked_fill_(~state.pairs, 0.0), first)
    passes = 1 + plan.probes.sum(dim=(1, 2))
    error = {form: plan.error[form] for form in options.forms}
    return Probe(directed, error, spread, state.mask, state.pairs, plan.known, entropy, passes, base.hidden)


def _groups(plan: Plan) -> list[Group]:
    """The plan position by position."""
    counts = plan.values.sum(dim=-1)
    probed = counts > 0
    rows, positions, values = plan.values.nonzero().unbind(dim=1)
    # The rank of a value's probe among the probes of its position.
    place = (plan.probes.long().cumsum(dim=-1) - 1)[rows, positions, plan.twin[rows, values]]
    sizes = counts[probed].tolist()
    columns = (
        *(part.tolist() for part in (*probed.nonzero().unbind(dim=1), plan.kept[probed], plan.draws[probed])),
        values.split(sizes),
        plan.weights[rows, positions, values].split(sizes),
        plan.probes.nonzero()[:, 2].split(plan.probes.sum(dim=-1)[probed].tolist()),
        place.split(sizes),
    )
    return [Group(*fields) for fields in zip(*columns, strict=True)]


def _fill(groups: Sequence[Group], most: int) -> Sequence[Group]:
    """As many of the first groups as make at most `most` probes and values; one at least."""
    total = count = 0
    for group in groups:
        total += len(group.values)
        if count and total > most:
            break
        count += 1
    return groups[:count]


def _run(
    forward: Forward, state: _State, base: Tensor, entropy: Tensor, batch: Sequence[Group], options: ProbeOptions
) -> list[Reading]:
    """Run the probes of some positions."""
    groups = [(group, _columns(group.position, state.tokens.shape[1], options.window)) for group in batch]
    if len(batch[0].values) > forward.batch_size(state.tokens.shape[1]):
        ((group, columns),) = groups
        here = base[group.row, columns], entropy[group.row, columns]
        if group.draws:
            logits = torch.cat([logits for _, logits in _pieces(forward, state, group, columns)])
            return [read_sample(group, columns, logits, *here)]
        return [read_in_pieces(group, columns, _pieces(forward, state, group, columns), *here)]
    rows = torch.tensor([group.row for group, _ in groups for _ in group.probes], device=base.device)
    positions = torch.tensor([group.position for group, _ in groups for _ in group.probes], device=base.device)
    logits = _answers(forward, state, rows, positions, torch.cat([group.probes for group, _ in groups]))
    found = []
    for (group, columns), part in zip(groups, logits.split([len(group.probes) for group, _ in groups]), strict=True):
        reading = read_sample if group.draws else read
        found.append(reading(group, columns, part[:, columns], base[group.row, columns], entropy[group.row, columns]))
    return found


def _columns(position: int, length: int, window: int | None) -> slice:
    return slice(0, length) if window is None else slice(max(0, position - window), position + window + 1)


def _answers(forward: Forward, state: _State, rows: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Logits [Q, N, V] of Q probes."""
    probes = state.tokens[rows].scatter_(1, positions.unsqueeze(-1), values.unsqueeze(-1))
    return forward(probes, None if state.attention_mask is None else state.attention_mask[rows]).logits


def _pieces(forward: Forward, state: _State, group: Group, columns: slice) -> Iterator[tuple[int, Tensor]]:
    """The answers [R', n, V] to a position with too many probes for one batch, and the number of the first one."""
    size = forward.batch_size(state.tokens.shape[1])
    for first in range(0, len(group.probes), size):
        values = group.probes[first : first + size]
        rows, positions = torch.full_like(values, group.row), torch.full_like(values, group.position)
        yield first, _answers(forward, state, rows, positions, values)[:, columns]


def _refuse_nan(values: Tensor, first: int) -> None:
    """Raise ValueError that names the first sequence and position [B, N, ...] whose value is NaN."""
    if bool(values.isnan().any()):
        row, position = values.isnan().nonzero()[0, :2].tolist()
        raise ValueError(
            f"probe_mi: the model's logits give no distribution (NaN, +inf, or -inf everywhere) at or given "
            f"sequence {first + row}, position {position}"
        )


def _check(tokens: Tensor, mask: Tensor | None, attention_mask: Tensor | None, pairs: Tensor | None) -> None:
    check_tokens("probe_mi", tokens, attention_mask)
    for name, given in (("mask", mask), ("pairs", pairs)):
        if given is not None:
            check.dense("probe_mi", name, given)
    check.same_device("probe_mi", tokens=tokens, mask=mask, pairs=pairs)
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(f"probe_mi: mask must be {tuple(tokens.shape)} bool like tokens, got {check.describe(mask)}")
    square = (*tokens.shape, tokens.shape[1])
    if pairs is not None and (pairs.shape != square or pairs.dtype != torch.bool or not pairs.equal(pairs.mT)):
        raise ValueError(f"probe_mi: pairs must be {square} bool and symmetric, got {tuple(pairs.shape)} {pairs.dtype}")
