"""How probing is done: the options that labelling one batch and a folder of them share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mdmi_fast import checks as check
from mdmi_fast.labels.forward import Precision

Form = Literal["joint", "entropy", "kl"]
FORMS: tuple[Form, ...] = get_args(Form)
Directions = Literal["both", "one"]


@dataclass(frozen=True)
class ProbeOptions:
    """The options of `probe_mi` that are the same for all sequences; they are explained there.

    Raises:
        TypeError: for values of another kind, naming the option.
        ValueError: for numbers out of range or an unknown word.
    """

    forms: Sequence[Form] = FORMS
    epsilon: float = 0.0
    directions: Directions = "both"
    window: int | None = None
    samples: int | None = None
    seed: int = 0
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        forms = self.forms
        if not isinstance(forms, Collection) or not forms or any(form not in FORMS for form in forms):
            raise ValueError(f"probe_mi: forms must be some of {', '.join(FORMS)}, got {forms!r}")
        object.__setattr__(self, "forms", tuple(form for form in FORMS if form in forms))
        for name, choice, choices in (
            ("directions", self.directions, Directions),
            ("precision", self.precision, Precision),
        ):
            if choice not in get_args(choices):
                raise ValueError(f"probe_mi: {name} must be one of {', '.join(get_args(choices))}, got {choice!r}")
        check.at_least("probe_mi", "epsilon", self.epsilon, 0.0)
        check.whole("probe_mi", "seed", self.seed, -(2**63))
        for name, number, least in (("window", self.window, 0), ("samples", self.samples, 2)):
            if number is not None:
                check.whole("probe_mi", name, number, least)

    def fitted(self, length: int, vocab_size: int) -> ProbeOptions:
        """The same for sequences of a length: no window is wider, and no position has more values than the vocabulary."""
        window = None if self.window is None else min(self.window, length)
        samples = None if self.samples is None else min(self.samples, vocab_size)
        return replace(self, window=window, samples=samples)
