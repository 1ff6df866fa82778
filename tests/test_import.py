"""Importing is free: no driver, no Triton, no extension needed, no change to floating point."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap

import pytest

import mdmi_fast
from mdmi_fast import _moved
from mdmi_fast.models.call import forbidden_tokens_of
from mdmi_fast.models.sequences import SequenceModel
from tools import measure_house


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that treats warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_ops_touches_neither_a_driver_nor_triton() -> None:
    python(
        """
        import sys
        import torch
        before = set(sys.modules)
        import mdmi_fast
        import mdmi_fast.ops
        new = set(sys.modules) - before
        assert not torch.cuda.is_initialized()
        assert not any(name.split(".")[0] == "triton" for name in new), sorted(new)
        extras = ("aiohttp", "matplotlib", "prometheus_client", "transformers")
        assert not any(name.startswith(("mdmi_fast.backends.triton", *extras)) for name in new), sorted(new)
        """
    )


def test_importing_does_not_flush_denormals() -> None:
    code = """
        import mdmi_fast, torch
        from mdmi_fast import ops
        ops.entropy(torch.zeros(3, 4))
        ops.select_budget(torch.zeros(3), torch.zeros(3, 3), gamma=1.0)
        assert 5e-324 != 0.0 and 5e-324 / 1.0 > 0.0
        assert float(torch.tensor(1e-45)) != 0.0
        print("alive")
        """
    assert python(code, MDMI_BACKEND=os.environ.get("MDMI_BACKEND", "")).strip() == "alive"


def test_works_without_the_extension_and_without_triton() -> None:
    code = """
        import sys, warnings
        sys.modules["mdmi_fast._C"] = None
        sys.modules["triton"] = None
        import torch
        from mdmi_fast import ops
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                ops.entropy(torch.zeros(3, 4))
                ops.select_budget(torch.zeros(3), torch.zeros(3, 3), gamma=1.0)
        print(len([w for w in said if "slower torch backend" in str(w.message)]))
        try:
            ops.entropy(torch.zeros(3), backend="cpp")
        except ops._dispatch.UnsupportedError as error:
            print(error.reasons[1].startswith("cpp: cannot be imported"))
        """
    assert python(code, MDMI_BACKEND="").split() == ["1", "True"]


def test_every_module_imports_without_any_extra_and_by_new_names() -> None:
    code = """
        import importlib, pkgutil, sys
        import torch
        for extra in ("aiohttp", "filelock", "matplotlib", "networkx", "opentelemetry", "platformdirs",
                      "prometheus_client", "redis", "transformers", "Bio", "esm"):
            sys.modules[extra] = None
        import mdmi_fast
        names = [module.name for module in pkgutil.walk_packages(mdmi_fast.__path__, "mdmi_fast.")]
        # libmdmi_fast.so is for programs without Python
        others = ("mdmi_fast.backends.triton", "mdmi_fast.bench", "mdmi_fast.__main__", "mdmi_fast.libmdmi_fast")
        own = [name for name in names if not name.startswith(others)]
        for name in own:
            importlib.import_module(name)
        print(len(own) > 60, [name for name in mdmi_fast._moved.MODULES if name in sys.modules])
        """
    assert python(code).strip() == "True []"


@pytest.mark.parametrize("name", mdmi_fast.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(mdmi_fast, name) is not None


def test_modules_that_moved_are_found_by_their_old_names_with_a_warning() -> None:
    code = """
        import warnings
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as said:
            import mdmi_fast.decode.loop
            from mdmi_fast.decode import TopK
            from mdmi_fast.decode.guard import Guard
            from mdmi_fast.decode.policies.base import Rule
            from mdmi_fast.native import pairwise
            from mdmi_fast.monitor.metrics import Collector
        import mdmi_fast, mdmi_fast.decoding.loop, mdmi_fast.watch.guard, mdmi_fast.decoding.policies.rule
        print({str(w.message).split()[0] for w in said} >= {"mdmi_fast.decode", "mdmi_fast.decode.guard", "mdmi_fast.native"})
        print(all(w.category is DeprecationWarning for w in said))
        print(mdmi_fast.decode.loop is mdmi_fast.decoding.loop, Guard is mdmi_fast.watch.guard.Guard)
        print(Rule is mdmi_fast.decoding.policies.rule.Rule, mdmi_fast.TopK is TopK)
        print(mdmi_fast.decoding.loop.__spec__.name, pairwise.__name__)
        model = mdmi_fast.load_model("sudoku")
        import torch
        print(mdmi_fast.decode(model, torch.ones(1, 81, dtype=torch.int64), TopK(1)).passes.tolist())
        """
    assert python(code).splitlines() == [
        *("True", "True", "True True", "True True"),
        "mdmi_fast.decoding.loop mdmi_fast.backends.cpp.pairwise",
        "[0]",
    ]


def test_decode_is_the_function() -> None:
    assert python("import mdmi_fast.decoding, mdmi_fast; print(mdmi_fast.decode.__name__)").strip() == "decode"


@pytest.mark.parametrize("old", _moved.MODULES)
def test_what_moved_is_there(old: str) -> None:
    new = _moved.new_name(old)
    assert new is not None
    assert importlib.import_module(new).__name__ == new


def test_imports_go_downwards_only() -> None:
    assert measure_house.upward_imports() == []
    assert measure_house.rooms_without_floor() == []


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'mdmi_fast' has no attribute 'nothing'"):
        mdmi_fast.nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    ("package", "old"), [(package, old) for package, names in _moved.NAMES.items() for old in names]
)
def test_old_public_names_give_the_new_ones_with_a_warning(package: str, old: str) -> None:
    module = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{package}.{old} is now called"):
        found = getattr(module, old)
    assert found is getattr(module, _moved.NAMES[package][old])


def test_old_arguments_are_taken_with_a_warning_and_not_beside_the_new() -> None:
    @_moved.renamed(old="new")
    def function(first: int, *, new: int = 0) -> tuple[int, int]:
        return first, new

    with pytest.warns(DeprecationWarning, match="function: old is now called new"):
        assert function(1, old=2) == (1, 2)
    assert function(1, new=3) == (1, 3)
    with pytest.raises(TypeError, match="old is the old name of new; give one of them"):
        function(1, old=2, new=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        function(1, other=2)


def test_a_model_that_still_says_never_is_understood() -> None:
    model = SequenceModel(vocab_size=4, hidden_size=1, mask_token_id=3, forbidden_tokens=[1])
    with pytest.warns(DeprecationWarning, match="never is now called forbidden_tokens"):
        other = SequenceModel(vocab_size=4, hidden_size=1, mask_token_id=3, never=[1])  # type: ignore[call-arg]
    assert forbidden_tokens_of("test", other) == forbidden_tokens_of("test", model) == {1, 3}

    class Old:
        vocab_size = 4
        never = (2,)

    with pytest.warns(DeprecationWarning, match=r"Old\.never is now called forbidden_tokens"):
        assert forbidden_tokens_of("test", Old()) == {2}  # type: ignore[arg-type]
