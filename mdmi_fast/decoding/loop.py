"""The decoding loop: run the model, let a policy choose positions, write tokens, until nothing is masked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies import Memory, Policy, Step
from mdmi_fast.decoding.policies.order import take_lowest
from mdmi_fast.decoding.policies.rule import StatsReader, checked_policy, checked_selection
from mdmi_fast.decoding.randomness import draw_seeds, places, uniform
from mdmi_fast.decoding.sampling import log_probability, sample
from mdmi_fast.decoding.trace import PassRecord, blocking
from mdmi_fast.decoding.vocabulary import Vocabulary, with_stops
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import (
    call_model,
    call_token_stats,
    check_flag,
    check_model,
    check_tokens,
    token_list,
    visible_positions,
)
from mdmi_fast.ops import TokenStats


class DecodeResult(NamedTuple):
    """What decoding gave.

    Attributes:
        tokens: [B, N] int64 without a masked position.
        passes: [B] int64, forward passes each sequence took part in, those that verify included.
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
    top_k: int | None = None,
    top_p: float = 1.0,
    gumbel: bool = False,
    generator: torch.Generator | None = None,
    seeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    suppressed: Sequence[int] = (),
    allowed: Tensor | None = None,
    stop_tokens: Sequence[int] = (),
    block_size: int | None = None,
    verify: bool = False,
    remask_below: float = 0.0,
    revisions: int = 1,
    trace: bool = False,
    progress: Callable[[int], object] | None = None,
) -> DecodeResult:
    """Fill every masked position of a batch, wherever it stands: prompts, infilling and whole sequences alike.

    A sequence's result depends on itself and its seed, not on the batch: sequences leave the batch when they are done.
    That holds as far as it holds for the model, whose logits must not depend on the batch or on padding either.

    Args:
        model: the masked model. A field `attention` [B, N, N] of its output, if there is one, goes to the policy. If it
            has an attribute `never`, the logits of those tokens are -inf already. What it returns is not written to. In
            training mode it answers as in evaluation mode. Its method `token_stats`, if it has one, is called instead where statistics are all that is read: at temperature
            0, with every token allowed and none suppressed, by a policy whose `reads_stats_only` is True.
        tokens: [B, N] int64, `model.mask_token_id` where masked. Sequences of unequal lengths are padded on either side.
        policy: which positions to unmask in a pass.
        temperature: 0 writes the most probable token; above, tokens are drawn from softmax(logits / temperature).
            Policies always see the model's own distributions, before temperature, top_k and top_p, of the tokens that
            are not suppressed.
        top_k: sample only from the k most probable tokens; None: from all.
        top_p: draw from the fewest tokens that hold this much probability only, in (0, 1].
        gumbel: draw by the Gumbel-max rule, see `sample`.
        generator: where the sequences' seeds come from, one after the other; None: torch's own generator.
        seeds: [B] int64, one a sequence, instead of a generator.
        attention_mask: [B, N] bool, False at padding; padding is not decoded. None: a model that knows its padding (its
            method `visible`) says once, of the tokens as given, where it is; other models are taken to have none.
        suppressed: tokens that are never written; the mask token never is.
        allowed: bool, broadcast to [B, N, V]: what may be written at a position. One token alone is required there. It
            takes nothing back of what the model never writes.
        stop_tokens: tokens that end a sequence. They may be written, also those in the model's `never`, which its method
            `permitting` answers for then. Once one of them was decoded, every later position that was masked at
            the start and that `allowed` lets hold it gets that token too, whether it was decoded already or not, and is
            final; the others are decoded as usual.
        block_size: decode blocks of so many positions one after the other ("semi-autoregressive"), counted from a sequence's first
            masked position; a later block opens when nothing of the earlier ones is masked. None: all at once.
        verify: after a pass that unmasks several positions of a sequence, one more pass masks the less confident
            half of them again and looks at it in the light of the others. At temperature 0 a token stays if it is
            still the most probable one; above, with probability min(1, p_now / p_before), both of the tempered model.
        remask_below: when a sequence is full, mask what was written with less confidence than this again, all of it
            together.
        revisions: how often a position may be masked again, by `verify` and `remask_below` together.
        trace: keep a record of every pass. The policy is then asked for all mutual information.
        progress: called with the number of sequences that a pass finished, where it finished some.

    Returns:
        DecodeResult. A sequence without a masked position comes back as it is, after 0 passes.

    Raises:
        TypeError: for arguments of another kind, or a model whose answer is no `MaskedOutput`.
        ValueError: for shapes that do not fit, numbers out of range, arguments that leave nothing to write at a position,
            an answer of the model that does not fit the tokens or gives no distribution at a masked position, or a
            policy that takes nothing.

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
    check_model("decode", model)
    check_tokens("decode", tokens, attention_mask)
    temperature, top_p, remask_below = _numbers(temperature, top_p, remask_below)
    for name, count, least in (("top_k", top_k, 1), ("block_size", block_size, 1), ("revisions", revisions, 0)):
        if count is not None:
            check.whole("decode", name, count, least, math.inf)  # more than there is means all of it
    for name, flag in (("gumbel", gumbel), ("verify", verify), ("trace", trace)):
        check_flag("decode", name, flag)
    stop_tokens = token_list("decode", "stop_tokens", stop_tokens, model.vocab_size)
    suppressed = token_list("decode", "suppressed", suppressed, model.vocab_size)
    checked_policy("decode", policy)
    if progress is not None and not callable(progress):
        raise TypeError(f"decode: progress must be a function, got {check.describe(progress)}")
    for name, given, kind in (("generator", generator, torch.Generator), ("seeds", seeds, Tensor)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"decode: {name} must be a torch.{kind.__name__}, got {check.describe(given)}")
    if seeds is None:
        seeds = draw_seeds(len(tokens), generator, tokens.device)
    elif generator is not None or seeds.shape != tokens.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(f"decode: give either a generator or seeds [{len(tokens)}] int64")
    check.same_device("decode", tokens=tokens, seeds=seeds)
    model = with_stops(model, stop_tokens, suppressed)
    attention_mask = visible_positions("decode", model, tokens, attention_mask)
    # More than there is of anything is all of it, and int32 holds it.
    block_size = None if block_size is None else min(block_size, max(1, tokens.shape[1]))
    revisions = min(revisions, torch.iinfo(torch.int32).max)
    asked = tokens == model.mask_token_id
    if attention_mask is not None:
        asked &= attention_mask
    rows = _Rows(
        sequence=torch.arange(len(tokens), device=tokens.device),
        tokens=tokens.clone(),
        asked=asked,
        masked=asked,
        place=places(tokens, attention_mask).expand_as(tokens),
        seeds=seeds,
        visible=attention_mask,
        passes=torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device),
        confidence=torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device),
        revised=torch.zeros(tokens.shape, dtype=torch.int32, device=tokens.device),
    )
    vocabulary = Vocabulary.of(model, asked, suppressed, allowed)
    stats_will_do = (
        temperature == 0 and vocabulary.is_free and isinstance(policy, StatsReader) and policy.reads_stats_only
    )
    eyes = _Eyes(model, vocabulary, stats_will_do and hasattr(model, "token_stats"))
    draw = _Draw(temperature, top_k, top_p, gumbel)
    as_they_are = temperature == 1 and top_k is None and top_p == 1 and allowed is None and not suppressed
    stops = torch.tensor(stop_tokens, dtype=torch.int64, device=tokens.device)

    done, passes = tokens.clone(), torch.zeros_like(rows.passes)
    revises = verify or remask_below > 0
    records: list[PassRecord] | None = [] if trace else None
    memory = Memory()
    rows = rows.of(rows.masked.any(dim=-1))
    index = 0
    while len(rows.sequence):
        mask = rows.masked if block_size is None else _first_block(rows, block_size)
        logits, stats, hidden, attention = eyes.look(rows, rows.tokens, mask)
        notes: dict[str, Tensor] | None = None if records is None else {}
        step = Step(
            index,
            model=model,
            tokens=rows.tokens,
            logits=logits,
            stats=stats,
            sampled=as_they_are,
            attention=attention,
            seeds=rows.seeds,
            sequences=rows.sequence,
            count=len(tokens),
            attention_mask=rows.visible,
            memory=memory,
            notes=notes,
        )
        selected, spent = policy.select(stats, hidden, mask, step)
        selected = checked_selection(policy, selected, mask, step)
        written = draw(eyes.vocabulary, logits, stats, selected, rows, index)
        left = rows.masked & ~selected
        rows = replace(rows, passes=rows.passes + 1)

        remasked = final = ended = torch.zeros_like(mask)
        if verify:
            tested = selected & (rows.revised < revisions)
            doubted = take_lowest(stats.confidence, tested, tested.sum(dim=-1) // 2)
            rows = replace(rows, passes=rows.passes + doubted.any(dim=-1))
            remasked = _lost_their_place(eyes, draw, rows, written, doubted, logits, index)
        if len(stops):
            decoded = rows.asked & ~left & ~remasked
            final, filled = _up_to_the_stop(written, decoded, rows, stops, eyes.vocabulary)
            ended = (left | (filled != written)) & final
            written, left, remasked = filled, left & ~final, remasked & ~final
        if revises:
            left = left | remasked
            confidence = torch.where(selected, stats.confidence, rows.confidence)
            unsure = rows.asked & ~final & (confidence < remask_below) & (rows.revised < revisions)
            unsure &= ~left.any(dim=-1, keepdim=True)
            remasked, left = remasked | unsure, left | unsure
            written = written.masked_fill(remasked, model.mask_token_id)
            rows = replace(rows, confidence=confidence, revised=rows.revised + remasked)

        if records is not None:
            entropy = stats.entropy.masked_fill(~mask, 0.0)
            blocker = blocking((notes or {}).get("mi"), selected, mask & ~selected)
            records.append(
                PassRecord(index, rows.sequence, selected, written, entropy, spent, blocker, remasked, ended)
            )
        rows = replace(rows, tokens=written, masked=left)
        remaining = left.any(dim=-1)
        if not bool(remaining.all()):
            finished = rows.of(~remaining)
            done[finished.sequence], passes[finished.sequence] = finished.tokens, finished.passes
            if progress is not None:
                progress(len(finished.sequence))
            rows = rows.of(remaining)
            memory.keep(remaining)
        index += 1
    return DecodeResult(done, passes, records)


@dataclass(frozen=True)
class _Rows:
    """The sequences still being decoded, every field with one row for each.

    Attributes:
        sequence: [R] int64, their numbers in the batch.
        tokens: [R, N] int64.
        asked: [R, N] bool, what was masked at the start.
        masked: [R, N] bool, what is masked now.
        place: [R, N] int64, the number of a position in its own sequence.
        seeds: [R] int64.
        visible: [R, N] bool, False at padding; None: no padding.
        passes: [R] int64, so far.
        confidence: [R, N] float32, of what was written, when it was written.
        revised: [R, N] int32, how often a position was masked again.
    """

    sequence: Tensor
    tokens: Tensor
    asked: Tensor
    masked: Tensor
    place: Tensor
    seeds: Tensor
    visible: Tensor | None
    passes: Tensor
    confidence: Tensor
    revised: Tensor

    def of(self, rows: Tensor) -> _Rows:
        """Some of the sequences."""
        return _Rows(*(None if field is None else field[rows] for field in vars(self).values()))  # type: ignore[arg-type]


class _Seen(NamedTuple):
    """What a pass shows.

    Attributes:
        logits: [R, N, V], as the model gave them; None if it was asked for statistics.
        stats: every field [R, N], of what may be written.
        hidden: [R, N, D].
        attention: [R, N, N], or None.
    """

    logits: Tensor | None
    stats: TokenStats
    hidden: Tensor
    attention: Tensor | None


class _Eyes(NamedTuple):
    """The model, with what may be written, and its way to statistics without logits where that is gone."""

    model: MaskedModel
    vocabulary: Vocabulary
    has_stats: bool

    def look(self, rows: _Rows, tokens: Tensor, mask: Tensor) -> _Seen:
        """Run the model on tokens [R, N].

        Raises:
            TypeError: as `call_model`.
            ValueError: likewise, or for logits that give no distribution where mask [R, N] is True.
        """
        if self.has_stats:
            output: Any = call_token_stats("decode", self.model, tokens, rows.visible)
            logits, stats = None, output.stats
            foreign = ((stats.token < 0) | (stats.token >= self.model.vocab_size)) & mask
            if bool(foreign.any()):
                raise ValueError(
                    f"decode: token of {type(self.model).__name__} must lie in 0..{self.model.vocab_size - 1}, "
                    f"got {int(stats.token[foreign][0])}"
                )
        else:
            output = call_model("decode", self.model, tokens, rows.visible)
            logits, stats = output.logits, self.vocabulary.stats(output.logits, rows.sequence)
        broken = stats.entropy.isnan() & mask
        if bool(broken.any()):
            row, position = broken.nonzero()[0].tolist()
            raise ValueError(
                f"decode: the model's logits at sequence {int(rows.sequence[row])}, position {position} give no "
                "distribution (NaN, +inf, or -inf for every token that may be written)"
            )
        return _Seen(logits, stats, output.hidden, check.attribute(output, "attention"))


class _Draw(NamedTuple):
    """How a token is chosen from logits."""

    temperature: float
    top_k: int | None
    top_p: float
    gumbel: bool

    def __call__(
        self,
        vocabulary: Vocabulary,
        logits: Tensor | None,
        stats: TokenStats,
        selected: Tensor,
        rows: _Rows,
        index: int,
    ) -> Tensor:
        """The sequences' tokens [R, N] with the selected positions written."""
        if logits is None or self.temperature == 0:
            return torch.where(selected, stats.token, rows.tokens)
        luck = uniform(rows.seeds, index, 0, rows.place)
        row, position = selected.nonzero(as_tuple=True)
        drawn = sample(
            vocabulary.restrict(logits[row, position], rows.sequence[row], position),
            luck[row, position],
            self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            gumbel=self.gumbel,
        )
        return rows.tokens.masked_scatter(selected, drawn)


def _lost_their_place(
    eyes: _Eyes, draw: _Draw, rows: _Rows, written: Tensor, doubted: Tensor, logits: Tensor | None, index: int
) -> Tensor:
    """[R, N] bool: of the doubted positions those whose token does not stand against what else was written."""
    lost = torch.zeros_like(doubted)
    row, position = doubted.nonzero(as_tuple=True)
    if not len(row):
        return lost
    token, sequence = written[row, position], rows.sequence[row]

    def log_p(found: Tensor) -> Tensor:
        return log_probability(eyes.vocabulary.restrict(found, sequence, position), token, draw.temperature)

    # Read before the model runs again, which may answer into the same memory.
    before = None if logits is None or draw.temperature == 0 else log_p(logits[row, position])
    again = doubted.any(dim=-1)
    looked_at = doubted[again]
    now = eyes.look(rows.of(again), written[again].masked_fill(looked_at, eyes.model.mask_token_id), looked_at)
    own_row = looked_at.nonzero(as_tuple=True)[0]
    if before is None or now.logits is None:
        return lost.masked_scatter(doubted, now.stats.token[own_row, position] != token)
    # Steps below 0 are the passes that verify: numbers of their own.
    luck = uniform(rows.seeds, -1 - index, 0, rows.place)[row, position]
    return lost.masked_scatter(doubted, luck >= (log_p(now.logits[own_row, position]) - before).exp())


def _up_to_the_stop(
    tokens: Tensor, decoded: Tensor, rows: _Rows, stops: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """What the first stop token among the decoded makes final, itself included: ([R, N] bool, tokens so filled)."""
    is_stop = torch.isin(tokens, stops) & decoded
    stopped = is_stop.any(dim=-1, keepdim=True)
    first = is_stop.int().argmax(dim=-1, keepdim=True)
    # Where nothing stops, the first token may be a mask token that the vocabulary does not have.
    stop = torch.where(stopped, tokens.gather(-1, first), stops[0])
    position = torch.arange(tokens.shape[1], device=tokens.device)
    final = rows.asked & (position >= first) & stopped
    if vocabulary.allowed is not None:
        final &= vocabulary.allowed[rows.sequence.unsqueeze(-1), position, stop]
    return final, torch.where(final, stop, tokens)


def _first_block(rows: _Rows, size: int) -> Tensor:
    """[R, N] bool: what is masked in the first block that has something masked."""
    never = torch.iinfo(torch.int64).max
    start = rows.place.masked_fill(~rows.asked, never).amin(dim=-1, keepdim=True)
    block = (rows.place - start) // size
    return rows.masked & (block == block.masked_fill(~rows.masked, never).amin(dim=-1, keepdim=True))


def _numbers(temperature: float, top_p: float, remask_below: float) -> tuple[float, float, float]:
    """The arguments of `decode` that may be real numbers of any kind, as float64."""
    given: dict[str, object] = {"temperature": temperature, "top_p": top_p, "remask_below": remask_below}
    numbers = []
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"decode: {name} must be a number, got {check.describe(value)}")
        try:
            numbers.append(float(value))
        except OverflowError:
            raise ValueError(f"decode: {name} must be a number that float64 can hold") from None
    temperature, top_p, remask_below = numbers
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"decode: temperature must be a finite number >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"decode: top_p must lie in (0, 1], got {top_p}")
    if not 0 <= remask_below <= 1:
        raise ValueError(f"decode: remask_below must be a probability, got {remask_below}")
    return temperature, top_p, remask_below
