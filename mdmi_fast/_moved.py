"""Old names of what was moved or renamed. They work until version 0.3, with a DeprecationWarning; then this file goes."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

MODULES = {
    "mdmi_fast.decode": "mdmi_fast.decoding",
    "mdmi_fast.decode.audit": "mdmi_fast.watch.audit",
    "mdmi_fast.decode.cache": "mdmi_fast.cache",
    "mdmi_fast.decode.evidence": "mdmi_fast.watch.evidence",
    "mdmi_fast.decode.guard": "mdmi_fast.watch.guard",
    "mdmi_fast.decode.policies.base": "mdmi_fast.decoding.policies",
    "mdmi_fast.decode.policies.mutual_information": "mdmi_fast.decoding.policies",
    "mdmi_fast.decode.tune": "mdmi_fast.decoding.calibrate",
    "mdmi_fast.eager": "mdmi_fast.backends.torch",
    "mdmi_fast.estimator.network": "mdmi_fast.estimator",
    "mdmi_fast.kernels": "mdmi_fast.backends.triton",
    "mdmi_fast.models.antibody": "mdmi_fast.tasks.protein.models",
    "mdmi_fast.models.letters": "mdmi_fast.tasks.protein.letters",
    "mdmi_fast.monitor": "mdmi_fast.watch",
    "mdmi_fast.native": "mdmi_fast.backends.cpp",
    "mdmi_fast.ops._checks": "mdmi_fast.checks",
    "mdmi_fast.ops.mlp": "mdmi_fast.ops.dense",
    "mdmi_fast.reference.mlp": "mdmi_fast.reference.dense",
}
"""Old name -> new name; what lies below a package moved with it."""


NAMES = {
    "mdmi_fast": {"tune": "tune_kernels"},
    "mdmi_fast.decoding": {"Within": "TimeLimited"},
    "mdmi_fast.ops": {"tune": "tune_kernels"},
}
"""Package -> old public name -> new name."""

_Wrapped = TypeVar("_Wrapped", bound=Callable[..., Any])


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=stacklevel + 1)


def names_of(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that had other public names."""

    def old_name(name: str) -> Any:
        if name not in NAMES[package]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _warn(f"{package}.{name}", f"{package}.{NAMES[package][name]}", 2)
        return getattr(sys.modules[package], NAMES[package][name])

    return old_name


def attribute(holder: object, old: str, new: str, default: Any) -> Any:
    """An attribute of somebody's own object, which still has its old name; the default where it has neither."""
    if not hasattr(holder, old):
        return default
    _warn(f"{type(holder).__name__}.{old}", new, 3)
    return getattr(holder, old)


def renamed(**names: str) -> Callable[[_Wrapped], _Wrapped]:
    """Let a function or a method take arguments by their old names: `@renamed(old="new")`."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in [name for name in kwargs if name in names]:
                owner = function.__qualname__.removesuffix(".__init__")
                if names[old] in kwargs:
                    raise TypeError(f"{owner}: {old} is the old name of {names[old]}; give one of them")
                _warn(f"{owner}: {old}", names[old], 2)
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        call.__dict__["old_arguments"] = names
        return call

    return wrap


def argument(function: Callable[..., Any], name: str) -> str:
    """The name that an argument of a function has now."""
    new: str = vars(function).get("old_arguments", {}).get(name, name)
    if new != name:
        _warn(f"{function.__qualname__}: {name}", new, 2)
    return new


_Made = TypeVar("_Made", bound=type)
_OldFields = dict[str, tuple[str, Callable[[Any], Any]]]
_FIELDS: dict[type, _OldFields] = {}
"""Of dataclasses: old name of a field -> its new name and what makes the new value of an old one."""


def renamed_fields(**old: tuple[str, Callable[[Any], Any]]) -> Callable[[_Made], _Made]:
    """Let a dataclass be made with fields by their old names: `@renamed_fields(old=("new", convert))`."""

    def wrap(made: _Made) -> _Made:
        init = vars(made)["__init__"]

        @functools.wraps(init)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in [name for name in kwargs if name in old]:
                new = old[name][0]
                if new in kwargs:
                    raise TypeError(f"{made.__name__}: {name} is the old name of {new}; give one of them")
                kwargs.update([field(made, name, kwargs.pop(name), stacklevel=3)])
            init(self, *args, **kwargs)

        type.__setattr__(made, "__init__", call)
        _FIELDS[made] = old
        return made

    return wrap


def field(made: type, name: str, value: Any, *, stacklevel: int = 2) -> tuple[str, Any]:
    """The name that a field has now, and its value."""
    new, convert = _FIELDS.get(made, {}).get(name, (name, lambda value: value))
    if new != name:
        _warn(f"{made.__name__}: {name}", new, stacklevel)
    return new, convert(value)


def field_name(made: type, name: str) -> str:
    """The name that a field has now."""
    return _FIELDS.get(made, {}).get(name, (name,))[0]


def new_name(old: str) -> str | None:
    """Where a module is found now; None if it did not move."""
    known = [name for name in MODULES if old == name or old.startswith(f"{name}.")]
    if not known:
        return None
    nearest = max(known, key=len)
    return MODULES[nearest] + old[len(nearest) :]


class _Callable(types.ModuleType):
    """`mdmi_fast.decode` is a function; it stays one after somebody imported the package that had the same name."""

    def __init__(self, name: str, package: types.ModuleType, function: Any) -> None:
        super().__init__(name, function.__doc__)
        self.__dict__.update(package.__dict__ | {"__name__": name, "__call__": function, "__wrapped__": function})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["__wrapped__"](*args, **kwargs)


class _Loader(importlib.abc.Loader):
    """Gives the module of the new name under the old one: one module, so that its classes are the same."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        parent, _, name = spec.name.rpartition(".")
        there = vars(sys.modules[parent]).get(name)
        if callable(there):
            return _Callable(spec.name, module, there)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec  # the import system put the old one there


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = new_name(fullname)
        return None if new is None else importlib.machinery.ModuleSpec(fullname, _Loader(new), is_package=True)


def install() -> None:
    """Let old names be found, once a process."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # before one that still finds files of an older checkout
