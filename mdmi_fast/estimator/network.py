"""Networks that read the hidden states of two positions and predict their mutual information."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mdmi_fast import ops
from mdmi_fast.files import replace_file
from mdmi_fast.models.loading import resolve

Combine = Literal["concat", "product", "interaction"]
WEIGHTS_FILE, CONFIG_FILE = "estimator.safetensors", "estimator.json"
E = TypeVar("E", bound="PairScorer")


@dataclass(frozen=True)
class Head:
    """What follows the two halves of a pair network: the arguments of `ops.pairwise_mlp`, in its order."""

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor

    @classmethod
    def of(cls, dense: Iterable[nn.Module], last: nn.Linear) -> Head:
        """The head made of linear layers."""
        layers = [cast(nn.Linear, layer) for layer in dense]
        return cls(
            [layer.weight.t() for layer in layers], [layer.bias for layer in layers], last.weight[0], last.bias[0]
        )


class RowLayers(nn.Sequential):
    """Linear layers with ReLU between them, on every position by itself: the same, bit for bit, in every batch.

    Args:
        widths: of the input and of every layer's output, two at least.
        bias: of the layers.
    """

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
        super().__init__(*[module for layer in layers for module in (layer, nn.ReLU())][:-1])

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., in] to [B, ..., out]."""
        layers = [cast(nn.Linear, layer) for layer in list(self)[::2]]
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        return ops.mlp(x, [layer.weight.t() for layer in layers], biases)


class PairScorer(nn.Module):
    """A pair network that `ops.pairwise_mlp` can score: two halves per position, then dense layers on the pair.

    A subclass says how the hidden states become halves (`halves`) and what follows (`head`), and names itself
    (`architecture`); scoring, selection and files are shared. The output is softplus of the last layer: nats, >= 0.
    """

    architecture: ClassVar[str]
    """Names the class in a saved configuration: "general", or the entry point it is registered as."""
    combine: str
    """Of `ops.pairwise_mlp`."""
    symmetry: str
    """Of `ops.pairwise_mlp`."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"{type(self).__name__}: hidden_size must be at least 1, got {hidden_size}")
        self.hidden_size = hidden_size
        self.provenance: dict[str, Any] = {}
        """What the estimator was made from (model, label form, layer ...); saved with it, read by people."""
        self._frozen: tuple[tuple[int, ...], Head, ops.PreparedPairwise] | None = None

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The halves u and v [B, N, H1] of hidden [B, N, D], each position from its own state (see `RowLayers`)."""
        raise NotImplementedError

    def head(self) -> Head:
        """The layers behind the halves."""
        raise NotImplementedError

    def configuration(self) -> dict[str, Any]:
        """Keyword arguments that build the same network again."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Predicted mutual information of all masked pairs.

        Args:
            hidden: [B, N, D] float of any precision, as the model gave it.
            mask: [B, N] bool, True = masked.

        Returns:
            [B, N, N] float32, nats, symmetric; 0 on the diagonal and where an end is not masked.

        Raises:
            ValueError: if D is not the width the estimator was made for.
        """
        u, v = self._checked_halves(hidden)
        head, prepared = self._current_head()
        return ops.pairwise_mlp(
            u, v, head.weights, head.biases, head.w_out, head.b_out, mask=mask, prepared=prepared, **self._options()
        )

    def band(self, hidden: Tensor, mask: Tensor, window: int) -> Tensor:
        """Predicted mutual information of the masked pairs at most `window` apart.

        Args:
            hidden: [B, N, D], as for `forward`.
            mask: [B, N] bool, True = masked.
            window: the farthest distance, at least 0.

        Returns:
            [B, N, 2 * window + 1] float32, nats; entry (i, window + d) is that of the pair (i, i + d).

        Raises:
            ValueError: as `forward`.
        """
        u, v = self._checked_halves(hidden)
        head, prepared = self._current_head()
        return ops.pairwise_mlp_band(
            u,
            v,
            head.weights,
            head.biases,
            head.w_out,
            head.b_out,
            window,
            mask=mask,
            prepared=prepared,
            **self._options(),
        )

    def score_and_select(
        self,
        entropy: Tensor,
        hidden: Tensor,
        mask: Tensor,
        *,
        gamma: float | Tensor,
        lam: float = 1.0,
        entropy_weight: float = 1.0,
        limit: int | None = None,
    ) -> ops.Selection:
        """`ops.select_budget` on the predicted scores, computing only the pairs that can matter.

        Args:
            entropy: [B, N] float, nats.
            hidden: [B, N, D], as for `forward`.
            mask: [B, N] bool, True = masked.
            gamma: as for `ops.select_budget`, like the rest.
            lam: weight of the mutual information.
            entropy_weight: weight of the entropy.
            limit: most positions a sequence.

        Returns:
            Selection(selected [B, N] bool, spent [B] float64).

        Raises:
            ValueError: as `forward` and `ops.select_budget`.
        """
        u, v = self._checked_halves(hidden)
        head, prepared = self._current_head()
        return ops.score_and_select(
            entropy,
            u,
            v,
            head.weights,
            head.biases,
            head.w_out,
            head.b_out,
            gamma=gamma,
            lam=lam,
            entropy_weight=entropy_weight,
            mask=mask,
            limit=limit,
            prepared=prepared,
            **self._options(),
        )

    def _options(self) -> dict[str, str]:
        return {"combine": self.combine, "symmetry": self.symmetry, "activation": "softplus"}

    def _checked_halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if hidden.ndim != 3 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: hidden must be [B, N, {self.hidden_size}], as the estimator was trained, "
                f"got shape {tuple(hidden.shape)}"
            )
        return self.halves(hidden.to(next(self.parameters()).dtype))

    def _current_head(self) -> tuple[Head, ops.PreparedPairwise | None]:
        """The head; outside of training packed once and kept until a weight changes."""
        if torch.is_grad_enabled() or next(self.parameters()).is_inference():
            return self.head(), None
        versions = tuple(number for p in self.parameters() for number in (p.data_ptr(), p._version))
        if self._frozen is None or self._frozen[0] != versions:
            head = self.head()
            packed = ops.prepare_pairwise(head.weights, head.biases, head.w_out, head.b_out)
            self._frozen = (versions, head, packed)
        return self._frozen[1], self._frozen[2]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": None}  # what a backend packed belongs to this process

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights (safetensors) and configuration (JSON) into a folder; each file is whole or untouched.

        Args:
            folder: made if it does not exist.

        Raises:
            TypeError: if `provenance` holds what JSON cannot.
        """
        folder = Path(folder)
        config = {
            "architecture": self.architecture,
            "configuration": self.configuration(),
            "parameters": self.n_parameters,
            "provenance": self.provenance,
        }
        text = json.dumps(config, indent=2) + "\n"
        with replace_file(folder / WEIGHTS_FILE) as temporary:
            save_file({name: value.contiguous() for name, value in self.state_dict().items()}, temporary)
        with replace_file(folder / CONFIG_FILE) as temporary:
            temporary.write_text(text)

    @classmethod
    def from_pretrained(cls: type[E], folder: str | Path) -> E:
        """Read an estimator of this architecture back; `load_estimator` reads any.

        Args:
            folder: as `save_pretrained` wrote it.

        Returns:
            The estimator in evaluation mode.

        Raises:
            FileNotFoundError: if the folder holds no estimator.
            ValueError: if a file is damaged, of another architecture, or the two files do not belong together.
        """
        folder = Path(folder)
        config = read_configuration(folder)
        if config["architecture"] != cls.architecture:
            raise ValueError(
                f"{folder}: holds a {config['architecture']!r} estimator, {cls.__name__} reads {cls.architecture!r}"
            )
        try:
            estimator = cls(**config["configuration"])
            estimator.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except (SafetensorError, RuntimeError, TypeError) as error:
            raise ValueError(f"{folder}: weights and configuration do not make an estimator: {error}") from error
        estimator.provenance = config.get("provenance", {})
        return estimator.eval()


def read_configuration(folder: Path) -> dict[str, Any]:
    """The JSON of a saved estimator.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged or of something else.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not the configuration of an estimator: {error}") from error
    if not isinstance(config, dict) or not {"architecture", "configuration"} <= config.keys():
        raise ValueError(f"{path}: not the configuration of an estimator: architecture or configuration is missing")
    return config


class ShippedScorer(PairScorer):
    """An estimator that comes with a package, registered as an entry point of the group "mdmi_fast.estimators"."""

    @classmethod
    def shipped(cls: type[E], variant: str = "") -> E:
        """The estimator that ships, or one of several by name."""
        raise NotImplementedError


class PairwiseMIEstimator(PairScorer):
    """The general estimator: any hidden state in, one to three hidden layers.

    Combinations of the two hidden states (row S5 of the source):

    - "concat": relu(h_i W_u + h_j W_v + b), averaged over both orders;
    - "product": (h_i P) * (h_j P), with a learned projection P;
    - "interaction": a learned product joined to the concatenation.

    Args:
        hidden_size: D.
        layers: widths of the hidden layers, 1 to 3 of them; the first is made of the halves.
        combine: see above.

    Raises:
        ValueError: if a width is less than 1, or there are none or more than three of them, or combine is unknown.

    Example:
        >>> import torch
        >>> from mdmi_fast import PairwiseMIEstimator
        >>> estimator = PairwiseMIEstimator(hidden_size=8, layers=(16,))
        >>> estimator(torch.randn(1, 5, 8), torch.ones(1, 5, dtype=torch.bool)).shape
        torch.Size([1, 5, 5])
    """

    architecture = "general"

    def __init__(self, hidden_size: int, layers: Sequence[int] = (512, 256), combine: Combine = "concat") -> None:
        super().__init__(hidden_size)
        if not 1 <= len(layers) <= 3 or min(layers) < 1:
            raise ValueError(f"PairwiseMIEstimator: layers must be 1 to 3 widths >= 1, got {tuple(layers)}")
        if combine not in get_args(Combine):
            raise ValueError(
                f"PairwiseMIEstimator: combine must be one of {', '.join(get_args(Combine))}, got {combine!r}"
            )
        self.layers, self.kind = tuple(layers), combine
        self.combine = "add" if combine == "concat" else "mul"
        # Products are symmetric by construction, so half of the pairs is enough.
        self.symmetry = "mean" if combine == "concat" else "upper"
        first, *widths = self.layers
        if combine == "concat":
            self.left = RowLayers(hidden_size, first)
            self.right = RowLayers(hidden_size, first, bias=False)
            inputs = first
        else:
            self.project = RowLayers(hidden_size, first)
            inputs, widths = first, [first, *widths]
        if combine == "interaction":
            self.alone = RowLayers(hidden_size, first)
            self.alone_in = nn.Linear(first, first, bias=False)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in zip([inputs, *widths], widths, strict=False))
        self.last = nn.Linear(widths[-1] if widths else inputs, 1)
        nn.init.constant_(self.last.bias, -3.0)  # most pairs share nearly nothing

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "concat":
            return self.left(hidden), self.right(hidden)
        product = self.project(hidden)
        if self.kind == "product":
            return product, product
        # x_i * 1 and 1 * x_j carry the concatenation through the product.
        alone = torch.relu(self.alone(hidden))
        ones = torch.ones_like(alone)
        return torch.cat([product, alone, ones], -1), torch.cat([product, ones, alone], -1)

    def head(self) -> Head:
        head = Head.of(self.dense, self.last)
        if self.kind == "interaction":
            alone = self.alone_in.weight.t()
            head.weights[0] = torch.cat([head.weights[0], alone, alone])
        return head

    def configuration(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden_size, "layers": list(self.layers), "combine": self.kind}


def load_estimator(source: str | Path) -> PairScorer:
    """Load an estimator: a registered name ("sudoku", "sudoku:weak") or a folder written by `save_pretrained`.

    Args:
        source: a folder where there is one of that name, else the name.

    Returns:
        The estimator in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds no estimator.
        ValueError: if there is no such name, or the folder is damaged.
    """
    if Path(source).is_dir():
        architecture = read_configuration(Path(source))["architecture"]
        if architecture == PairwiseMIEstimator.architecture:
            return PairwiseMIEstimator.from_pretrained(source)
        architecture_class: type[PairScorer] = resolve("mdmi_fast.estimators", architecture)
        return architecture_class.from_pretrained(source)
    if "/" in str(source) or isinstance(source, Path):
        raise FileNotFoundError(f"load_estimator: no folder {source}")
    name, _, variant = source.partition(":")
    registered: type[ShippedScorer] = resolve("mdmi_fast.estimators", name)
    return registered.shipped(variant) if variant else registered.shipped()
