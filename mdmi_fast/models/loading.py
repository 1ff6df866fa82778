"""Models and estimators by name. Names come from entry points, so a package of yours can add its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from mdmi_fast.models.base import MaskedModel


def resolve(group: str, name: str) -> Any:
    """The object that an installed package registered as `name` in the entry-point group.

    Raises:
        ValueError: if no installed package registers the name; the message lists those that exist.
    """
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none (is mdmi_fast installed?)"
        raise ValueError(f"{group}: nothing is registered as {name!r}; known: {known}")
    return found[name].load()


def load_model(spec: str, **options: Any) -> MaskedModel:
    """Load a masked model by name: "sudoku", or "KIND:REST" where KIND is a registered loader.

    Args:
        spec: the name, with whatever the loader needs behind a colon ("hf:FOLDER").
        **options: handed to the loader, whose signature is the list of what it takes.

    Returns:
        The model, frozen.

    Raises:
        ValueError: if the name is unknown.
    """
    kind, _, rest = spec.partition(":")
    loader = resolve("mdmi_fast.models", kind)
    model: MaskedModel = loader(rest, **options) if rest else loader(**options)
    return model
