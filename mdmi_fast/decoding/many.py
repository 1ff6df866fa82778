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
        **defaults: options of `decode` where a sequence has none of its own.

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

    def run(chosen: list[int], options: Mapping[str, Any]) -> dict[int, Decoded]:
        group = [sequences[number] for number in chosen]
        masks = [each.attention_mask for each in group]  # of all or none
        result = decode(
            model,
            torch.tensor([[*each.tokens] for each in group]),
            policy,
            seeds=seeds[chosen],
            attention_mask=None if masks[0] is None else torch.tensor(masks),
            allowed=_allowed(group, model.vocab_size),
            trace=trace,
            progress=progress,
            **options,
        )
        if progress is not None:
            progress(int((result.passes == 0).sum()))
        tokens, passes = result.tokens.tolist(), result.passes.tolist()
        stories = [receipt(result.trace or [], row) for row in range(len(chosen))]
        return {number: Decoded(*each) for number, *each in zip(chosen, tokens, passes, stories, strict=True)}

    for start in range(0, len(sequences), 8 * batch_size):
        window = range(start, min(start + 8 * batch_size, len(sequences)))
        done: dict[int, Decoded] = {}
        failed: dict[int, Exception] = {}
        for options, numbers in _alike(sequences, window, seeds):
            run_alike = functools.partial(run, options={**defaults, **options})
            for first in range(0, len(numbers), batch_size):
                done |= halving(run_alike, numbers[first : first + batch_size], failed)
        for number in window:
            if number not in done:
                raise DecodeError(failed) from failed[min(failed)]
            yield done[number]


def halving(
    run: Callable[[list[int]], dict[int, Found]], chosen: list[int], failed: dict[int, Exception]
) -> dict[int, Found]:
    """What `run` makes of a batch, halved where it fails; what fails alone is added to `failed`, until that holds 20."""
    if len(failed) >= ENOUGH:
        return {}
    try:
        return run(chosen)
    except (ValueError, IndexError, RuntimeError) as error:  # what models raise for what they cannot take
        if len(chosen) == 1:
            failed[chosen[0]] = error
            return {}
        half = len(chosen) // 2
        return halving(run, chosen[:half], failed) | halving(run, chosen[half:], failed)


def _alike(sequences: Sequence[Asked], window: range, seeds: Tensor) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Options and the numbers of the sequences of a window that can be decoded together; own seeds are written to `seeds`."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number in window:
        each = sequences[number]
        if "seed" in each.options:
            seeds[number] = each.options["seed"]
        shared = {name: value for name, value in each.options.items() if name not in ("seed", "allowed")}
        key = json.dumps([len(each.tokens), shared, each.attention_mask is not None], sort_keys=True, default=list)
        groups.setdefault(key, (shared, []))[1].append(number)
    yield from groups.values()


def _allowed(group: Sequence[Asked], vocab_size: int) -> Tensor | None:
    """[B, N, V] bool of the sequences' "allowed" sets; None where there are none."""
    sets = [each.options.get("allowed", {}) for each in group]
    if not any(sets):
        return None
    allowed = torch.ones(len(sets), len(group[0].tokens), vocab_size, dtype=torch.bool)
    for row, own in enumerate(sets):
        for position, tokens in own.items():
            allowed[row, int(position)] = False
            allowed[row, int(position), tokens] = True
    return allowed
