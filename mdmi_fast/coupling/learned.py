"""What all learned couplings share: the sum of shifts in a pass, the check of the model, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.files import check_folder, read_json, replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import refuse_other

WEIGHTS_FILE, CONFIG_FILE = "coupling.safetensors", "coupling.json"
C = TypeVar("C", bound="LearnedCoupling")


class LearnedCoupling(nn.Module):
    """A network that tells what a token drawn at one position adds to the log-probabilities of another.

    It does so as a shift, a few numbers that `output` turns into one for each token. A position drawn after several others
    gets the sum of their shifts. A subclass says how (`project`, `shift`, `output`), and names itself (`architecture`).

    Attributes:
        hidden_size: D of the model.
        vocab_size: V of the model.
        shift_size: numbers of a shift.
        reach: the farthest pair that is corrected.
        strength: what all corrections are multiplied by; set by `train_coupling` on held-out sequences.
        greedy: whether `decode` corrects at temperature 0 too; not saved.
        trained_on: the model it was trained on (`identity`); None: unknown.
        provenance: what else is worth knowing, saved alongside for humans.
    """

    architecture: ClassVar[str]
    """Names the class in a saved configuration: "general", or the entry point it is registered as."""
    shift_size: int
    reach: int

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.strength, self.greedy = 1.0, False
        self.trained_on: dict[str, Any] | None = None
        self.provenance: dict[str, Any] = {}

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `shift` reads of the hidden states [..., D] of positions that are drawn, and of those that wait: [..., any]."""
        raise NotImplementedError

    def shift(self, drawn: Tensor, waiting: Tensor, tokens: Tensor, a: Tensor, j: Tensor) -> Tensor:
        """The shifts of waiting positions by drawn ones.

        Args:
            drawn: [..., any], the first of what `project` gives, of the positions drawn.
            waiting: [..., any], the second, of the positions that wait.
            tokens: [...] int64, what was drawn.
            a: [...] int64, where.
            j: [...] int64, the positions that wait.

        Returns:
            [..., shift_size] float32, exactly 0 where a pair is not coupled.
        """
        raise NotImplementedError

    def output(self, shift: Tensor) -> Tensor:
        """[..., shift_size] to [..., V], linear."""
        raise NotImplementedError

    def configuration(self) -> dict[str, Any]:
        """Keyword arguments that build the same network again."""
        raise NotImplementedError

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> NetworkPass:
        """One pass, see `mdmi_fast.coupling.Coupling`; hidden [R, N, D] of any precision.

        Raises:
            ValueError: if D is not the width it was made for.
        """
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: hidden must be [R, N, {self.hidden_size}], as it was trained, "
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
                f"{type(self).__name__}: is for hidden states of width {self.hidden_size} and {self.vocab_size} tokens, got "
                f"{type(model).__name__} of {model.hidden_size} and {model.vocab_size}"
            )
        refuse_other(type(self).__name__, self.trained_on, model, "train the coupling again")

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def summary(self) -> str:
        """One line: what it is made of, and how large it is."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.configuration().items())
        return f"{self.architecture} coupling: {sizes}; {self.n_parameters:,} parameters, strength {self.strength:g}"

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
    def from_pretrained(cls: type[C], folder: str | Path) -> C:
        """Read a coupling of this architecture back; `load_coupling` reads any.

        Args:
            folder: as `save_pretrained` wrote it.

        Returns:
            The coupling in evaluation mode.

        Raises:
            FileNotFoundError: if the folder holds no coupling.
            ValueError: if a file is damaged, or the two do not belong together.
        """
        folder = Path(folder)
        config = read_configuration(folder)
        if config["architecture"] != cls.architecture:
            raise ValueError(
                f"{folder}: holds a {config['architecture']!r} coupling, {cls.__name__} reads {cls.architecture!r}"
            )
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

    def __init__(self, coupling: LearnedCoupling, hidden: Tensor, order: Tensor) -> None:
        self.coupling, self.order = coupling, order
        place = order.clamp(min=0).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        self.drawn, self.waiting = coupling.project(hidden.gather(1, place).float())
        self.shifts = self.drawn.new_zeros(*order.shape, coupling.shift_size)

    def correction(self, k: int) -> Tensor | None:
        return None if k == 0 else self.coupling.strength * self.coupling.output(self.shifts[:, k])

    def tell(self, k: int, tokens: Tensor) -> None:
        own, later = self.order[:, k : k + 1], self.order[:, k + 1 :]
        if not later.numel():
            return
        drawn, waiting = self.drawn[:, k : k + 1].expand(-1, later.shape[1], -1), self.waiting[:, k + 1 :]
        places = own.expand_as(later).clamp(min=0), later.clamp(min=0)
        shift = self.coupling.shift(drawn, waiting, tokens.unsqueeze(1).expand_as(later), *places)
        self.shifts[:, k + 1 :] += shift.masked_fill(((own < 0) | (later < 0)).unsqueeze(-1), 0.0)


def read_configuration(folder: Path) -> dict[str, Any]:
    """The JSON of a saved coupling.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged or of something else.
    """
    path = folder / CONFIG_FILE
    config = read_json(path, "not the configuration of a coupling")
    kinds = {"architecture": str, "configuration": dict, "provenance": dict}
    if not isinstance(config, dict) or not all(isinstance(config.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path}: not the configuration of a coupling: {', '.join(kinds)} are not all there")
    return config
