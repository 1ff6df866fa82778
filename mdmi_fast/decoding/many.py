"""Decoding many sequences of many lengths, each with options of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.loop import decode
from mdmi_fast.decoding.policies import Policy
from mdmi_fast.decoding.randomness import draw_seeds
from mdmi_fast.decoding.trace import receipt
from mdmi_fast.models import MaskedModel

Found = TypeVar("Found")
ENOUGH = 20
"""Failures of single sequences, after which no more are looked for."""


class Asked(NamedTuple):
    """A sequence to decode.

    Attributes:
        tokens: with the mask token where something is to be written.
        attention_mask: which positions are not padding; None: as for `decode`.
        options: of `decode`, for this sequence: those of `Sampling` and `Writing`, "seed", and "allowed", the tokens that
            may stand at a position as {"POSITION": [TOKEN, ...]}.
    """

    tokens: Sequence[int]
    attention_mask: Sequence[bool] | None = None
    options: Mapping[str, Any] = {}


class Decoded(NamedTuple):
    """A decoded sequence.

    Attributes:
        tokens: without a masked position.
        passes: forward passes it took part in.
        trace: its receipt, an object a pass, where that was asked for; see `receipt`.
    """

    tokens: list[int]
    passes: int
    trace: list[dict[str, Any]]


class DecodeError(ValueError):
    """Some sequences cannot be decoded.

    Attributes:
        failures: number of a sequence -> what it raises alone; up to 20 of those that were to be decoded together.
    """

    def __init__(self, failures: Mapping[int, Exception]) -> None:
        self.failures = dict(sorted(failures.items()))
        super().__init__("; ".join(f"sequence {number}: {error}" for number, error in self.failures.items()))


class NotTriedError(Exception):
    """A sequence that was left out, because enough others had failed."""


def decode_many(
    model: MaskedModel,
    sequences: Sequence[Asked],
    policy: Policy,
    *,
    generator: torch.Generator | None = None,
    batch_size: int = 256,
    trace: bool = False,
    progress: Callable[[int], object] | None = None,
    **defaults: Any,
) -> Iterator[Decoded]:
    """Decode sequences of any lengths, in their order. A result depends on the sequence, its number and the seed only.

    Sequences of one length and the same options are decoded together, out of the next 8 * batch_size ones: nothing
    needs padding but what a sequence says of itself. A batch that fails is halved until it is known which sequences fail
    alone.

    Args:
        model: decodes.
        sequences: what is asked for.
        policy: for all of them.
        generator: of the seeds, one a sequence; None: torch's own.
        batch_size: at most so many at once.
        trace: keep the receipts.
        progress: called with the number of sequences that were finished.
        **defaults: `coupling`, and options of `decode` where a sequence has none of its own.

    Yields:
        A result for every sequence.

    Raises:
        DecodeError: where the first sequence that cannot be decoded would come.

    Example:
        >>> import torch
        >>> from mdmi_fast import TopK
        >>> from mdmi_fast.decoding import Asked, decode_many
        >>> from mdmi_fast.models.exact import JointTable
        >>> model = JointTable(torch.tensor([[0.9, 0.0], [0.0, 0.1]]))
        >>> asked = [Asked([2, 2]), Asked([2, 1]), Asked([2, 2], options={"suppressed": [0]})]
        >>> [(each.tokens, each.passes) for each in decode_many(model, asked, TopK(1))]
        [([0, 0], 2), ([1, 1], 1), ([1, 1], 2)]
    """
    check.whole("decode_many", "batch_size", batch_size, 1)
    seeds = draw_seeds(len(sequences), generator, torch.device("cpu"))
    for start in range(0, len(sequences), 8 * batch_size):
        window = slice(start, start + 8 * batch_size)
        found = decode_batch(
            model,
            sequences[window],
            policy,
            seeds=seeds[window],
            batch_size=batch_size,
            trace=trace,
            progress=progress,
            **defaults,
        )
        wrong = {start + number: each for number, each in enumerate(found) if isinstance(each, Exception)}
        failed = {number: error for number, error in wrong.items() if not isinstance(error, NotTriedError)}
        for each in found:
            if isinstance(each, Exception):
                raise DecodeError(failed) from failed[min(failed)]
            yield each


def decode_batch(
    model: MaskedModel,
    sequences: Sequence[Asked],
    policy: Policy,
    *,
    seeds: Tensor | None = None,
    batch_size: int = 256,
    pad: bool = False,
    every: bool = False,
    trace: bool = False,
    progress: Callable[[int], object] | None = None,
    **defaults: Any,
) -> list[Decoded | Exception]:
    """As `decode_many`, all at once, and with an exception in the place of a sequence that cannot be decoded.

    Args:
        model: decodes.
        sequences: what is asked for.
        policy: for all of them.
        seeds: [S] int64 of those without one of their own; None: from torch's own generator.
        batch_size: at most so many at once.
        pad: decode sequences of several lengths together, padded on the right; the model has to take attention masks.
        every: find all sequences that fail and take any exception as one of theirs; else only those that models raise for
            what they cannot take, and no more than 20: then the rest is `NotTriedError`.
        trace: keep the receipts.
        progress: called with the number of sequences that were finished.
        **defaults: `coupling`, and options of `decode` where a sequence has none of its own.
    """
    seeds = draw_seeds(len(sequences), None, torch.device("cpu")) if seeds is None else seeds.clone()

    def run(chosen: list[int], options: Mapping[str, Any]) -> dict[int, Decoded]:
        group = [sequences[number] for number in chosen]
        tokens, visible = _together(group, model.mask_token_id)
        result = decode(
            model,
            tokens,
            policy,
            seeds=seeds[chosen],
            attention_mask=visible,
            allowed=_allowed(group, tokens.shape[1], model.vocab_size),
            trace=trace,
            progress=progress,
            **options,
        )
        if progress is not None:
            progress(int((result.passes == 0).sum()))
        found = {}
        for row, number in enumerate(chosen):
            own = result.tokens[row, : len(group[row].tokens)].tolist()
            found[number] = Decoded(own, int(result.passes[row]), receipt(result.trace or [], row))
        return found

    done: dict[int, Decoded] = {}
    failed: dict[int, Exception] = {}
    for options, numbers in _alike(sequences, seeds, pad):
        run_alike = functools.partial(run, options={**defaults, **options})
        for first in range(0, len(numbers), batch_size):
            done |= _halving(run_alike, numbers[first : first + batch_size], failed, every)
    return [done.get(number) or failed.get(number) or NotTriedError() for number in range(len(sequences))]


def _halving(
    run: Callable[[list[int]], dict[int, Found]], chosen: list[int], failed: dict[int, Exception], every: bool
) -> dict[int, Found]:
    """What `run` makes of a batch, halved where it fails; what fails alone is added to `failed`."""
    if len(failed) >= ENOUGH and not every:
        return {}
    try:
        return run(chosen)
    except Exception as error:
        # What models raise for what they cannot take.
        if not (every or isinstance(error, (ValueError, IndexError, RuntimeError))):
            raise
        if len(chosen) == 1:
            failed[chosen[0]] = error
            return {}
        half = len(chosen) // 2
        return _halving(run, chosen[:half], failed, every) | _halving(run, chosen[half:], failed, every)


def _alike(sequences: Sequence[Asked], seeds: Tensor, pad: bool) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Options and the numbers of the sequences that can be decoded together; own seeds are written to `seeds`."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, each in enumerate(sequences):
        if "seed" in each.options:
            seeds[number] = each.options["seed"]
        shared = {name: value for name, value in each.options.items() if name not in ("seed", "allowed")}
        shape = [] if pad else [len(each.tokens), each.attention_mask is not None]
        key = json.dumps([shape, shared], sort_keys=True, default=list)
        groups.setdefault(key, (shared, []))[1].append(number)
    yield from groups.values()


def _together(group: Sequence[Asked], mask_token_id: int) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, N] padded on the right, and which are visible; None where no sequence says so and none is padded."""
    longest = max(len(each.tokens) for each in group)
    if all(len(each.tokens) == longest and each.attention_mask is None for each in group):
        return torch.tensor([[*each.tokens] for each in group], device="cpu"), None
    tokens = torch.full((len(group), longest), mask_token_id, dtype=torch.int64, device="cpu")
    visible = torch.zeros(len(group), longest, dtype=torch.bool, device="cpu")
    for row, each in enumerate(group):
        length = len(each.tokens)
        tokens[row, :length] = torch.tensor([*each.tokens], device="cpu")
        visible[row, :length] = (
            True if each.attention_mask is None else torch.tensor([*each.attention_mask], device="cpu")
        )
    return tokens, visible


def _allowed(group: Sequence[Asked], length: int, vocab_size: int) -> Tensor | None:
    """[B, N, V] bool of the sequences' "allowed" sets; None where there are none."""
    sets = [each.options.get("allowed", {}) for each in group]
    if not any(sets):
        return None
    allowed = torch.ones(len(sets), length, vocab_size, dtype=torch.bool, device="cpu")
    for row, own in enumerate(sets):
        for position, tokens in own.items():
            allowed[row, int(position)] = False
            allowed[row, int(position), tokens] = True
    return allowed
