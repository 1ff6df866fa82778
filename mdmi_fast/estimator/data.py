"""Labelled states on their way to an estimator: the one place that knows how labels are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mdmi_fast import ops
from mdmi_fast.estimator.seen import fingerprints
from mdmi_fast.labels import Form, LabelSet, masked_pairs, stream_labels
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, visible_positions


class Example(NamedTuple):
    """One labelled state.

    Attributes:
        tokens: [N] int64, the mask token where masked.
        positions: [M] int64, the masked positions.
        pairs: [Q, 2] int64, i < j, the masked pairs that have a label.
        mi: [Q] float32, nats.
        hidden: [M, D], the hidden states of the masked positions where they were kept.
        stats: of the marginals of the masked positions, every field [M], where they were kept.
    """

    tokens: Tensor
    positions: Tensor
    pairs: Tensor
    mi: Tensor
    hidden: Tensor | None
    stats: ops.TokenStats | None = None

    def is_answered(self, needs_stats: bool) -> bool:
        """Whether an estimator can be asked about this state without asking the model first."""
        return self.hidden is not None and (self.stats is not None or not needs_stats)


Labels = LabelSet | Sequence[Example]
"""What an estimator is trained and judged on: states of one length, or of any."""


class Batch(NamedTuple):
    """Some labelled states, with all of their pairs.

    Attributes:
        hidden: [B, N, D], as the model gives it.
        stats: of the model's logits, every field [B, N]; None where the model was not asked.
        mask: [B, N] bool, True = masked.
        mi: [B, N, N] float32, nats, 0 where there is no label.
        pairs: [B, N, N] bool, True where there is one, in both directions.
        masked_share: [B] float32, of the positions that are no padding.
    """

    hidden: Tensor
    stats: ops.TokenStats | None
    mask: Tensor
    mi: Tensor
    pairs: Tensor
    masked_share: Tensor


def read_examples(folder: str | Path, form: Form, *, model: MaskedModel | None = None) -> list[Example]:
    """Read a folder of labels, of states of any lengths.

    Args:
        folder: as `write_labels` filled it.
        form: which reading.
        model: that the labels must be of, None: whichever they are of.

    Raises:
        FileNotFoundError: if it holds no labels.
        ValueError: as `stream_labels`, or if the form was not kept.
    """
    found = []
    for state in stream_labels(folder, model=model):
        if form not in state.mi:
            raise ValueError(f"{folder}: holds the forms {', '.join(state.mi)}, got form={form!r}")
        found.append(Example(state.tokens, state.positions, state.pairs, state.mi[form], state.hidden))
    return found


def examples(labels: Labels) -> Sequence[Example]:
    """Labels of either kind, state by state."""
    if not isinstance(labels, LabelSet):
        return labels
    upper = masked_pairs(labels.mask).triu()
    rows = zip(labels.tokens, labels.mask, upper, labels.mi, strict=True)
    return [
        Example(tokens, mask.nonzero().squeeze(-1), pairs.nonzero(), mi[pairs], None)
        for tokens, mask, pairs, mi in rows
    ]


@torch.no_grad()
def read_batch(
    states: Sequence[Example], model: MaskedModel, device: torch.device, *, needs_stats: bool = True
) -> Batch:
    """Put some states into one batch; run the model on them unless all bring its answers with them.

    Args:
        states: of any lengths.
        model: whose labels they are.
        device: of the model, and of everything that comes back.
        needs_stats: whether the statistics of the marginals will be read.
    """
    lengths = torch.tensor([len(state.tokens) for state in states], device="cpu")
    size = len(states), int(lengths.max())
    mask = torch.zeros(size, dtype=torch.bool, device="cpu")
    mi = torch.zeros(*size, size[1], dtype=torch.float32, device="cpu")
    pairs = torch.zeros(*size, size[1], dtype=torch.bool, device="cpu")
    for row, state in enumerate(states):
        first, second = state.pairs.unbind(1)
        mask[row, state.positions] = True
        mi[row, first, second] = mi[row, second, first] = state.mi
        pairs[row, first, second] = pairs[row, second, first] = True
    if all(state.is_answered(needs_stats) for state in states):
        hidden, stats = _kept_answers(states, size)
        hidden, stats = hidden.to(device), stats and ops.TokenStats(*(field.to(device) for field in stats))
    else:
        tokens = pad_sequence([state.tokens for state in states], batch_first=True).to(device)
        visible = torch.arange(size[1], device="cpu") < lengths.unsqueeze(1)
        # What a model knows for padding in a state itself is hidden too, whatever lengths its batch has.
        own = visible_positions("read_batch", model, tokens, None)
        shown = visible.to(device) if own is None else own & visible.to(device)
        output = call_model("read_batch", model, tokens, None if own is None and bool(visible.all()) else shown)
        hidden, stats = output.hidden, ops.token_stats(output.logits)
    return Batch(hidden, stats, *(field.to(device) for field in (mask, mi, pairs, mask.sum(1).float() / lengths)))


def _kept_answers(states: Sequence[Example], size: tuple[int, int]) -> tuple[Tensor, ops.TokenStats | None]:
    """Hidden states [B, N, D] and statistics [B, N], 0 where not masked; no statistics where one state has none."""

    def spread(rows: list[Tensor]) -> Tensor:
        whole = rows[0].new_zeros(*size, *rows[0].shape[1:])
        for row, (state, own) in enumerate(zip(states, rows, strict=True)):
            whole[row, state.positions] = own
        return whole

    hidden = spread([state.hidden for state in states if state.hidden is not None])
    kept = [state.stats for state in states if state.stats is not None]
    if len(kept) < len(states):
        return hidden, None
    return hidden, ops.TokenStats(*(spread(list(fields)) for fields in zip(*kept, strict=True)))


def ask_once(
    states: Sequence[Example], model: MaskedModel, device: torch.device, *, needs_stats: bool, memory: int = 1 << 30
) -> list[Example]:
    """The states with the model's answers at their masked positions, so that no epoch has to ask it again.

    Args:
        states: of any lengths.
        model: whose labels they are.
        device: of the model.
        needs_stats: whether the statistics of the marginals will be read.
        memory: bytes that may be kept; states beyond them come back as they are.
    """
    found = []
    for state in states:
        if memory > 0 and not state.is_answered(needs_stats):
            batch = read_batch([state], model, device)
            assert batch.stats is not None
            hidden = batch.hidden[0].cpu()[state.positions]
            stats = ops.TokenStats(*(field[0].cpu()[state.positions] for field in batch.stats))
            memory -= sum(field.nbytes for field in (hidden, *stats))
            state = state._replace(hidden=hidden, stats=stats)
        found.append(state)
    return found


def split_states(
    states: Sequence[Example],
    held_out: float,
    seed: int,
    *,
    trained: Tensor | None = None,
    pad: int | None = None,
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Part the states: (to train on, held out). Pairs of one state stay together, and so do equal states.

    Args:
        states: of any lengths.
        held_out: share of them that is only judged on; as many as there are, where there are fewer.
        seed: of the choice.
        trained: fingerprints of states that were trained on before, and are not held out.
        pad: the padding token, see `fingerprints`.

    Raises:
        ValueError: if all states were trained on before, there is no pair left to train on, or fewer than two are held
            out.
    """
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    count = max(1, round(held_out * len(order)))
    marks = fingerprints(states, pad).tolist()
    known, alike = set() if trained is None else set(trained.tolist()), Counter(marks)
    chosen: set[int] = set()
    missing = count
    for mark in (marks[number] for number in order):
        if missing > 0 and mark not in known and mark not in chosen:
            chosen.add(mark)
            missing -= alike[mark]
    if states and not chosen:
        raise ValueError(
            "train_estimator: labels must hold states that the estimator was not trained on before, some of which are "
            f"held out, got {len(states)} that it was trained on"
        )
    train = [states[number] for number in order if marks[number] not in chosen]
    judge = [states[number] for number in order if marks[number] in chosen]
    if not train:
        raise ValueError(
            f"train_estimator: holding out {max(count, len(judge))} states leaves nothing of {len(order)} to train on "
            f"({len(alike)} of them are different)"
        )
    pairs, judged = (sum(len(state.mi) for state in part) for part in (train, judge))
    if pairs < 1 or judged < 2:
        raise ValueError(
            "train_estimator: labels must hold a masked pair to train on and two in the states held out, got "
            f"{pairs} in {len(train)} states and {judged} in {len(judge)}"
        )
    return train, judge


def device_of(estimator: object) -> torch.device:
    """Where an estimator lives; one without weights counts as on the CPU."""
    weights = estimator.parameters() if isinstance(estimator, nn.Module) else iter(())
    return next((weight.device for weight in weights), torch.device("cpu"))
