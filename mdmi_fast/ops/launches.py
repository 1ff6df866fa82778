"""Compiling ahead of time, and tuning on purpose; neither is needed for right results, and neither happens by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdmi_fast import checks as check
from mdmi_fast.ops.pairwise import pairwise_mlp, prepare_pairwise
from mdmi_fast.ops.select import score_and_select, select_budget, select_threshold
from mdmi_fast.ops.stats import token_stats


@contextmanager
def tune_kernels(*, cache: str | Path) -> Iterator[None]:
    """Measures how to cut the pair kernels for this card and the networks used inside the block, and remembers it.

    Calls inside are slow the first time a network is met: its candidates are compiled and timed. What was found is used for the rest of
    the process and written to the cache; what the cache holds of this card is not measured again, so the same line reads it
    back in the next process.

    Args:
        cache: a JSON file; read if it exists, replaced as a whole if the block ends well.

    Raises:
        ImportError: Triton is not installed.

    Numerics:
        Sums may be added up in another order than with the built-in choices, within the same bounds.
    """
    from mdmi_fast.backends.triton.tuner import tuner

    path = Path(cache)
    if path.exists():
        tuner.load(path)
    with tuner.measured():
        yield
    try:
        tuner.save(path)
    except OSError as error:
        warnings.warn(f"mdmi_fast: choices are kept in memory only, {path} cannot be written ({error})", stacklevel=3)


@dataclass(frozen=True)
class StepShape:
    """A decoding step to compile for: what a model, an estimator and a policy hand to the ops.

    Raises:
        TypeError: for sizes that are no integers.
        ValueError: for sizes below 1, or no layer at all.
    """

    vocabulary: int
    positions: int
    layers: tuple[int, ...] = (512, 256)
    """H1 and the widths of the dense layers."""
    dtype: torch.dtype = torch.bfloat16
    """Of the logits, the halves and the network."""
    precision: str | None = None
    combine: str = "add"
    symmetry: str = "mean"
    activation: str = "identity"
    order: str = "entropy"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ValueError(f"StepShape: layers must be a tuple of one width or more, got {self.layers!r}")
        for name, size in (
            ("vocabulary", self.vocabulary),
            ("positions", self.positions),
            *(("layers", width) for width in self.layers),
        ):
            check.whole("StepShape", name, size, 1)


def warmup(shapes: Sequence[StepShape], *, device: str | torch.device = "cuda", backend: str | None = None) -> None:
    """Compiles what decoding steps of these shapes will launch, by running each once on zeros.

    Afterwards such a step compiles nothing and can be captured in a CUDA graph. The batch does not matter, and positions only by
    the power of two that holds them.

    Args:
        shapes: of the steps.
        device: where they will run.
        backend: "triton" or None.

    Raises:
        TypeError: shapes hold something else.
        UnsupportedError: the backend named cannot run such a step.
    """
    for shape in shapes:
        if not isinstance(shape, StepShape):
            raise TypeError(f"warmup: shapes must hold StepShape, got {check.describe(shape)}")
        n, (h1, *rest) = shape.positions, shape.layers
        made: dict[str, Any] = {"dtype": shape.dtype, "device": device}
        stats = token_stats(torch.zeros(1, n, shape.vocabulary, **made), backend=backend)
        u, v = (torch.zeros(1, n, h1, **made) for _ in range(2))
        weights = [torch.zeros(a, b, **made) for a, b in zip(shape.layers, rest, strict=False)]
        network = (weights, [torch.zeros(b, **made) for b in rest], torch.zeros(shape.layers[-1], **made), 0.0)
        options: dict[str, Any] = {"combine": shape.combine, "symmetry": shape.symmetry, "activation": shape.activation}
        mask = torch.ones(1, n, dtype=torch.bool, device=device)
        precision: dict[str, Any] = {"precision": shape.precision, "backend": backend}
        prepared = prepare_pairwise(*network, **precision)
        mi = pairwise_mlp(u, v, *network, mask=mask, prepared=prepared, **options)
        for weight in (0.0, 1.0):
            select_budget(
                stats.entropy, mi, gamma=1.0, entropy_weight=weight, order=shape.order, mask=mask, backend=backend
            )
        select_threshold(stats.entropy, mi, tau=0.1, mask=mask, backend=backend)
        score_and_select(stats.entropy, u, v, *network, gamma=1.0, mask=mask, prepared=prepared, **options)
