"""What scores pairs: the base of all estimators, with selection, checks of the model, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.estimator.configuration import CONFIG_FILE, WEIGHTS_FILE, read_configuration
from mdmi_fast.estimator.distances import before_output
from mdmi_fast.estimator.layers import Head, PackedHead
from mdmi_fast.estimator.seen import SeenStates
from mdmi_fast.files import check_folder, replace_file
from mdmi_fast.labels import masked_pairs
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import refuse_other

Output = Literal["softplus", "identity", "bounded"]
DOCUMENTED_PARAMETERS = 50_000, 500_000
"""The paper's range; a network that knows its task, such as that of Sudoku, may be far smaller."""
E = TypeVar("E", bound="PairScorer")


class PairScorer(nn.Module):
    """A pair network that `ops.pairwise_mlp` can score: two halves per position, then dense layers on the pair.

    A subclass says how the hidden states become halves (`halves`) and what follows (`head`), and names itself
    (`architecture`); scoring, selection and files are shared.

    Attributes:
        trained_on: the model whose states it was trained on (`identity`); None: unknown.
        seen: which states it was trained on; saved with it. None: nobody has kept a record.
        provenance: label form, states and the like, saved alongside for humans.
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
    shift: nn.Parameter | None
    """[R], what is added to f_ij by the relation of the pair; None: nothing."""
    relation: Tensor | None
    """[N, N] int32, the relations of the positions of a sequence; None: their distance, 1 to R, the last one beyond."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"{type(self).__name__}: hidden_size must be at least 1, got {hidden_size}")
        self.hidden_size = hidden_size
        self.trained_on: dict[str, Any] | None = None
        self.seen: SeenStates | None = None
        self.provenance: dict[str, Any] = {}
        self.precision: str | None = None
        self.register_parameter("shift", None)
        self.register_buffer("relation", None)
        self._packed: PackedHead | None = None

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
    def begin_at(self, nats: float, by_relation: Tensor | None = None) -> None:
        """Set the last bias so that a network of fresh weights predicts about so much for every pair.

        Args:
            nats: at least 0 unless the output is "identity"; of a bounded output as if every entropy were 1 nat.
            by_relation: [R] nats, of a network with a `shift`: its predictions begin at exactly these instead.
        """
        if self.shift is not None and by_relation is not None:
            self.shift.copy_(before_output(self.output, by_relation))
            self.last.weight.zero_()
            self.last.bias.zero_()
        else:
            self.last.bias.fill_(
                float(before_output(self.output, torch.tensor(nats, dtype=torch.float64, device="cpu")))
            )

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
        if self._needs_all_scores:
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
        if not moved:
            self._check_identity(model)

    def _check_identity(self, model: MaskedModel) -> None:
        refuse_other(type(self).__name__, self.trained_on, model, "refine the estimator with train --from")

    def _options(self) -> dict[str, Any]:
        activation = "softplus" if self.output == "softplus" else "identity"
        precision = self.precision if torch.is_grad_enabled() else None
        return {
            "shift": self.shift,
            "relation": self.relation,
            "combine": self.combine,
            "symmetry": self.symmetry,
            "activation": activation,
            "precision": precision,
        }

    @property
    def _needs_all_scores(self) -> bool:
        """Whether more comes after the pair network, which the fused selection does not know."""
        return self.output == "bounded"

    def _marginals(self, stats: ops.TokenStats | int | None) -> ops.TokenStats | None:
        if not self.needs_stats:
            return None
        if not isinstance(stats, ops.TokenStats):
            stats = check.attribute(stats, "stats")
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
        if self._packed is None or not self._packed.is_current():
            self._packed = PackedHead.of(self, self.head())
        return self._packed.head, self._packed.prepared

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # what a backend packed belongs to this process

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
            weights = load((folder / WEIGHTS_FILE).read_bytes())
            if "relation" in weights:
                config["configuration"]["relation"] = weights["relation"]
            estimator = cls(**config["configuration"])
            estimator.seen = SeenStates.taken_from(weights, config.get("seen"))
            estimator.load_state_dict(weights, assign=True)  # on the CPU, in the file's dtype
        except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: weights and configuration do not make an estimator: {error}") from error
        estimator.trained_on, estimator.provenance = config.get("trained_on"), config.get("provenance", {})
        return estimator.eval()


class ShippedScorer(PairScorer):
    """An estimator that comes with a package, registered as an entry point of the group "mdmi_fast.estimators"."""

    @classmethod
    def shipped(cls: type[E], variant: str = "") -> E:
        """The estimator that ships, or one of several by name."""
        raise NotImplementedError
