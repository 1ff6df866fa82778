"""Which positions to unmask together, by ctypes: numpy arrays, no torch. For engines that load a shared library.

python examples/select_ctypes.py [FOLDER], where FOLDER holds libmdmi_fast.so; without one that of the installed package.
"""

import argparse
import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def find(folder):
    """The library's file, in a folder or, for None, in that of the package, which is found without importing it."""
    if folder is None:
        package = find_spec("mdmi_fast")
        if package is None:
            raise SystemExit("mdmi_fast is not installed: name the FOLDER that holds libmdmi_fast.so")
        folder = Path(package.origin).parent
    path = Path(folder) / "libmdmi_fast.so"
    if not path.is_file():
        raise SystemExit(f"there is no {path}: name the FOLDER that holds it")
    return path


def load(folder):
    """The library, with the functions that are used declared as in mdmi_fast.h."""
    library = ctypes.CDLL(str(find(folder)))
    library.mdmi_last_error.restype = ctypes.c_char_p
    f32, f64, u8, i64 = (
        np.ctypeslib.ndpointer(dtype, flags="C") for dtype in (np.float32, np.float64, np.uint8, np.int64)
    )
    size, count, real = ctypes.c_int64, ctypes.c_int, ctypes.c_double
    library.mdmi_token_stats.argtypes = [f32, size, size, f32, f32, i64, count]
    library.mdmi_select_budget.argtypes = [size, size, f32, f32, u8, f64, real, real, count, size, u8, f64, count]
    return library


def checked(library, code):
    if code != 0:
        raise ValueError(library.mdmi_last_error().decode())


def main(folder):
    library = load(folder)
    batch, n, vocabulary = 2, 5, 7
    random = np.random.default_rng(0)
    logits = random.normal(size=(batch, n, vocabulary)).astype(np.float32)
    mi = random.random((batch, n, n), dtype=np.float32) / 4
    mask = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=np.uint8)

    entropy, confidence = (np.empty((batch, n), dtype=np.float32) for _ in range(2))
    token, selected = np.empty((batch, n), dtype=np.int64), np.empty((batch, n), dtype=np.uint8)
    spent, gamma = np.empty(batch), np.full(batch, 5.0)
    checked(library, library.mdmi_token_stats(logits, batch * n, vocabulary, entropy, confidence, token, 1))
    checked(
        library,
        library.mdmi_select_budget(batch, n, entropy, mi, mask, gamma, 1.0, 1.0, 0, 0, selected, spent, 1),
    )
    for row in range(batch):
        print(
            f"sequence {row}: write {token[row, selected[row] == 1].tolist()} at {np.flatnonzero(selected[row]).tolist()}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Choose positions to unmask together, by ctypes.")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="holds libmdmi_fast.so (default: the package's)")
    main(parser.parse_args().folder)
