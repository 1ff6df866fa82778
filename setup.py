"""The C++ extension and nothing else: all metadata is in pyproject.toml. MDMI_NO_EXT=1 leaves the extension out."""

import os
from pathlib import Path

from setuptools import setup


def extensions():
    if os.environ.get("MDMI_NO_EXT") == "1":
        return []
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    ParallelCompile(default=0).install()
    return [
        Pybind11Extension(
            "mdmi_fast._C",
            sources=sorted(map(str, Path("csrc").glob("*.cpp"))),
            depends=sorted(
                map(str, [*Path("csrc").glob("*.hpp"), *Path("csrc").glob("*.inc")])
            ),  # rebuilds, and belongs to the source distribution
            cxx_std=17,
            # No contraction: costs of a selection must round the same everywhere; kernels ask for fma by name.
            # No target flags: each isa_*.cpp names its own, the rest must run on any processor.
            # No uninitialized warnings: gcc 12 sees them in its own header of AVX-512 intrinsics.
            extra_compile_args=[
                *("-O3", "-ffp-contract=off", "-fno-trapping-math", "-pthread"),
                *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
            ],
            extra_link_args=["-pthread"],
        )
    ]


setup(ext_modules=extensions())
