"""A small network that tells how a token just drawn changes what another masked position will be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.estimator.layers import RowLayers
from mdmi_fast.files import check_folder, read_json, replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import refuse_other

WEIGHTS_FILE, CONFIG_FILE = "coupling.safetensors", "coupling.json"


class PairwiseCoupling(nn.Module):
    """theta(a, v, j): what is added to the log-probabilities of position j once the token v was drawn at position a.

    z = relu(A h_a + B h_j + T[v] + D[j - a]), then dense layers, then a shift of `rank` numbers, which a table
    [rank, V] turns into one number for each token. A gate, itself an output of the network, is exactly 0 for pairs that are better
    left alone; pairs farther apart than `distances` always are. A position drawn after several others gets the sum of
    their shifts.

    Args:
        hidden_size: D of the model.
        vocab_size: V of the model; the tables T and [rank, V] grow with it.
        layers: widths of the hidden layers, one at least.
        rank: numbers of a shift.
        distances: K, the farthest pair.

    Attributes:
        strength: what all corrections are multiplied by; set by `train_coupling` on held-out sequences.
        trained_on: the model it was trained on (`identity`); None: unknown.
        provenance: what else is worth knowing, saved alongside for humans.

    Raises:
        ValueError: if a size is less than 1 or there are no layers.

    Example:
        >>> from mdmi_fast import PairwiseCoupling
        >>> PairwiseCoupling(hidden_size=8, vocab_size=5, layers=(16,)).n_parameters
        1320
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: Sequence[int] = (128, 64),
        *,
        rank: int = 48,
        distances: int = 8,
    ) -> None:
        super().__init__()
        if not layers or min(hidden_size, vocab_size, rank, distances, *layers) < 1:
            raise ValueError(
                "PairwiseCoupling: hidden_size, vocab_size, layers, rank and distances must be at least 1, got "
                f"{hidden_size}, {vocab_size}, {tuple(layers)}, {rank}, {distances}"
            )
        self.hidden_size, self.vocab_size, self.layers = hidden_size, vocab_size, tuple(layers)
        self.rank, self.distances = rank, distances
        first = layers[0]
        self.drawn = RowLayers(hidden_size, first)
        self.waiting = RowLayers(hidden_size, first, bias=False)
        self.token = nn.Parameter(0.3 * torch.randn(vocab_size, first))
        self.offset = nn.Parameter(0.3 * torch.randn(2 * distances + 1, first))
        self.dense = RowLayers(*layers, rank + 1)
        self.output = RowLayers(rank, vocab_size, bias=False)
        self.strength = 1.0
        self.trained_on: dict[str, Any] | None = None
        self.provenance: dict[str, Any] = {}

    def shift(self, drawn: Tensor, waiting: Tensor, tokens: Tensor, offset: Tensor) -> Tensor:
        """The shifts of waiting positions by drawn ones.

        Args:
            drawn: [..., H1], what `drawn` makes of the hidden states of the positions drawn.
            waiting: [..., H1], what `waiting` makes of those of the positions that wait.
            tokens: [...] int64, what was drawn.
            offset: [...] int64, the place of the one that waits minus that of the one drawn.

        Returns:
            [..., rank] float32; `output` of it is theta.
        """
        near = (offset != 0) & (offset.abs() <= self.distances)
        place = offset.clamp(-self.distances, self.distances) + self.distances
        told = self.dense(torch.relu(drawn + waiting + self.token[tokens] + self.offset[place]))
        gate = torch.relu(1.0 + told[..., -1:])
        shift: Tensor = told[..., :-1] * gate
        return shift.masked_fill(~near.unsqueeze(-1), 0.0)

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> NetworkPass:
        """One pass, see `Coupling`; hidden [R, N, D] of any precision.

        Raises:
            ValueError: if D is not the width it was made for.
        """
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"PairwiseCoupling: hidden must be [R, N, {self.hidden_size}], as it was trained, "
                f"got shape {tuple(hidden.shape)}"
            )
        return NetworkPass(self, hidden, order)

    def check_model(self, model: MaskedModel) -> None:
        """Refuse a model of other sizes or, where it is known, another one than it was trained on.

        Raises:
            ValueError: naming both.
        """
        if (model.hidden_size, model.vocab_size) != (self.hidden_size, self.vocab_size):
            raise ValueError(
                f"PairwiseCoupling: is for hidden states of width {self.hidden_size} and {self.vocab_size} tokens, got "
                f"{type(model).__name__} of {model.hidden_size} and {model.vocab_size}"
            )
        refuse_other("PairwiseCoupling", self.trained_on, model, "train the coupling again")

    def configuration(self) -> dict[str, Any]:
        """Keyword arguments that build the same network again."""
        names = ("hidden_size", "vocab_size", "layers", "rank", "distances")
        return {name: getattr(self, name) for name in names}

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def summary(self) -> str:
        """One line: what it is made of, and how large it is."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.configuration().items())
        return f"coupling: {sizes}; {self.n_parameters:,} parameters, strength {self.strength:g}"

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
            "configuration": self.configuration(),
            "strength": self.strength,
            "parameters": self.n_parameters,
            "trained_on": self.trained_on,
            "provenance": self.provenance,
        }
        text = json.dumps(config, indent=2) + "\n"
        with replace_file(folder / WEIGHTS_FILE) as temporary:
            temporary.write_bytes(save({name: value.contiguous() for name, value in self.state_dict().items()}))
        with replace_file(folder / CONFIG_FILE) as temporary:
            temporary.write_text(text)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> PairwiseCoupling:
        """Read a coupling back.

        Args:
            folder: as `save_pretrained` wrote it.

        Returns:
            The coupling in evaluation mode.

        Raises:
            FileNotFoundError: if the folder holds no coupling.
            ValueError: if a file is damaged, or the two do not belong together.
        """
        folder = Path(folder)
        config = read_json(folder / CONFIG_FILE, "not the configuration of a coupling")
        try:
            coupling = cls(**config["configuration"])
            coupling.load_state_dict(load((folder / WEIGHTS_FILE).read_bytes()), assign=True)
            coupling.strength = float(config["strength"])
            coupling.trained_on, coupling.provenance = config["trained_on"], config["provenance"]
        except (SafetensorError, RuntimeError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: weights and configuration do not make a coupling: {error}") from error
        return coupling.eval()


class NetworkPass:
    """A `CoupledPass`: the shifts of every position still to be drawn, summed as tokens are told."""

    def __init__(self, coupling: PairwiseCoupling, hidden: Tensor, order: Tensor) -> None:
        self.coupling, self.order = coupling, order
        place = order.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        states = hidden.gather(1, place).float()
        self.drawn, self.waiting = coupling.drawn(states), coupling.waiting(states)
        self.shifts = states.new_zeros(*order.shape, coupling.rank)

    def correction(self, k: int) -> Tensor | None:
        return None if k == 0 else self.coupling.strength * self.coupling.output(self.shifts[:, k])

    def tell(self, k: int, tokens: Tensor) -> None:
        own, later = self.order[:, k : k + 1], self.order[:, k + 1 :]
        if not later.numel():
            return
        drawn, waiting = self.drawn[:, k : k + 1], self.waiting[:, k + 1 :]
        shift = self.coupling.shift(drawn, waiting, tokens.unsqueeze(1).expand_as(later), later - own)
        self.shifts[:, k + 1 :] += shift.masked_fill(((own < 0) | (later < 0)).unsqueeze(-1), 0.0)


def load_coupling(folder: str | Path) -> PairwiseCoupling:
    """Load a coupling that `save_pretrained` wrote.

    Args:
        folder: its folder.

    Returns:
        The coupling in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds no coupling.
        ValueError: if the folder is damaged.
    """
    return PairwiseCoupling.from_pretrained(folder)
