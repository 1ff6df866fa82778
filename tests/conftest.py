"""Fixed seeds, uninitialised memory full of NaN, and a backend to run on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mdmi_fast.cli import main
from mdmi_fast.ops import _dispatch

hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],  # the backend fixture is a constant
)
hypothesis.settings.load_profile("tests")

# Test tensors are small, threads would mostly wait for each other. `two_threads` is for what depends on them.
torch.set_num_threads(int(os.environ.get("MDMI_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what a test might use by accident
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_is_nan() -> Iterator[None]:
    """Deterministic mode fills torch.empty with NaN, so that an element nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _stem(op: str) -> str:
    return next(stem for stem, ops in _dispatch.OPS.items() if op.removesuffix("_backward") in ops)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run on a CPU in this process; test_triton.py starts such a one for the files test_triton_*.py."""

collect_ignore_glob = [] if INTERPRETED else ["test_triton_*.py"]


@pytest.fixture(params=["torch", "cpp", *(["triton"] if INTERPRETED else [])])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that can run on this machine the ops that the test names with `@pytest.mark.op`."""
    name: str = request.param
    for mark in request.node.iter_markers("op"):
        for op in mark.args:
            reasons = _dispatch._missing(name, _stem(op), op, "cpu")
            if reasons:
                pytest.skip(f"{name}: {op} {reasons[0]}")
    return name


@pytest.fixture
def two_threads() -> Iterator[None]:
    """More threads than one, where results must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class _Allocations(TorchDispatchMode):
    """Watches the storages that torch operations return."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.largest = 0
        self.known = {t.untyped_storage().data_ptr() for t in tree_leaves(inputs) if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.fixture
def largest_allocation() -> Callable[..., int]:
    """Runs a function of the torch backend and returns the bytes of the largest tensor it makes."""

    def run(function: Callable[..., Any], *args: Any) -> int:
        with _Allocations(args) as allocations:
            function(*args)
        return allocations.largest

    return run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (exit code, output, what it said on standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
