"""The decoding loop: run the model, let a policy choose positions, write tokens, until nothing is masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.coupling import CheckedPass, Coupling, Turn, checked_coupling, drawing_order
from mdmi_fast.decoding.options import Sampling, Writing
from mdmi_fast.decoding.policies import Memory, Policy, Step
from mdmi_fast.decoding.policies.order import take_lowest
from mdmi_fast.decoding.policies.rule import StatsReader, checked_policy, checked_selection
from mdmi_fast.decoding.randomness import draw_seeds, uniform
from mdmi_fast.decoding.rows import Active, Forward, PassOutput
from mdmi_fast.decoding.sampling import log_probability
from mdmi_fast.decoding.trace import PassRecord, blocking
from mdmi_fast.decoding.vocabulary import Vocabulary, with_stops
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.base import StatsModel
from mdmi_fast.models.call import check_flag, check_model, check_tokens, visible_positions
from mdmi_fast.ops import Selection


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
    coupling: Coupling | None = None,
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
        coupling: how tokens drawn in one pass depend on each other: `Probing()`, or a trained one. The positions that a pass
            unmasks are then drawn one after the other, by entropy, each from logits that the coupling has corrected by
            what was drawn before. None: independently of each other. At temperature 0 it counts only if it has an
            attribute `greedy` that is True.
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
    sampling = Sampling(temperature, top_k, top_p, gumbel)
    writing = Writing(suppressed, stop_tokens, block_size, verify, remask_below, revisions)
    check_model("decode", model)
    check_tokens("decode", tokens, attention_mask)
    check_flag("decode", "trace", trace)
    coupling = checked_coupling(coupling, model, sampling.temperature)
    writing = writing.fitted(model, tokens.shape[1])
    checked_policy("decode", policy)
    if progress is not None and not callable(progress):
        raise TypeError(f"decode: progress must be a function, got {check.describe(progress)}")
    seeds = _seeds(tokens, generator, seeds)
    model = with_stops(model, writing.stop_tokens, writing.suppressed)
    attention_mask = visible_positions("decode", model, tokens, attention_mask)
    asked = tokens == model.mask_token_id
    if attention_mask is not None:
        asked &= attention_mask
    vocabulary = Vocabulary.of(model, asked, writing.suppressed, allowed)
    start = Active.at_start(tokens, asked, attention_mask, seeds)
    decoding = _Decoding(model, policy, coupling, sampling, writing, vocabulary, start, trace=trace)
    while len(decoding.active.sequence):
        finished = decoding.one_pass()
        if progress is not None and finished:
            progress(finished)
    return DecodeResult(decoding.done, decoding.passes, decoding.records)


def _seeds(tokens: Tensor, generator: torch.Generator | None, seeds: Tensor | None) -> Tensor:
    """[B] int64: the seeds given, or from a generator."""
    for name, given, kind in (("generator", generator, torch.Generator), ("seeds", seeds, Tensor)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"decode: {name} must be a torch.{kind.__name__}, got {check.describe(given)}")
    if seeds is None:
        seeds = draw_seeds(len(tokens), generator, tokens.device)
    elif generator is not None or seeds.shape != tokens.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(f"decode: give either a generator or seeds [{len(tokens)}] int64")
    check.same_device("decode", tokens=tokens, seeds=seeds)
    return seeds


class _Decoding:
    """A decode on its way, pass by pass.

    Attributes:
        active: the sequences that are not finished.
        done: [B, N] int64, the finished ones.
        passes: [B] int64, theirs.
        records: one a pass, or None.
    """

    def __init__(
        self,
        model: MaskedModel,
        policy: Policy,
        coupling: Coupling | None,
        sampling: Sampling,
        writing: Writing,
        vocabulary: Vocabulary,
        start: Active,
        *,
        trace: bool,
    ) -> None:
        self.policy, self.coupling, self.sampling, self.writing = policy, coupling, sampling, writing
        stats_will_do = sampling.temperature == 0 and vocabulary.is_free and coupling is None
        stats_will_do &= isinstance(policy, StatsReader) and policy.reads_stats_only
        self.forward = Forward(model, vocabulary, stats_will_do and isinstance(model, StatsModel))
        self.as_it_is = sampling.is_plain and vocabulary.allowed is None and not writing.suppressed
        self.memory, self.index, self.count = Memory(), 0, len(start.sequence)
        self.done, self.passes = start.tokens.clone(), torch.zeros_like(start.passes)
        self.records: list[PassRecord] | None = [] if trace else None
        self.active = start.of(start.masked.any(dim=-1))

    def one_pass(self) -> int:
        """Run the model, let the policy choose, write; returns how many sequences that finished."""
        active = self.active
        mask = active.first_block(self.writing.block_size)
        seen = self.forward(active, active.tokens, mask)
        notes: dict[str, Tensor] | None = None if self.records is None else {}
        step = self._step(seen, notes)
        chosen = Selection(*self.policy.select(seen.stats, seen.hidden, mask, step))
        selected = checked_selection(self.policy, chosen.selected, mask, step)
        (written, seen, order), left = self._write(seen, step, selected), active.masked & ~selected
        active = replace(active, passes=active.passes + 1)
        remasked = ended = final = torch.zeros_like(mask)
        if self.writing.verify:
            active, remasked = self._verify(active, seen, selected, written)
        if self.writing.stop_tokens:
            decoded = active.asked & ~left & ~remasked
            final, filled = self._up_to_the_stop(written, decoded, active)
            ended = (left | (filled != written)) & final
            written, left, remasked = filled, left & ~final, remasked & ~final
        if self.writing.revises:
            active, left, remasked = self._remask(active, seen, selected, left | remasked, remasked, final)
            written = written.masked_fill(remasked, self.forward.model.mask_token_id)
        if self.records is not None:
            entropy = seen.stats.entropy.masked_fill(~mask, 0.0)
            blocker = blocking((notes or {}).get("mi"), selected, mask & ~selected)
            self.records.append(
                PassRecord(
                    self.index,
                    active.sequence,
                    selected,
                    written,
                    entropy,
                    chosen.spent,
                    blocker,
                    remasked,
                    ended,
                    order,
                )
            )
        return self._retire(replace(active, tokens=written, masked=left))

    def _step(self, seen: PassOutput, notes: dict[str, Tensor] | None) -> Step:
        active = self.active
        return Step(
            self.index,
            model=self.forward.model,
            tokens=active.tokens,
            logits=seen.logits,
            stats=seen.stats,
            sampled=self.as_it_is,
            attention=seen.attention,
            seeds=active.seeds,
            sequences=active.sequence,
            count=self.count,
            attention_mask=active.visible,
            memory=self.memory,
            notes=notes,
        )

    def _write(self, seen: PassOutput, step: Step, selected: Tensor) -> tuple[Tensor, PassOutput, Tensor | None]:
        """Write the selected positions.

        Returns:
            The sequences' tokens [R, N]; the pass, with the corrected logits where verification will read them; of a
            coupled pass, its order.
        """
        coupling, given = self.coupling, seen.logits
        if coupling is None or given is None:
            return self._draw(seen, selected), seen, None
        order = drawing_order(seen.stats.entropy, selected)
        if order.shape[1] == 1:
            return self._draw(seen, selected), seen, None
        active, sampling = self.active, self.sampling
        written, shown = active.tokens.clone(), given.clone() if self.writing.verify else None
        uniforms = uniform(active.seeds, self.index, 0, active.place)
        turns = Turn.all_of(order, given)
        coupled = CheckedPass(coupling, step, seen.hidden, order)
        for turn in turns:
            at = turn.rows, turn.positions
            own = self.forward.vocabulary.restrict(turn.logits, active.sequence[turn.rows], turn.positions)
            corrected = coupled.logits(turn, own)
            if sampling.temperature > 0:
                drawn = sampling.draw(own if corrected is None else corrected, uniforms[at])
            else:
                drawn = seen.stats.token[at] if corrected is None else corrected.argmax(dim=-1)
            written[at] = drawn
            if shown is not None and corrected is not None:
                shown[at] = corrected.to(shown.dtype)
            coupled.tell(turn, drawn)
        return written, seen if shown is None else seen._replace(logits=shown), order

    def _draw(self, seen: PassOutput, selected: Tensor) -> Tensor:
        """The sequences' tokens [R, N] with the selected positions written."""
        active = self.active
        if seen.logits is None or self.sampling.temperature == 0:
            return torch.where(selected, seen.stats.token, active.tokens)
        uniforms = uniform(active.seeds, self.index, 0, active.place)
        row, position = selected.nonzero(as_tuple=True)
        allowed = self.forward.vocabulary.restrict(seen.logits[row, position], active.sequence[row], position)
        return active.tokens.masked_scatter(selected, self.sampling.draw(allowed, uniforms[row, position]))

    def _verify(self, active: Active, seen: PassOutput, selected: Tensor, written: Tensor) -> tuple[Active, Tensor]:
        """One more pass over the less confident half of what was written together; what is to be masked again."""
        tested = selected & (active.revised < self.writing.revisions)
        doubted = take_lowest(seen.stats.confidence, tested, tested.sum(dim=-1) // 2)
        active = replace(active, passes=active.passes + doubted.any(dim=-1))
        return active, self._lost_their_place(active, written, doubted, seen.logits)

    def _lost_their_place(self, active: Active, written: Tensor, doubted: Tensor, logits: Tensor | None) -> Tensor:
        """[R, N] bool: of the doubted positions those whose token does not stand against what else was written."""
        lost = torch.zeros_like(doubted)
        row, position = doubted.nonzero(as_tuple=True)
        if not len(row):
            return lost
        token, sequence, temperature = written[row, position], active.sequence[row], self.sampling.temperature

        def log_p(found: Tensor) -> Tensor:
            return log_probability(self.forward.vocabulary.restrict(found, sequence, position), token, temperature)

        # Read before the model runs again, which may answer into the same memory.
        before = None if logits is None or temperature == 0 else log_p(logits[row, position])
        again = doubted.any(dim=-1)
        looked_at = doubted[again]
        states = written[again].masked_fill(looked_at, self.forward.model.mask_token_id)
        now = self.forward(active.of(again), states, looked_at)
        own_row = looked_at.nonzero(as_tuple=True)[0]
        if before is None or now.logits is None:
            return lost.masked_scatter(doubted, now.stats.token[own_row, position] != token)
        # Steps below 0 are the passes that verify: numbers of their own.
        uniforms = uniform(active.seeds, -1 - self.index, 0, active.place)[row, position]
        return lost.masked_scatter(doubted, uniforms >= (log_p(now.logits[own_row, position]) - before).exp())

    def _up_to_the_stop(self, tokens: Tensor, decoded: Tensor, active: Active) -> tuple[Tensor, Tensor]:
        """What the first stop token among the decoded makes final, itself included: ([R, N] bool, tokens so filled)."""
        stops = torch.tensor(self.writing.stop_tokens, dtype=torch.int64, device=tokens.device)
        is_stop = torch.isin(tokens, stops) & decoded
        stopped = is_stop.any(dim=-1, keepdim=True)
        first = is_stop.int().argmax(dim=-1, keepdim=True)
        # Where nothing stops, the first token may be a mask token that the vocabulary does not have.
        stop = torch.where(stopped, tokens.gather(-1, first), stops[0])
        position = torch.arange(tokens.shape[1], device=tokens.device)
        final = active.asked & (position >= first) & stopped
        allowed = self.forward.vocabulary.allowed
        if allowed is not None:
            final &= allowed[active.sequence.unsqueeze(-1), position, stop]
        return final, torch.where(final, stop, tokens)

    def _remask(
        self, active: Active, seen: PassOutput, selected: Tensor, left: Tensor, remasked: Tensor, final: Tensor
    ) -> tuple[Active, Tensor, Tensor]:
        """What is left, and of it what is masked again, once the sequences that are full were looked through."""
        confidence = torch.where(selected, seen.stats.confidence, active.confidence)
        unsure = active.asked & ~final & (confidence < self.writing.remask_below)
        unsure &= (active.revised < self.writing.revisions) & ~left.any(dim=-1, keepdim=True)
        remasked, left = remasked | unsure, left | unsure
        return replace(active, confidence=confidence, revised=active.revised + remasked), left, remasked

    def _retire(self, active: Active) -> int:
        """Take finished sequences out of the batch; returns how many."""
        remaining = active.masked.any(dim=-1)
        self.index += 1
        if bool(remaining.all()):
            self.active = active
            return 0
        finished = active.of(~remaining)
        self.done[finished.sequence], self.passes[finished.sequence] = finished.tokens, finished.passes
        self.active = active.of(remaining)
        self.memory.keep(remaining)
        return len(finished.sequence)
