"""Compiling what the host code would launch, for any target and without a GPU, and reading what came out.

    with recorded("sm_90") as launches:
        stats.entropy(torch.empty(64, 33))
    code = read(compiled(launches[0]), "sm_90")

The tensors may lie on the CPU: nothing is run.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from mdmi_fast.backends.triton import _common

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory one program may have."""

_TENSOR_CORE = {"sm_80": r"HMMA", "sm_90": r"HGMMA", "sm_100": r"UTC\w*MMA", "gfx942": r"v_mfma"}


def is_product(instruction: str, target: str) -> bool:
    """Whether an instruction is one of the tensor cores'."""
    return bool(re.search(_TENSOR_CORE[target], instruction))


class Launch(NamedTuple):
    kernel: triton.JITFunction
    target: str
    tile: _common.Tile
    args: tuple[object, ...]
    constants: dict[str, object]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def options(self) -> dict[str, object]:
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": self.tile.fusion}


@contextmanager
def recorded(target: str) -> Iterator[list[Launch]]:
    """Launches of the block are kept instead of run, with the choices made for a target."""
    launches: list[Launch] = []
    saved = _common.launch, _common.target_name

    def record(kernel, n_programs, tile, *args, **constants) -> None:
        launches.append(Launch(kernel, target, tile, args, constants))

    _common.launch, _common.target_name = record, lambda device: target
    try:
        yield launches
    finally:
        _common.launch, _common.target_name = saved


def _bound(launch: Launch) -> tuple[BaseBackend, dict[str, object], list[object], dict[str, object]]:
    """The arguments of a launch by name, and what Triton itself makes of them before it looks for a compiled kernel."""
    backend = make_backend(TARGETS[launch.target])
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    return backend, *bind(*launch.args, **launch.constants, **launch.options)


def distinct(launches: list[Launch]) -> list[Launch]:
    """Those that need a compilation of their own."""
    kinds = {}
    for launch in launches:
        _, _, specialization, options = _bound(launch)
        kinds[str((launch.name, launch.target, specialization, options))] = launch
    return list(kinds.values())


def _with_ones(launch: Launch) -> Launch:
    """A launch whose integers are 1, but for those that are kept from being compiled in."""

    def one(value: object) -> object:
        if isinstance(value, tuple):
            members = map(one, value)
            return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
        return 1 if isinstance(value, int) and value >= 0 else value  # below 0: `_common.varying`

    params = [param for param in launch.kernel.params if not param.is_constexpr]
    args = [x if p.do_not_specialize else one(x) for p, x in zip(params, launch.args, strict=True)]
    return launch._replace(args=tuple(args))


def compiled(launch: Launch, ones: bool = False) -> CompiledKernel:
    """A launch's kernel for its target; ones: as if every integer that may be compiled in were 1."""
    launch = _with_ones(launch) if ones else launch
    backend, args, specialization, options = _bound(launch)
    given = {**launch.constants, **launch.options}
    options, *source = launch.kernel._pack_args(backend, given, args, specialization, options)
    source = ASTSource(launch.kernel, *source)
    return triton.compile(source, target=TARGETS[launch.target], options=options.__dict__)


class Code(NamedTuple):
    registers: int
    spilled: int
    """Bytes of stack, and on AMD spilled vector registers, on NVIDIA LDL and STL instructions; 0 or bad."""
    shared: int
    threads: int
    tensor_core: int
    """Tensor-core instructions."""
    loop: Counter[str]
    """Instructions of the innermost loop with tensor-core instructions; without any, of the longest innermost loop."""


def _tool(name: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *args], capture_output=True, text=True, check=True).stdout


def _innermost(code: list[tuple[int, str, int | None]], target: str) -> Counter[str]:
    """Mix of a loop, from (place, instruction, where it jumps)."""
    ends = [(to, place) for place, _, to in code if to is not None and to < place]
    loops = [(a, z) for a, z in ends if not any(a <= b and y <= z and (a, z) != (b, y) for b, y in ends)]
    mixes = [Counter(name for place, name, _ in code if a <= place <= z) for a, z in loops]
    if any(is_product(name, target) for _, name, _ in code):
        # a loop around the product's is innermost where that one is unrolled
        every = [Counter(name for place, name, _ in code if a <= place <= z) for a, z in ends]
        mixes = [m for m in every if any(is_product(name, target) for name in m)] or [
            Counter(name for _, name, _ in code)
        ]
        return min(mixes, key=lambda m: m.total())
    return max(mixes, key=lambda m: m.total(), default=Counter(name for _, name, _ in code))


_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ |@!?UPT )?\s*([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_GCN = re.compile(r"^\s+([a-z][\w]+)(.*)$")


def _sass(text: str) -> list[tuple[int, str, int | None]]:
    code = []
    for place, name, operands in _SASS.findall(text):
        jump = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        code.append((int(place, 16), name, int(jump[1], 16) if jump else None))
    return code


def _gcn(text: str) -> list[tuple[int, str, int | None]]:
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.split(".Lfunc_end0:")[0].splitlines():
        if label := re.match(r"^(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif (found := _GCN.match(line)) and not found[1].startswith("."):
            lines.append((found[1], found[2]))
    jumps = [re.search(r"(\.L\w+)", rest) if "branch" in name else None for name, rest in lines]
    return [
        (at, name, labels.get(jump[1]) if jump else None)
        for at, ((name, _), jump) in enumerate(zip(lines, jumps, strict=True))
    ]


def read(kernel: CompiledKernel, target: str) -> Code:
    """What a compiled kernel uses and consists of."""
    threads = kernel.metadata.num_warps * TARGETS[target].warp_size
    if target == "gfx942":
        text = kernel.asm["amdgcn"]
        field = {
            key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        }
        registers = field["vgpr_count"]
        # spilled scalars go to lanes of a vector register, not to memory
        spilled = field["vgpr_spill_count"] + field["private_segment_fixed_size"]
        code = _gcn(text)
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "-res-usage", file.name)
            code = _sass(_tool("cuobjdump", "-sass", file.name))
        registers = int(re.search(r"REG:(\d+)", usage)[1])
        stack = int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
        spilled = stack + sum(name.startswith(("LDL", "STL")) for _, name, _ in code)
    n_products = sum(is_product(name, target) for _, name, _ in code)
    return Code(registers, spilled, kernel.metadata.shared, threads, n_products, _innermost(code, target))
