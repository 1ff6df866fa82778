"""What the commands and the service ask of a task: how to read, judge and draw its sequences.

A package registers its task in the entry-point group `mdmi_fast.tasks`, under the name of its models: KIND = "module:TASK".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mdmi_fast.decoding.named import kind_of
from mdmi_fast.models.loading import registered, resolve

GROUP = "mdmi_fast.tasks"


class Structure(NamedTuple):
    """The dependencies that a task is known to have, for maps.

    Attributes:
        name: of what makes two positions dependent, such as "sharing a row".
        pairs: [N, N] bool, where they are.
        labels: N names of positions.
        block: positions between two lines of a picture; None: no lines. A structure of 81 positions with lines can be
            drawn as a board.
    """

    name: str
    pairs: Tensor
    labels: Sequence[str]
    block: int | None = None


@dataclass(frozen=True)
class Task:
    """What a task can do; all of it is optional.

    Attributes:
        unit: what one of its sequences is called.
        read_lines: the sequences of lines that are not JSON, each as its tokens and what is kept of it in the output.
            Raises ValueError naming every line that holds none.
        quality: [B] from 0 to 1, or bool, how good decoded tokens [B, N] are.
        structure: made when it is asked for.
    """

    unit: str = "sequence"
    read_lines: Callable[[list[str]], list[tuple[list[int], dict[str, Any]]]] | None = None
    quality: Callable[[Tensor], Tensor] | None = None
    structure: Callable[[], Structure] | None = None


def task_of(model: str) -> Task:
    """The task of a model's name, as `load_model` takes it; one that can do nothing where none is registered."""
    kind = kind_of(model)
    if kind not in registered(GROUP):
        return Task()
    found: Task = resolve(GROUP, kind)
    return found
