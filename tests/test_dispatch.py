"""Which backend runs a call, and what is said where none can."""

from __future__ import annotations

import pickle
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

import mdmi_fast
from mdmi_fast import ops
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.ops import _dispatch

X = torch.zeros(2, 3)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], types.ModuleType | str]]:
    """Backends as the test says: modules, or reasons why there is none."""

    class Table(dict[tuple[str, str], types.ModuleType | str]):
        def __setitem__(self, key: tuple[str, str], value: types.ModuleType | str) -> None:
            super().__setitem__(key, value)
            _dispatch._able.cache_clear()

    table = Table()
    real = _dispatch._module
    monkeypatch.setattr(_dispatch, "_module", lambda backend, stem: table.get((backend, stem)) or real(backend, stem))
    monkeypatch.delenv("MDMI_BACKEND", raising=False)
    _dispatch._say_slower_once.cache_clear()
    yield table
    _dispatch._able.cache_clear()


def module(**functions: object) -> types.ModuleType:
    made = types.ModuleType("made")
    vars(made).update(functions)
    return made


def nines(logits: torch.Tensor) -> torch.Tensor:
    return torch.full(logits.shape[:-1], 9.0)


def test_cpp_is_the_default_on_a_cpu_and_torch_where_it_cannot_run(modules) -> None:
    modules["cpp", "stats"] = module(entropy=nines)
    assert ops.entropy(X).tolist() == [9, 9]
    modules["cpp", "stats"] = module(token_stats=nines)
    assert float(ops.entropy(X)[0]) == pytest.approx(1.0986, abs=1e-4)
    modules["cpp", "stats"] = module(entropy=nines, refusals=lambda op, tensors, precision: ["not today"])
    assert float(ops.entropy(X)[0]) == pytest.approx(1.0986, abs=1e-4)


def test_a_missing_extension_is_said_once(modules) -> None:
    modules["cpp", "stats"] = "cannot be imported (No module named 'mdmi_fast._C')"
    with pytest.warns(UserWarning, match="slower torch backend"):
        ops.entropy(X)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ops.entropy(X)
        ops.token_stats(X)
        ops.entropy(X, backend="torch")
    assert not said


def test_the_environment_overrides_the_default_and_the_argument_overrides_both(modules, monkeypatch) -> None:
    modules["cpp", "stats"] = module(entropy=nines)
    monkeypatch.setenv("MDMI_BACKEND", "torch")
    assert float(ops.entropy(X)[0]) == pytest.approx(1.0986, abs=1e-4)
    assert ops.entropy(X, backend="cpp").tolist() == [9, 9]
    monkeypatch.setenv("MDMI_BACKEND", "triton")
    with pytest.raises(UnsupportedError):
        ops.entropy(X)
    monkeypatch.setenv("MDMI_BACKEND", "")
    assert ops.entropy(X).tolist() == [9, 9]


def test_a_backend_that_cannot_run_is_refused_with_the_reasons_of_all(modules) -> None:
    modules["cpp", "stats"] = module(refusals=lambda op, tensors, precision: ["never asked"])
    with pytest.raises(UnsupportedError) as caught:
        ops.entropy(X, backend="triton")
    assert str(caught.value).splitlines() == [
        "entropy (shape (2, 3) float32 on cpu) by triton is not supported:",
        "  triton: runs on cuda tensors, got cpu",
        "  cpp: has no entropy yet",
        "  torch: can run this call, but was not asked to",
    ]
    assert caught.value.reasons[0] == "triton: runs on cuda tensors, got cpu"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_precision_that_no_backend_has_is_unsupported(modules) -> None:
    modules["cpp", "pairwise"] = "cannot be imported (not built)"
    with pytest.raises(UnsupportedError, match="torch: has the precisions fp32 and bf16, not tf32"):
        ops.pairwise_mlp(X, X, [], [], torch.zeros(3), 0.0, precision="tf32")


def test_names_of_backends_are_checked(monkeypatch) -> None:
    with pytest.raises(ValueError, match="entropy: backend must be one of 'triton', 'cpp', 'torch', got 'cuda'"):
        ops.entropy(X, backend="cuda")
    monkeypatch.setenv("MDMI_BACKEND", "numpy")
    with pytest.raises(ValueError, match="entropy: MDMI_BACKEND must be one of 'triton', 'cpp', 'torch', got 'numpy'"):
        ops.entropy(X)


def test_the_gradient_runs_on_the_backend_of_the_call(modules) -> None:
    modules["cpp", "stats"] = module(entropy=nines, entropy_backward=lambda grad, logits: torch.full_like(logits, 7.0))
    for backend, expected in ((None, 7.0), ("cpp", 7.0), ("torch", 0.0)):
        x = X.clone().requires_grad_()
        ops.entropy(x, backend=backend).sum().backward()
        assert x.grad[0, 0] == expected


def test_the_table_of_backends_covers_every_op() -> None:
    table = ops.backends()
    assert set(table) == {op for names in _dispatch.OPS.values() for op in names}
    assert set(table) <= set(ops.__all__)
    for reasons in table.values():
        assert set(reasons) == set(ops.BACKENDS)
        assert reasons["torch"] == []
        assert reasons["triton"] == ["runs on cuda tensors, got cpu"]
    assert ops.backends("cuda")["entropy"]["cpp"] == ["runs on cpu tensors, got cuda"]


def test_threads_follow_torch_until_they_are_set(monkeypatch) -> None:
    from mdmi_fast import _threads

    monkeypatch.setattr(_threads, "_threads", None)
    assert mdmi_fast.get_num_threads() == torch.get_num_threads()
    mdmi_fast.set_num_threads(3)
    assert mdmi_fast.get_num_threads() == 3
    with pytest.raises(ValueError, match="set_num_threads: n must be at least 1, got 0"):
        mdmi_fast.set_num_threads(0)
    with pytest.raises(TypeError, match="set_num_threads: n must be an int, got float"):
        mdmi_fast.set_num_threads(2.0)


def test_what_is_no_device_and_no_shape_to_warm_up_for_is_named() -> None:
    with pytest.raises(ValueError, match="backends: device must be one such as 'cpu' or 'cuda', got 'bogus'"):
        ops.backends("bogus")
    with pytest.raises(TypeError, match="warmup: shapes must hold StepShape, got"):
        ops.warmup([(10, 20)], device="cpu")  # type: ignore[list-item]
    for sizes, message in (
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"layers": ()}, "layers must be a tuple of one width or more"),
        ({"layers": (8, 0)}, "layers must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=f"StepShape: {message}"):
            ops.StepShape(**{"vocabulary": 5, "positions": 4, **sizes})  # type: ignore[arg-type]
