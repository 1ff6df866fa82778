"""The Triton kernels without a GPU: values under Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mdmi_fast import UnsupportedError, ops

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
INTERPRETER = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_kernels_give_the_values_of_float64_references() -> None:
    files = sorted(str(path) for path in Path(__file__).parent.glob("test_triton_*.py"))
    options = ["-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=INTERPRETER,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_the_gpu_check_runs_through_in_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--rehearse", "--output", str(tmp_path)]
    done = subprocess.run(command, env=INTERPRETER, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (table,) = tmp_path.glob("*.csv")
    text = table.read_text()
    assert "rehearsal" in text
    assert "pairwise_mlp" in text
    assert "refused" not in text


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_tensors_on_a_cpu_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UnsupportedError, match="triton: runs on cuda tensors, got cpu"):
        ops.entropy(torch.zeros(3), backend="triton")
