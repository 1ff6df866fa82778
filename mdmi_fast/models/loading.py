"""Models by name. Names come from entry points, so a package of yours can add its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_args, get_origin, get_type_hints

import torch
from typing_extensions import Unpack

from mdmi_fast import _moved
from mdmi_fast.models.base import MaskedModel


def registered(group: str) -> dict[str, EntryPoint]:
    """What installed packages registered in an entry-point group, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=group))}


def resolve(group: str, name: str) -> Any:
    """The object that an installed package registered as `name` in the entry-point group.

    Raises:
        ValueError: if no installed package registers the name; the message lists those that exist.
    """
    found = registered(group)
    if name not in found:
        known = ", ".join(found) or "none (is mdmi_fast installed?)"
        raise ValueError(f"{group}: nothing is registered as {name!r}; known: {known}")
    return found[name].load()


def find_for_model(group: str, spec: str) -> Any | None:
    """What an installed package registered for a model: as "sapiens.heavy" for "sapiens:heavy", or for all of a kind.

    Args:
        group: of entry points.
        spec: as `load_model` takes it.

    Returns:
        The object, or None where nothing is registered.
    """
    name, found = spec.partition("?")[0], registered(group)
    entry = found.get(name.replace(":", ".")) or found.get(name.partition(":")[0])
    return None if entry is None else entry.load()


def load_model(spec: str, **options: Any) -> MaskedModel:
    """Load a masked model by name.

    | name | model | options |
    |---|---|---|
    | "sudoku", "sudoku:weak" | the shipped networks | |
    | "sapiens:heavy", "sapiens:light", "antiberty" | antibodies; `mdmi-fast models fetch NAME` first | `LoadOptions` |
    | "hf:NAME_OR_FOLDER" | any masked LM of transformers | see `mdmi_fast.models.huggingface.load_model` |
    | "esmc:esmc_300m" | ESM-C of the package esm | see `mdmi_fast.models.esm.load_esmc` |
    | "fair-esm:esm2_t6_8M_UR50D" | ESM-1 and ESM-2 of the package fair-esm | see `mdmi_fast.models.esm.load_fair_esm` |
    | "text:FOLDER" | what `python -m mdmi_fast.tasks.text train` saved | `LoadOptions` |

    Args:
        spec: KIND or KIND:REST, where KIND is a name of the entry-point group "mdmi_fast.models". Options may follow as
            "?KEY=VALUE&KEY=VALUE", so that commands can give them: "hf:FOLDER?dtype=bfloat16&layers=-1,-2".
        **options: handed to the loader, whose signature is the list of what it takes; they win over those of `spec`.

    Returns:
        The model, frozen.

    Raises:
        ValueError: for an unknown name, a REST that is missing or too much, an option or value in `spec` that the
            loader does not take, or a device that is not there.
    """
    loader, rest, given = find_loader(spec)
    options = {**given, **options}
    if "device" in options:
        _check_device(options["device"], spec.partition("?")[0].partition(":")[0])
    model: MaskedModel = loader(*rest, **options)
    return model


def find_loader(spec: str) -> tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]:
    """What `load_model` calls for a name: the loader, the REST for it if there is one, and the options. Loads nothing.

    Raises:
        ValueError: for an unknown name, a REST that is missing or too much, or an option or value that the loader does not
            take.
    """
    name, _, query = spec.partition("?")
    kind, _, rest = name.partition(":")
    if kind not in registered("mdmi_fast.models"):
        raise ValueError(
            f"load_model: nothing is registered as {kind!r}; known: {', '.join(registered('mdmi_fast.models'))}; a model "
            f"of transformers, on the hub or in a folder, is hf:{name}"
        )
    loader = resolve("mdmi_fast.models", kind)
    first = next(iter(inspect.signature(loader).parameters.values()), None)
    takes_rest = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    if rest and not takes_rest:
        raise ValueError(f"load_model: there is one {kind} only, without a name behind it, got {spec!r}")
    if not rest and first is not None and takes_rest and first.default is first.empty:
        raise ValueError(f"load_model: {kind} needs to know which, {kind}:{first.name.upper()}, got {spec!r}")
    return loader, (rest,) if rest else (), _read_options(query, loader, kind) if query else {}


def model_options(spec: str) -> list[str]:
    """The options that the loader of a name takes.

    Raises:
        ValueError: as `find_loader`.
    """
    return list(_options_of(find_loader(spec)[0]))


def _read_options(query: str, loader: Callable[..., Any], kind: str) -> dict[str, Any]:
    """The values of "KEY=VALUE&KEY=VALUE", read as the loader's annotations say."""
    known = _options_of(loader)
    found = {}
    for part in query.split("&"):
        key, equals, text = part.partition("=")
        key = _moved.argument(loader, key)
        if not equals or key not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ValueError(f"{kind}: options are KEY=VALUE and {kind} {takes}; got {part!r}")
        try:
            found[key] = _read_value(text, known[key])
        except ValueError as error:
            raise ValueError(f"{kind}: option {key} must be {error}, got {text!r}") from None
    return found


def _options_of(loader: Callable[..., Any]) -> dict[str, Any]:
    """name -> type of the loader's keyword-only arguments, and of those in a TypedDict that it hands on."""
    hints, found = get_type_hints(loader), {}
    for name, parameter in inspect.signature(loader).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[name] = hint
        elif parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is Unpack:
            found |= get_type_hints(get_args(hint)[0])
    return found


def _read_value(text: str, hint: Any) -> Any:
    """Raises ValueError with what was expected."""
    kinds = get_args(hint) or (hint,)
    if torch.dtype in kinds:
        dtype = vars(torch).get(text)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a dtype of torch such as float32, bfloat16 or float16")
        return dtype
    if bool in kinds:
        if text not in ("true", "false"):
            raise ValueError("true or false")
        return text == "true"
    several = any(int in get_args(kind) for kind in kinds)
    if several or int in kinds:
        try:
            numbers = tuple(int(number) for number in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or (len(numbers) > 1 and not several):
            raise ValueError("whole numbers with commas between them" if several else "a whole number")
        return numbers[0] if int in kinds and len(numbers) == 1 else numbers
    return text


def _check_device(device: Any, kind: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on what it was built for
        reason = str(error).splitlines()[0]
        raise ValueError(f"{kind}: device {str(device)!r} cannot be used: {reason}") from None
