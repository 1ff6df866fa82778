# ruff: noqa: N999 - the extension module's name
"""CPU kernels; mdmi_fast/backends/cpp is the only caller.

Tensors are addresses, which the caller keeps alive, with sizes, strides in elements and dtype codes (0 float32,
1 bfloat16, 2 float16, 3 float64).
"""

from collections.abc import Sequence

Strides2 = Sequence[int]
Strides3 = Sequence[int]
Rows = tuple[int, int, Strides3]  # address, dtype, (inner size, outer stride, inner stride)
Stack = tuple[Rows, Strides3, int]  # rows of k = 0, (K, stride of k, rows of each), address of the weights
Out = tuple[int, int]  # address, dtype
Half = tuple[int, int, Strides2]
Shift = tuple[int, int, int, int]  # values, how many, relation, its stride
Halves = tuple[Half, Half, Sequence[int], int, Strides2, Shift]  # u, v, shape, mask, shift
Rule = tuple[int, bool, bool]  # symmetry, multiply, softplus
Weights = tuple[Sequence[tuple[int, int, int, int]], int, int, float, bool]
Gradients = tuple[int, int, Sequence[int], Sequence[int], int, int, int]

ROW_STATE_BYTES: int
sudoku_weights: int
sudoku_hidden: int
sudoku_codes: int
no_window: int

def isa() -> str:
    """The instruction set in use; RuntimeError where MDMI_FORCE_ISA names one that cannot run here."""

def supported_isas() -> list[str]: ...
def fma_burst(rounds: int, /) -> int:
    """Multiply-adds in registers, as fast as this processor can; returns the operations done."""

def select_budget(
    op: str,
    shape: Sequence[int],
    entropy: int,
    entropy_dtype: int,
    entropy_strides: Strides2,
    mask: int,
    mask_strides: Strides2,
    mi: int,
    mi_dtype: int,
    mi_strides: Strides3,
    window: int,
    gamma: int,
    lam: float,
    entropy_weight: float,
    cheapest: bool,
    limit: int,
    selected: int,
    spent: int,
    threads: int,
    /,
) -> None: ...
def select_threshold(
    shape: Sequence[int],
    entropy: int,
    entropy_dtype: int,
    entropy_strides: Strides2,
    mask: int,
    mask_strides: Strides2,
    mi: int,
    mi_dtype: int,
    mi_strides: Strides3,
    tau: float,
    limit: int,
    selected: int,
    spent: int,
    threads: int,
    /,
) -> None: ...
def color(
    shape: Sequence[int],
    mask: int,
    mask_strides: Strides2,
    mi: int,
    mi_dtype: int,
    mi_strides: Strides3,
    tau: float,
    group: int,
    threads: int,
    /,
) -> None: ...
def row_stats(logits: Rows, n_rows: int, width: int, out: Sequence[int], threads: int, /) -> None: ...
def stats_backward(
    logits: Rows, n_rows: int, width: int, grad: Sequence[int], d_logits: Out, threads: int, /
) -> None: ...
def new_states(states: int, n_rows: int, /) -> None: ...
def absorb_tile(tile: Rows, n_rows: int, width: int, first_token: int, states: int, threads: int, /) -> None: ...
def finish_rows(states: int, n_rows: int, out: Sequence[int], /) -> None: ...
def stack_stats(logits: Stack, base: Rows, width: int, out: Sequence[int], threads: int, /) -> None:
    """out: addresses of entropy of the mixture, expected entropy and expected KL; 0, like that of the base, where unwanted."""

def expected_kl_backward(
    logits: Stack, base: Rows, width: int, grad: int, d_logits: Out, d_base: Out, threads: int, /
) -> None: ...
def mixture_entropy_backward(logits: Stack, width: int, grad: int, d_logits: Out, threads: int, /) -> None: ...

class PackedNetwork:
    """Weights of a pair network in the layout of the kernels."""

    def __init__(self, weights: Weights, /) -> None: ...

def score_all(network: PackedNetwork, halves: Halves, rule: Rule, out: int, threads: int, /) -> None: ...
def score_rows(
    network: PackedNetwork, halves: Halves, rule: Rule, rows: int, n_rows: int, out: int, threads: int, /
) -> None: ...
def score_band(network: PackedNetwork, halves: Halves, rule: Rule, window: int, out: int, threads: int, /) -> None: ...
def score_all_backward(
    weights: Weights, halves: Halves, rule: Rule, grad: int, out: Gradients, threads: int, /
) -> None: ...
def score_rows_backward(
    weights: Weights, halves: Halves, rule: Rule, rows: int, n_rows: int, grad: int, out: Gradients, threads: int, /
) -> None: ...
def score_band_backward(
    weights: Weights, halves: Halves, rule: Rule, window: int, grad: int, out: Gradients, threads: int, /
) -> None: ...
def score_and_select(
    network: PackedNetwork,
    halves: Halves,
    rule: Rule,
    entropy: int,
    entropy_dtype: int,
    entropy_strides: Strides2,
    gamma: int,
    lam: float,
    entropy_weight: float,
    limit: int,
    selected: int,
    spent: int,
    threads: int,
    /,
) -> int:
    """Returns how many pairs were scored."""

def mlp(
    network: PackedNetwork,
    x: int,
    rows: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    out: int,
    threads: int,
    /,
) -> None: ...
def sudoku_forward(
    tokens: int,
    boards: int,
    weights: int,
    iterations: int,
    codes: int,
    logits: int,
    hidden: int,
    threads: int,
    /,
) -> None: ...
