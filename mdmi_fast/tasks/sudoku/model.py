"""A small masked model of Sudoku boards: tokens 1 to 9, mask token 0.

Every cell holds one vector of 16 numbers per digit. An iteration, always with the same weights, adds to each vector
what the same digit's vectors say in its row, column and box, and what the other digits say in its cell. Relabelling
the digits therefore relabels the answer, which is why 1,424 parameters are enough.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from mdmi_fast.files import replace_file
from mdmi_fast.models import MaskedOutput
from mdmi_fast.ops._register import in_memory

try:
    from mdmi_fast.backends.cpp.sudoku import sudoku_forward
except ImportError:
    sudoku_forward = None  # type: ignore[assignment] # the extension was not built: the eager forward answers

CELLS, DIGITS, WIDTH = 81, 9, 16
VOCABULARY = DIGITS + 1
MASK_TOKEN = 0
POSITION_WIDTH = 27
"""One-hot row, column and box: the network itself treats all cells alike."""
DIGIT_STATE = WIDTH + 3
"""Of the hidden state, per digit: its vector, its probability p, -p log p, and the entropy of the cell."""
HIDDEN_WIDTH = DIGITS * DIGIT_STATE + POSITION_WIDTH

_CHUNK = 32
"""Boards of one eager pass: more of them fall out of the cache, and a fixed number keeps results independent of the batch."""


@cache
def position_codes() -> torch.Tensor:
    """[81, 27] float32: one-hot row, column and box of every cell."""
    cell = torch.arange(CELLS, device="cpu")  # the answer is kept for all devices
    row, column = cell // 9, cell % 9
    return torch.cat([F.one_hot(unit, 9) for unit in (row, column, 3 * (row // 3) + column // 3)], dim=1).float()


def _gather(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of x [C, 9 digits, 81, B] over units: lines [C, 2, 9, 9, B], boxes [C, 9, 3, 3, B], cells [C, 81, B]."""
    c, b = x.shape[0], x.shape[-1]
    triples = _sum_axis(x.view(c, 9, 9, 3, 3, b), 4)
    rows = _sum_axis(triples, 3)
    boxes = _sum_axis(triples.view(c, 9, 3, 3, 3, b), 3)
    columns = _sum_axis(x.view(c, 9, 9, 9, b), 2)
    return torch.stack([rows, columns], 1), boxes, _sum_axis(x, 1)


def _sum_axis(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x.sum(axis) by whole slices, several times faster than the reduction over a middle axis."""
    first, second, *others = x.unbind(axis)
    total = first + second
    for other in others:
        total += other
    return total


def _scatter_(x: torch.Tensor, lines: torch.Tensor, boxes: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Add to every x [C, 9, 81, B] in place what its row, column, box and cell hold: the transpose of `_gather`."""
    c, b = x.shape[0], x.shape[-1]
    x.view(c, 9, 9, 9, b).add_(lines[:, 0].unsqueeze(3)).add_(lines[:, 1].unsqueeze(2))
    x.view(c, 9, 3, 3, 3, 3, b).add_(boxes.view(c, 9, 3, 1, 3, 1, b))
    return x.add_(cells.unsqueeze(1))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.shape = x.shape
        return _gather(x)

    @staticmethod
    def backward(ctx, lines, boxes, cells):  # type: ignore[no-untyped-def]
        return _scatter_(lines.new_zeros(ctx.shape), lines, boxes, cells)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lines, boxes, cells):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(x)
        return _scatter_(x, lines, boxes, cells)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, *_gather(gradient.contiguous())


class SudokuModel(nn.Module):
    """The masked model: callable as `mdmi_fast.MaskedModel`, trainable through `logits_of_every_iteration`.

    Args:
        iterations: how often the tied block is applied; its strength and its cost.

    Raises:
        ValueError: if iterations is less than 1.
    """

    mask_token_id = MASK_TOKEN
    vocab_size = VOCABULARY
    hidden_size = HIDDEN_WIDTH
    forbidden_tokens = (MASK_TOKEN,)
    """Tokens whose logit always is -inf: so decoding can skip it."""
    interchangeable_tokens = range(1, VOCABULARY)
    """Relabelling the digits relabels the answer: labelling then probes one of those not yet on the board for all."""

    def __init__(self, iterations: int = 12) -> None:
        super().__init__()
        if iterations < 1:
            raise ValueError(f"SudokuModel: iterations must be at least 1, got {iterations}")
        self.iterations = iterations
        self.embed = _weight(WIDTH, 3, scale=1.7)
        self.kind = _weight(WIDTH, 3, scale=0.5)
        self.own = _weight(WIDTH, WIDTH)
        self.line = _weight(WIDTH, WIDTH, scale=0.3)
        self.box = _weight(WIDTH, WIDTH, scale=0.3)
        self.cell = _weight(WIDTH, WIDTH, scale=0.3)
        self.out = _weight(WIDTH, WIDTH)
        self.out_bias = nn.Parameter(torch.zeros(WIDTH, 1))
        self.gain = nn.Parameter(torch.ones(WIDTH, 1))
        self.read = _weight(1, WIDTH)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        """Marginals of every cell.

        Args:
            tokens: [B, 81] int64, 0 where blank. Boards that break the rules are answered, not refused.
            attention_mask: all boards have the same length; only None or all True is accepted.

        Returns:
            logits [B, 81, 10] float32, normalised, -inf at the mask token; hidden [B, 81, HIDDEN_WIDTH] float32.

        Raises:
            ValueError: for another shape or dtype, or tokens outside 0..9.

        Numerics:
            A board's answer is the same bit for bit whatever else is in the batch.
        """
        self.check(tokens, attention_mask)
        if sudoku_forward is not None and tokens.device.type == self.read.device.type == "cpu" and in_memory(tokens):
            return MaskedOutput(*sudoku_forward(tokens, self._packed(), self.iterations, position_codes()))
        parts = [self._eager(chunk) for chunk in tokens.split(_CHUNK)]
        return MaskedOutput(*(torch.cat(field) for field in zip(*parts, strict=True)))

    def check(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        """Refuse, without running the network, what `forward` refuses.

        Raises:
            ValueError: as `forward`.
        """
        if tokens.ndim != 2 or tokens.shape[1] != CELLS or tokens.dtype != torch.int64:
            raise ValueError(
                f"SudokuModel: tokens must be [B, {CELLS}] int64, got shape {tuple(tokens.shape)} {tokens.dtype}"
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= DIGITS:
            raise ValueError(
                f"SudokuModel: tokens must lie in 0..{DIGITS}, got {int(tokens.min())}..{int(tokens.max())}"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("SudokuModel: attention_mask must be all True: a board has no padding")

    def logits_of_every_iteration(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, B, 81, 9] unnormalised scores of the digits after each iteration, with gradients: what training sees."""
        kinds = self._kinds(tokens)
        x = self.embed @ kinds
        scores = []
        for _ in range(self.iterations):
            x = self._step(x, kinds, len(tokens))
            scores.append(self._scores(x, len(tokens)))
        return torch.stack(scores)

    def save(self, path: Path) -> None:
        """Write the weights as safetensors; `path` is whole or untouched."""
        with replace_file(path) as temporary:
            temporary.write_bytes(save_tensors(self.state_dict()))

    def _eager(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        boards = len(tokens)
        if boards < _CHUNK:
            tokens = torch.cat([tokens, tokens.new_zeros(_CHUNK - boards, CELLS)])
        kinds = self._kinds(tokens)
        x = self.embed @ kinds
        for _ in range(self.iterations):
            x = self._step(x, kinds, _CHUNK)
        logp = self._scores(x, _CHUNK)[:boards].log_softmax(dim=-1)
        states = x.view(WIDTH, DIGITS, CELLS, _CHUNK).permute(3, 2, 1, 0)[:boards]
        surprise = -logp.exp() * logp
        entropy = surprise.sum(-1, keepdim=True).expand_as(surprise)
        digits = torch.cat([states, torch.stack([logp.exp(), surprise, entropy], dim=-1)], dim=-1).flatten(-2)
        codes = position_codes().to(tokens.device).expand(boards, CELLS, POSITION_WIDTH)
        return F.pad(logp, (1, 0), value=-torch.inf).float(), torch.cat([digits, codes], dim=-1).float()

    def _kinds(self, tokens: torch.Tensor) -> torch.Tensor:
        """[3, 9 * 81 * B]: is this digit given here, is another one, and the constant 1."""
        given = tokens.t().contiguous()
        digits = torch.arange(1, VOCABULARY, device=tokens.device).view(DIGITS, 1, 1)
        this = given == digits
        return (
            torch.stack([this, (given != MASK_TOKEN) & ~this, torch.ones_like(this)]).to(self.embed.dtype).view(3, -1)
        )

    def _step(self, x: torch.Tensor, kinds: torch.Tensor, boards: int) -> torch.Tensor:
        shape = (WIDTH, DIGITS, CELLS, boards)
        lines, boxes, cells = _Gather.apply(x.view(shape))  # type: ignore[no-untyped-call]
        lines = (self.line @ lines.view(WIDTH, -1)).view(WIDTH, 2, 9, 9, boards)
        boxes = (self.box @ boxes.view(WIDTH, -1)).view(WIDTH, 9, 3, 3, boards)
        cells = (self.cell @ cells.view(WIDTH, -1)).view(WIDTH, CELLS, boards)
        hidden = torch.addmm(self.kind @ kinds, self.own, x).view(shape)
        hidden = _Scatter.apply(hidden, lines, boxes, cells).view(WIDTH, -1).relu_()  # type: ignore[no-untyped-call]
        y = torch.addmm(x + self.out_bias, self.out, hidden)
        return y * torch.rsqrt(y.square().mean(0, keepdim=True) + 1e-5) * self.gain

    def _scores(self, x: torch.Tensor, boards: int) -> torch.Tensor:
        return (self.read @ x).view(DIGITS, CELLS, boards).permute(2, 1, 0)

    def _packed(self) -> torch.Tensor:
        """All weights in the order the compiled forward reads them, products transposed to [in, out]; float32."""
        matrices = (self.embed, self.kind, self.own, self.line, self.box, self.cell, self.out)
        vectors = (self.out_bias, self.gain, self.read)
        return torch.cat([*(m.t().flatten() for m in matrices), *(v.flatten() for v in vectors)]).float()


def _weight(rows: int, columns: int, *, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * scale / columns**0.5)


def load_model(strength: str = "strong") -> SudokuModel:
    """The shipped model: "strong", or "weak", trained with fewer iterations to stand near the published 61.6%.

    Args:
        strength: its name.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: for another name.
    """
    if strength not in ITERATIONS:
        raise ValueError(f"sudoku: the shipped models are {', '.join(ITERATIONS)}, got {strength!r}")
    model = SudokuModel(ITERATIONS[strength])
    weights = files(__package__) / "weights" / f"network_{strength}.safetensors"
    model.load_state_dict(load_tensors(weights.read_bytes()), assign=True)  # on the CPU, in float32
    return model.eval()


ITERATIONS = {"strong": 12, "weak": 3}
"""Iterations of the shipped networks, with which they were also trained."""
