"""The C++ extension, the same core as a library without Python (libmdmi_fast.so, mdmi_fast.h), and nothing else.

All metadata is in pyproject.toml. MDMI_NO_EXT=1 leaves both out.
"""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


def extensions():
    if os.environ.get("MDMI_NO_EXT") == "1":
        return []
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension

    ParallelCompile(default=0).install()
    return [
        Pybind11Extension(
            "mdmi_fast._C",
            sources=sorted(map(str, Path("csrc").rglob("*.cpp"))),
            include_dirs=["csrc"],
            depends=sorted(
                map(str, [*Path("csrc").rglob("*.h"), *Path("csrc").rglob("*.hpp"), *Path("csrc").rglob("*.inc")])
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


class BuildExtension(build_ext):
    """Links the objects of the extension, without the one that knows Python, once more."""

    def build_extension(self, ext):
        super().build_extension(ext)
        sources = [source for source in ext.sources if Path(source).stem != "bindings"]
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        self.compiler.link_shared_object(
            self.compiler.object_filenames(sources, output_dir=self.build_temp),
            str(folder / "libmdmi_fast.so"),
            extra_postargs=ext.extra_link_args,
            target_lang="c++",
        )
        shutil.copy("csrc/api/mdmi_fast.h", folder)

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for ext in self.extensions:
            for name in ("libmdmi_fast.so", "mdmi_fast.h"):
                shutil.copy(Path(self.build_lib, "mdmi_fast", name), Path(self.get_ext_fullpath(ext.name)).parent)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
