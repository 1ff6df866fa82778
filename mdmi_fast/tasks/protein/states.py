"""What the antibody model is asked to fill: whole chains, loops, halves; and the states it meets on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mdmi_fast.decoding import Random, Sequential, decode
from mdmi_fast.models import MaskedModel
from mdmi_fast.tasks.protein.chains import Chain, own_chains
from mdmi_fast.tasks.protein.letters import LetterTokenizer

Task = Literal["generate", "infill", "complete"]
TASKS: tuple[Task, ...] = get_args(Task)


def split(chains: Sequence[Chain], *, longest: int) -> tuple[list[Chain], list[Chain]]:
    """Chains of at most `longest` residues, in a fixed random order: (half to make states of, half to judge with)."""
    fitting = [chain for chain in chains if len(chain.residues) <= longest]
    order = np.random.default_rng(0).permutation(len(fitting))
    mixed = [fitting[number] for number in order]
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def prompts(task: Task, chains: Sequence[Chain], count: int, *, seed: int) -> list[str]:
    """Chains with "_" where the model has to decide: all of it (natural lengths), the three loops, or a random half.

    Args:
        task: "generate", "infill" or "complete".
        chains: are gone through in turn.
        count: how many prompts.
        seed: of the halves.
    """
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        chain = chains[number % len(chains)]
        length = len(chain.residues)
        if task == "generate":
            hidden = np.ones(length, dtype=bool)
        elif task == "infill":
            hidden = chain.regions() % 2 == 1
        else:
            hidden = random.permutation(length) < length // 2
        found.append("".join("_" if h else r for h, r in zip(hidden, chain.residues, strict=True)))
    return found


def heavy_states(model: Any, count: int, *, seed: int) -> list[Tensor]:
    """States to label of a model of heavy chains, each [N] int64: `decoding_states` of chains that no row is judged by.

    Args:
        model: with a `LetterTokenizer` as tokenizer.
        count: how many states.
        seed: of everything.

    Raises:
        OSError: if the chains were not fetched before and cannot be now.
    """
    chains, _ = split(own_chains(), longest=model.max_length - 2)
    padded = decoding_states(model, model.tokenizer, chains, count, seed=seed)
    return [state[state != model.pad_token_id] for state in padded]


def decoding_states(
    model: MaskedModel, tokenizer: LetterTokenizer, chains: Sequence[Chain], count: int, *, seed: int
) -> Tensor:
    """States [count, N] int64 from all tasks, as met while sampling one position a pass at temperature 1.

    Half of them come from empty chains, a quarter from loops, a quarter from halves; half are filled by entropy, half
    at random. How far they are filled is uniform. Shorter states are padded on the right.

    Args:
        model: fills the chains.
        tokenizer: of the model.
        chains: real ones.
        count: how many states.
        seed: of everything.
    """
    random = np.random.default_rng(seed)
    kinds = random.choice(TASKS, size=count, p=[0.5, 0.25, 0.25])
    chosen = [chains[number] for number in random.integers(0, len(chains), size=count)]
    texts = [
        prompts(kind, [chain], 1, seed=seed + number)[0]
        for number, (kind, chain) in enumerate(zip(kinds, chosen, strict=True))
    ]
    tokens = tokenizer.encode(texts)
    by_entropy = torch.from_numpy(random.random(count) < 0.5)
    for rows, policy in ((by_entropy, Sequential()), (~by_entropy, Random(1))):
        start = tokens[rows]
        if not len(start):
            continue
        seeds = torch.from_numpy(random.integers(0, 2**62, len(start)))
        trace = decode(model, start, policy, temperature=1.0, seeds=seeds, trace=True).trace
        assert trace is not None  # it was asked for
        masked = (start == model.mask_token_id).sum(dim=1)
        filled = torch.from_numpy(random.random(len(start)) * masked.numpy()).long()
        for record in trace:
            here = filled[record.sequences] == record.step + 1
            start[record.sequences[here]] = record.tokens[here]
        tokens[rows] = start
    return tokens
