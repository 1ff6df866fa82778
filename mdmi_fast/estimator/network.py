"""Networks that read the hidden states of two positions and predict their mutual information."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from mdmi_fast import ops
from mdmi_fast.estimator.seen import SeenStates
from mdmi_fast.files import cache_folder, check_folder, read_json, replace_file
from mdmi_fast.labels import masked_pairs
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import differences, identity
from mdmi_fast.models.loading import find_for_model, registered, resolve

Combine = Literal["concat", "product", "interaction"]
Output = Literal["softplus", "identity", "bounded"]
Marginals = Literal["none", "entropy", "summary"]
WEIGHTS_FILE, CONFIG_FILE = "estimator.safetensors", "estimator.json"
DOCUMENTED_PARAMETERS = 50_000, 500_000
"""The source's range (row S5); a network that knows its task, such as that of Sudoku, may be far smaller."""
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


# Where modules and parameters were found (holder, name, found), the parameters with their addresses and versions, and what
# was made of them.
_Frozen = tuple[list[tuple[dict[str, Any], str, Any]], list[Tensor], list[tuple[int, int]], Head, ops.PreparedPairwise]


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
    (`architecture`); scoring, selection and files are shared.

    Attributes:
        trained_on: the model whose states it was trained on (`identity`); None: unknown.
        seen: which states it was trained on; saved with it. None: nobody has kept a record.
        provenance: what else it was made from (label form, states ...); saved with it, read by people.
        precision: of the products of the dense layers outside of inference, as for `ops.pairwise_mlp`.
    """

    architecture: ClassVar[str]
    """Names the class in a saved configuration: "general", or the entry point it is registered as."""
    combine: str
    """Of `ops.pairwise_mlp`."""
    symmetry: str
    """Of `ops.pairwise_mlp`."""
    last: nn.Linear
    """The last layer of the head, of one output."""
    output: Output = "softplus"
    """What turns the last layer f_ij into nats: softplus, >= 0; nothing; or min(H_i, H_j) * sigmoid(f_ij)."""
    needs_stats: bool = False
    """Whether the marginals must be handed over with the hidden states."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"{type(self).__name__}: hidden_size must be at least 1, got {hidden_size}")
        self.hidden_size = hidden_size
        self.trained_on: dict[str, Any] | None = None
        self.seen: SeenStates | None = None
        self.provenance: dict[str, Any] = {}
        self.precision: str | None = None
        self._frozen: _Frozen | None = None

    def read(self, hidden: Tensor, marginals: ops.TokenStats | None) -> Tensor:
        """The state [B, N, W] of every position that the halves are made of."""
        return hidden

    def halves(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The halves u and v [B, N, H1] of what `read` gives, each position from its own state (see `RowLayers`)."""
        raise NotImplementedError

    def head(self) -> Head:
        """The layers behind the halves."""
        raise NotImplementedError

    def configuration(self) -> dict[str, Any]:
        """Keyword arguments that build the same network again."""
        raise NotImplementedError

    @torch.no_grad()
    def begin_at(self, nats: float) -> None:
        """Set the last bias so that a network of fresh weights predicts about so much for every pair.

        Args:
            nats: at least 0 unless the output is "identity"; of a bounded output as if every entropy were 1 nat.
        """
        if self.output == "identity":
            bias = nats
        else:
            nats = min(max(nats, 1e-6), 0.5)  # where the output still has a slope
            bias = math.log(math.expm1(nats)) if self.output == "softplus" else math.log(nats / (1 - nats))
        self.last.bias.fill_(bias)

    @property
    def needs_step(self) -> bool:
        """For policies: hand over the pass itself, whose logits give the marginals."""
        return self.needs_stats

    def forward(self, hidden: Tensor, mask: Tensor, stats: ops.TokenStats | int | None = None) -> Tensor:
        """Predicted mutual information of all masked pairs.

        Args:
            hidden: [B, N, D] float of any precision, as the model gave it.
            mask: [B, N] bool, True = masked.
            stats: `ops.token_stats` of the model's logits, every field [B, N], or a `Step` that carries them; read
                only where `needs_stats`.

        Returns:
            [B, N, N] float32, nats, symmetric; 0 on the diagonal and where an end is not masked.

        Raises:
            ValueError: if D is not the width the estimator was made for.
            TypeError: if stats are needed and missing.
        """
        marginals = self._marginals(stats)
        u, v = self._checked_halves(hidden, marginals)
        head, prepared = self._current_head()
        scores = ops.pairwise_mlp(
            u, v, head.weights, head.biases, head.w_out, head.b_out, mask=mask, prepared=prepared, **self._options()
        )
        if self.output != "bounded" or marginals is None:
            return scores
        least = torch.minimum(marginals.entropy.unsqueeze(-1), marginals.entropy.unsqueeze(-2))
        # Not torch.sigmoid, whose last digit depends on where in the batch a number stands; below -80 exp would overflow.
        share = 1 / (1 + (-scores.clamp(min=-80.0)).exp())
        # Not a product with the mask: an unmasked position may have any entropy, NaN included.
        return (least * share).masked_fill(~masked_pairs(mask), 0.0)

    def band(self, hidden: Tensor, mask: Tensor, window: int) -> Tensor:
        """Predicted mutual information of the masked pairs at most `window` apart.

        Args:
            hidden: [B, N, D], as for `forward`.
            mask: [B, N] bool, True = masked.
            window: the farthest distance, at least 0.

        Returns:
            [B, N, 2 * window + 1] float32, nats; entry (i, window + d) is that of the pair (i, i + d).

        Raises:
            ValueError: as `forward`, or if the estimator reads the marginals, which a band does not.
        """
        if self.needs_stats:
            raise ValueError(f"{type(self).__name__}: reads the marginals too (marginals or a bounded output): no band")
        u, v = self._checked_halves(hidden, None)
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
        stats: ops.TokenStats | int | None = None,
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
            stats: as for `forward`.

        Returns:
            Selection(selected [B, N] bool, spent [B] float64).

        Raises:
            ValueError: as `forward` and `ops.select_budget`.
        """
        if self.output == "bounded":  # the bound comes after the network: all pairs are scored
            mi = self(hidden, mask, stats)
            return ops.select_budget(
                entropy, mi, gamma=gamma, lam=lam, entropy_weight=entropy_weight, mask=mask, limit=limit
            )
        u, v = self._checked_halves(hidden, self._marginals(stats))
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

    def check_model(self, model: MaskedModel, *, moved: bool = False) -> None:
        """Refuse a model that the estimator was not trained on: hidden states of another mean nothing to it.

        Args:
            model: compared by the width of its hidden state and, where the estimator's is known, by `identity`.
            moved: compare by the width only, for a model whose weights have changed since.

        Raises:
            ValueError: naming both sides.
        """
        name = type(self).__name__
        if model.hidden_size != self.hidden_size:
            raise ValueError(
                f"{name}: reads hidden states of width {self.hidden_size}, got {type(model).__name__} of width "
                f"{model.hidden_size}"
            )
        if moved or self.trained_on is None:
            return
        here = identity(model)
        other = differences(self.trained_on, here)
        if other:
            there, found = (", ".join(f"{key} {of.get(key)}" for key in other) for of in (self.trained_on, here))
            raise ValueError(
                f"{name}: was trained on a model of {there}, got one of {found}; if the model moved, refine the "
                "estimator with train --from"
            )

    def _options(self) -> dict[str, Any]:
        activation = "softplus" if self.output == "softplus" else "identity"
        precision = self.precision if torch.is_grad_enabled() else None
        return {
            "combine": self.combine,
            "symmetry": self.symmetry,
            "activation": activation,
            "precision": precision,
        }

    def _marginals(self, stats: ops.TokenStats | int | None) -> ops.TokenStats | None:
        if not self.needs_stats:
            return None
        stats = getattr(stats, "stats", stats)
        if not isinstance(stats, ops.TokenStats):
            raise TypeError(
                f"{type(self).__name__}: reads the marginals too: stats must be ops.token_stats(logits) or a Step with "
                f"stats, got {stats!r}"
            )
        return stats

    def _checked_halves(self, hidden: Tensor, marginals: ops.TokenStats | None) -> tuple[Tensor, Tensor]:
        if hidden.ndim != 3 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: hidden must be [B, N, {self.hidden_size}], as the estimator was trained, "
                f"got shape {tuple(hidden.shape)}"
            )
        return self.halves(self.read(hidden.to(next(self.parameters()).dtype), marginals))

    def _current_head(self) -> tuple[Head, ops.PreparedPairwise | None]:
        """The head; outside of training packed once and kept until a weight changes."""
        if torch.is_grad_enabled() or next(self.parameters()).is_inference():
            return self.head(), None
        # Walking the parameters takes longer than scoring a board: look where they were found instead.
        if self._frozen is not None and all(holder.get(name) is found for holder, name, found in self._frozen[0]):
            _, parameters, versions, head, prepared = self._frozen
            if versions == [(p.data_ptr(), p._version) for p in parameters]:
                return head, prepared
        places = [
            (holder, name, found)
            for module in self.modules()
            for holder in (module._modules, module._parameters)
            for name, found in holder.items()
        ]
        parameters, head = list(self.parameters()), self.head()
        prepared = ops.prepare_pairwise(head.weights, head.biases, head.w_out, head.b_out)
        self._frozen = (places, parameters, [(p.data_ptr(), p._version) for p in parameters], head, prepared)
        return head, prepared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frozen": None}  # what a backend packed belongs to this process

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def summary(self) -> str:
        """One line: what it is made of, and its parameters beside the documented range."""
        low, high = DOCUMENTED_PARAMETERS
        place = "below" if self.n_parameters < low else "above" if self.n_parameters > high else "within"
        sizes = ", ".join(f"{name} {value}" for name, value in self.configuration().items())
        return f"{self.architecture}: {sizes}; {self.n_parameters:,} parameters ({place} the usual {low:,} to {high:,})"

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights (safetensors) and configuration (JSON) into a folder; each file is whole or untouched.

        Args:
            folder: made if it does not exist.

        Raises:
            TypeError: if `provenance` holds what JSON cannot.
            OSError: if the folder cannot be made or written.
        """
        folder = Path(folder)
        check_folder(folder)
        config = {
            "architecture": self.architecture,
            "configuration": self.configuration(),
            "hidden_size": self.hidden_size,
            "parameters": self.n_parameters,
            "trained_on": self.trained_on,
            "provenance": self.provenance,
        }
        tensors = {name: value.contiguous() for name, value in self.state_dict().items()}
        if self.seen is not None:
            config["seen"] = self.seen.summary()
            tensors |= self.seen.tensors()
        text = json.dumps(config, indent=2) + "\n"
        with replace_file(folder / WEIGHTS_FILE) as temporary:
            temporary.write_bytes(save(tensors))
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
            weights = load((folder / WEIGHTS_FILE).read_bytes())
            estimator.seen = SeenStates.taken_from(weights, config.get("seen"))
            estimator.load_state_dict(weights, assign=True)  # on the CPU, in the file's dtype
        except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: weights and configuration do not make an estimator: {error}") from error
        estimator.trained_on, estimator.provenance = config.get("trained_on"), config.get("provenance", {})
        return estimator.eval()


def read_configuration(folder: Path) -> dict[str, Any]:
    """The JSON of a saved estimator.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged or of something else.
    """
    path = folder / CONFIG_FILE
    config = read_json(path, "not the configuration of an estimator")
    kinds = {"architecture": str, "configuration": dict, "trained_on": dict | None, "provenance": dict}
    for name, kind in kinds.items() if isinstance(config, dict) else ():
        if name in config and not isinstance(config[name], kind):
            raise ValueError(f"{path}: not the configuration of an estimator: {name} cannot be {config[name]!r}")
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

    The first hidden layer of a pair reads (row S5 of the source)

    - "concat": [h_i; h_j], averaged over both orders;
    - "product": (P h_i) * (P h_j), a learned bilinear form of low rank;
    - "interaction": that product joined to the concatenation [relu(A h_i); relu(A h_j)], whose two halves share their
      weights. Both are symmetric by themselves, so half of the pairs is scored.

    Args:
        hidden_size: D of the model.
        layers: widths of the hidden layers, 1 to 3 of them.
        combine: see above.
        rank: rows of P and of A; "concat" has none.
        output: "softplus", >= 0; "identity", for labels that may be negative; "bounded", between 0 and min(H_i, H_j).
        marginals: what joins the state: nothing, "entropy" H_i, or "summary": H_i, the largest probability and its margin.
        weighted_layers: L > 1: the model joined the states of L of its layers, D = L * width; one state is made of them
            with learned weights that sum to 1. 1 takes the joined states as they are.

    Raises:
        ValueError: if a size is less than 1, there are no layers or more than three, weighted_layers does not divide
            hidden_size, or combine, output or marginals is unknown.

    Example:
        >>> import torch
        >>> from mdmi_fast import PairwiseMIEstimator
        >>> estimator = PairwiseMIEstimator(hidden_size=8, layers=(16,))
        >>> estimator(torch.randn(1, 5, 8), torch.ones(1, 5, dtype=torch.bool)).shape
        torch.Size([1, 5, 5])
    """

    architecture = "general"

    def __init__(
        self,
        hidden_size: int,
        layers: Sequence[int] = (512, 256),
        combine: Combine = "concat",
        *,
        rank: int = 64,
        output: Output = "softplus",
        marginals: Marginals = "none",
        weighted_layers: int = 1,
    ) -> None:
        super().__init__(hidden_size)
        if not 1 <= len(layers) <= 3 or min(layers) < 1:
            raise ValueError(f"PairwiseMIEstimator: layers must be 1 to 3 widths >= 1, got {tuple(layers)}")
        for name, value, choices in (
            ("combine", combine, Combine),
            ("output", output, Output),
            ("marginals", marginals, Marginals),
        ):
            if value not in get_args(choices):
                raise ValueError(
                    f"PairwiseMIEstimator: {name} must be one of {', '.join(get_args(choices))}, got {value!r}"
                )
        if rank < 1:
            raise ValueError(f"PairwiseMIEstimator: rank must be at least 1, got {rank}")
        if weighted_layers < 1 or hidden_size % weighted_layers:
            raise ValueError(
                f"PairwiseMIEstimator: weighted_layers must be a divisor of hidden_size {hidden_size}, "
                f"got {weighted_layers}"
            )
        self.layers, self.kind, self.rank = tuple(layers), combine, rank
        self.output, self.marginals, self.weighted_layers = output, marginals, weighted_layers
        self.needs_stats = marginals != "none" or output == "bounded"
        self.combine = "add" if combine == "concat" else "mul"
        self.symmetry = "mean" if combine == "concat" else "upper"
        if weighted_layers > 1:
            self.layer_weights = nn.Parameter(torch.zeros(weighted_layers))
        width = hidden_size // weighted_layers + {"none": 0, "entropy": 1, "summary": 3}[marginals]
        if combine == "concat":
            self.left = RowLayers(width, layers[0])
            self.right = RowLayers(width, layers[0], bias=False)
            widths = self.layers
        else:
            self.project = RowLayers(width, rank)
            widths = (rank, *self.layers)
        if combine == "interaction":
            self.alone = RowLayers(width, rank)
            self.alone_in = nn.Linear(rank, layers[0], bias=False)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.last = nn.Linear(widths[-1], 1)
        nn.init.constant_(self.last.bias, 0.0 if output == "identity" else -3.0)  # most pairs share nearly nothing

    def read(self, hidden: Tensor, marginals: ops.TokenStats | None) -> Tensor:
        if self.weighted_layers > 1:
            states = hidden.unflatten(-1, (self.weighted_layers, -1)).unbind(-2)
            shares = self.layer_weights.softmax(0)
            # One after the other: a sum over an axis may round by the size of the batch.
            hidden = reduce(torch.add, [share * state for share, state in zip(shares, states, strict=True)])
        if self.marginals == "none" or marginals is None:
            return hidden
        fields = [marginals.entropy]
        if self.marginals == "summary":
            fields += [marginals.confidence, marginals.margin]
        return torch.cat([hidden, torch.stack(fields, -1).to(hidden.dtype)], -1)

    def halves(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "concat":
            return self.left(state), self.right(state)
        product = self.project(state)
        if self.kind == "product":
            return product, product
        # x_i * 1 and 1 * x_j carry the concatenation through the product.
        alone = torch.relu(self.alone(state))
        ones = torch.ones_like(alone)
        return torch.cat([product, alone, ones], -1), torch.cat([product, ones, alone], -1)

    def head(self) -> Head:
        head = Head.of(self.dense, self.last)
        if self.kind == "interaction":
            alone = self.alone_in.weight.t()
            head.weights[0] = torch.cat([head.weights[0], alone, alone])
        return head

    def configuration(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "layers": list(self.layers),
            "combine": self.kind,
            "rank": self.rank,
            "output": self.output,
            "marginals": self.marginals,
            "weighted_layers": self.weighted_layers,
        }


def load_estimator(source: str | Path) -> PairScorer:
    """Load an estimator by its folder, or by the name of its model: one that ships ("sudoku", "sudoku:weak") or that
    `mdmi-fast train` made here ("sapiens:heavy").

    Args:
        source: a folder written by `save_pretrained` where there is one of that name, else the name.

    Returns:
        The estimator in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds no estimator.
        ValueError: if there is none of that name, or the folder is damaged.
    """
    if Path(source).is_dir():
        architecture = read_configuration(Path(source))["architecture"]
        if architecture == PairwiseMIEstimator.architecture:
            return PairwiseMIEstimator.from_pretrained(source)
        architecture_class: type[PairScorer] = resolve("mdmi_fast.estimators", architecture)
        return architecture_class.from_pretrained(source)
    name, _, variant = str(source).partition(":")
    if "/" in name or isinstance(source, Path):
        raise FileNotFoundError(f"load_estimator: no folder {source}")
    shipped: type[ShippedScorer] | None = find_for_model("mdmi_fast.estimators", source)
    if shipped is not None:
        return shipped.shipped(variant) if variant else shipped.shipped()
    if not has_estimator(source):
        raise ValueError(
            f"load_estimator: nothing is registered as {source!r}; known: {', '.join(registered('mdmi_fast.estimators'))}; "
            f"`mdmi-fast label --model {source}` and then `mdmi-fast train --model {source}` make one for a model"
        )
    return load_estimator(own_folder(source))


def has_estimator(model: str) -> bool:
    """Whether `load_estimator` finds an estimator by the name of a model."""
    if find_for_model("mdmi_fast.estimators", model) is not None:
        return True
    try:
        return (own_folder(model) / CONFIG_FILE).is_file()  # a training that has not ended leaves a folder without
    except ImportError:  # without a cache folder none can have been made
        return False


def own_folder(model: str) -> Path:
    """Where the estimator of a model is put that ships none: one place whatever options follow the name. Those that give
    other weights or states (dtype, layers) make another model, for which `check_model` refuses it.

    Raises:
        ImportError: without platformdirs.
    """
    return cache_folder() / "estimators" / quote(model.partition("?")[0], safe="")
