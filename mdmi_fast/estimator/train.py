"""Training of an estimator on labelled states of a frozen model (arXiv 2605.20187)."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdmi_fast._threads import one_torch_thread
from mdmi_fast.estimator.data import Example, Labels, ask_once, examples, read_batch, split_states
from mdmi_fast.estimator.evaluate import evaluate_estimator
from mdmi_fast.estimator.loss import PairLoss, Transform
from mdmi_fast.estimator.report import PairReport
from mdmi_fast.estimator.scorer import E, PairScorer
from mdmi_fast.estimator.seen import SeenStates, fingerprints, padding_of
from mdmi_fast.estimator.table import DistanceTable
from mdmi_fast.files import replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import describe_model, identity

T = TypeVar("T")
_PARTS = 8
"""Parts of a batch whose gradients are added in order: as many processes can share a batch, and no sum depends on how many
do."""


class TrainingProgress(NamedTuple):
    """What an epoch ended with.

    Attributes:
        epoch: its number, from 0.
        loss: the mean over its training pairs.
        held_out: the report on held-out states.
        table: Pearson's r, on the same states, of the `DistanceTable` fitted to those trained on: what is to be beaten.
    """

    epoch: int
    loss: float
    held_out: PairReport
    table: float


@one_torch_thread()
def train_estimator(
    estimator: E,
    model: MaskedModel,
    labels: Labels,
    *,
    old: Labels | None = None,
    epochs: int = 20,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-3,
    transform: Transform = "root",
    underestimation: float = 1.0,
    emphasis: float = 0.0,
    held_out: float = 0.1,
    patience: int = 5,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[TrainingProgress], None] | None = None,
) -> tuple[E, PairReport]:
    """Fit an estimator to the labels of a frozen model; the weights of the best epoch are kept.

    The loss is `PairLoss`, where negative labels count as 0 unless the estimator's output is "identity"; the best epoch
    is that of the highest held-out correlation. An estimator that was never trained (`trained_on` is None) begins at the
    constant nearest to the labels, with `distances` at the `DistanceTable`; one that was goes on from its weights
    (refinement). On a GPU the dense layers multiply in bfloat16. Under torchrun the processes share the work of every
    batch, up to eight of them.

    On a CPU the weights that come out are the same bytes for any number of threads and processes, however often training
    was interrupted, provided the model answers a state the same every time.

    Args:
        estimator: trained in place, on the device of its weights; `trained_on` is set to the model, and these states join
            those it has `seen`.
        model: whose hidden states the labels belong to, on the same device.
        labels: of states of this model: a `LabelSet`, or the list that `read_examples` gives, of any lengths. The model
            is asked once about states that do not bring their hidden states (in every epoch beyond 1 GiB of answers).
        old: labels of before the model moved; as many as there are new ones are mixed into every epoch, drawn anew, so that
            what was learned is not forgotten. Never judged on; those that are held out of labels are left out.
        epochs: most passes over the states; the rate falls to 0 along a cosine.
        batch_size: states a step, over all processes; a state brings all of its pairs.
        learning_rate: of AdamW, with gradients clipped at norm 1.
        weight_decay: of AdamW.
        transform: of `PairLoss`, like the next two.
        underestimation: how much heavier a prediction below the label weighs than one above.
        emphasis: how much heavier pairs of high mutual information weigh.
        held_out: share of the states that is only judged on. Equal states stay together, and none is held out that the
            estimator was trained on before.
        patience: epochs without a better held-out correlation before it stops.
        seed: of the split and the order.
        checkpoint: file written after every epoch; where it exists, training resumes from it exactly where it
            stopped. None: none.
        on_epoch: called after every epoch, in the first process.

    Returns:
        The estimator in evaluation mode and its report on the held-out states.

    Raises:
        ValueError: if there are too few states or pairs, the estimator was trained on all of them before, a label is not
            finite, model, estimator and kept hidden states
            are not of one width, epochs or batch_size is less than 1, held_out or an option of the loss is out of range,
            the checkpoint is damaged or of other settings, or the loss stops being a number.
    """
    _check_options(epochs, batch_size, held_out)
    loss = PairLoss(transform, underestimation, emphasis)
    states, old_states = examples(labels), [] if old is None else examples(old)
    if isinstance(estimator, DistanceTable):
        raise TypeError(
            "train_estimator: estimator must be a network, got a DistanceTable; DistanceTable.fit makes one"
        )
    estimator.check_model(model, moved=True)
    _check_labels("labels", states, estimator.hidden_size)
    _check_labels("old", old_states, estimator.hidden_size)
    before, pad = estimator.seen or SeenStates.none(complete=estimator.trained_on is None), padding_of(model)
    train, judge = split_states(states, held_out, seed, trained=before.trained, pad=pad)
    judged = fingerprints(judge, pad)
    kept_old = ~torch.isin(fingerprints(old_states, pad), judged)
    old_states = [state for state, kept in zip(old_states, kept_old.tolist(), strict=True) if kept]
    steps = -(-len(_order(len(train), len(old_states), seed, 0)) // batch_size)
    trainer = _Trainer(estimator, model, loss, learning_rate, weight_decay, epochs * steps)
    settings = {
        "estimator": estimator.configuration(),
        "start": describe_model(estimator)["weights"],
        "model": identity(model),
        "labels": [len(states), _total(states)],
        "old": [len(old_states), _total(old_states)],
        "loss": asdict(loss),
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "held_out": held_out,
        "seed": seed,
    }
    if estimator.trained_on is None:
        _begin(estimator, loss, train)
    estimator.seen = before.after(fingerprints([*train, *old_states], pad), judged)
    run = _Run(estimator, trainer.optimizer, None if checkpoint is None else Path(checkpoint), settings)
    train, judge, old_states = (
        ask_once(part, model, trainer.device, needs_stats=estimator.needs_stats) for part in (train, judge, old_states)
    )
    table = _told_by_first(
        lambda: evaluate_estimator(DistanceTable.fit(train).to(trainer.device), model, judge).pearson
    )
    while run.epoch < epochs and run.epoch - run.best_epoch <= patience:
        total = 0.0
        order = _order(len(train), len(old_states), seed, run.epoch)
        for index, chosen in enumerate(order.split(batch_size)):
            batch = [train[n] if n < len(train) else old_states[n - len(train)] for n in chosen.tolist()]
            total += trainer.step(batch, run.epoch * steps + index)
        if not math.isfinite(total):
            raise ValueError(
                f"train_estimator: the loss of epoch {run.epoch} is {total}; lower learning_rate, or look for hidden "
                "states that are not finite"
            )
        report = _told_by_first(lambda: evaluate_estimator(estimator.eval(), model, judge))
        run.finish_epoch(-math.inf if math.isnan(report.pearson) else report.pearson)  # NaN: all predictions are equal
        if on_epoch is not None and _rank() == 0:
            on_epoch(TrainingProgress(run.epoch - 1, total / steps, report, table))
    estimator.load_state_dict(run.best)
    estimator.trained_on = identity(model)
    return estimator.eval(), evaluate_estimator(estimator, model, judge)


def _check_options(epochs: int, batch_size: int, held_out: float) -> None:
    if min(epochs, batch_size) < 1:
        raise ValueError(f"train_estimator: epochs and batch_size must be at least 1, got {epochs} and {batch_size}")
    if not 0 < held_out < 1:
        raise ValueError(f"train_estimator: held_out must be a share between 0 and 1, got {held_out}")


def _begin(estimator: PairScorer, loss: PairLoss, train: Sequence[Example]) -> None:
    """Set fresh weights to the constant nearest to the labels, or to the table of their distances.

    From above the labels the first steps would run into the depths where an output is 0 and has no slope.
    """
    mi = torch.cat([state.mi for state in train])
    constant = loss.constant(mi if estimator.output == "identity" else mi.clamp(min=0))
    estimator.begin_at(constant, None if estimator.shift is None else _means(estimator, train, constant))


def _means(estimator: PairScorer, train: Sequence[Example], constant: float) -> Tensor:
    """[R] nats, of each relation of an estimator with a `shift`; the constant where there is no label."""
    assert estimator.shift is not None
    size = len(estimator.shift)
    if estimator.relation is None:
        return DistanceTable.fit(train, distances=size).values
    relation = estimator.relation.cpu().long()
    total, count = torch.zeros(2, size, dtype=torch.float64, device="cpu")
    for state in train:
        i, j = state.pairs.cpu().unbind(-1)
        for r in (relation[i, j], relation[j, i]):
            total.index_add_(0, r, state.mi.cpu().double())
            count.index_add_(0, r, torch.ones_like(r, dtype=torch.float64))
    return torch.where(count > 0, total / count.clamp(min=1), constant).float()


def _check_labels(name: str, states: Sequence[Example], hidden_size: int) -> None:
    for number, state in enumerate(states):
        if not bool(state.mi.isfinite().all()):
            raise ValueError(f"train_estimator: {name} must be finite, got another one in state {number}")
        if state.hidden is not None and state.hidden.shape[1] != hidden_size:
            raise ValueError(
                f"train_estimator: {name} must bring hidden states of width {hidden_size}, as the estimator reads, got "
                f"{state.hidden.shape[1]} in state {number}"
            )


def _total(states: Sequence[Example]) -> float:
    """The sum of all labels, rounded once: torch's own differs between processors, and a checkpoint may go to another."""
    return math.fsum(label for state in states for label in state.mi.tolist())


class _Trainer:
    """Takes steps whose gradient is a sum in a fixed order, whichever process computes which part of it."""

    def __init__(
        self,
        estimator: PairScorer,
        model: MaskedModel,
        loss: PairLoss,
        learning_rate: float,
        weight_decay: float,
        total_steps: int,
    ) -> None:
        self.estimator, self.model, self.loss = estimator, model, loss
        self.learning_rate, self.total_steps = learning_rate, total_steps
        self.parameters = [weight for weight in estimator.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=weight_decay)
        self.device = next(estimator.parameters()).device
        estimator.precision = "bf16" if self.device.type == "cuda" else None
        if _world() > 1:
            for weight in estimator.state_dict().values():
                dist.broadcast(weight, src=0)

    def step(self, states: Sequence[Example], number: int) -> float:
        """One step on some states; returns the loss over all of their pairs."""
        self.estimator.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * 0.5 * (1 + math.cos(math.pi * number / self.total_steps))
        count = max(2 * sum(len(state.mi) for state in states), 1)
        size = -(-len(states) // _PARTS)
        parts = [states[first : first + size] for first in range(0, len(states), size)]
        gradient = torch.zeros(
            sum(weight.numel() for weight in self.parameters) + 1, dtype=self.parameters[0].dtype, device=self.device
        )
        # One part a process and round; a process whose part does not exist waits for the others.
        for first in range(0, len(parts), _world()):
            own = first + _rank()
            found = self._part(parts[own], count) if own < len(parts) else torch.zeros_like(gradient)
            for part in _from_all(found)[: len(parts) - first]:
                gradient += part
        loss, *gradients = gradient.split([1, *(weight.numel() for weight in self.parameters)])
        for weight, own_gradient in zip(self.parameters, gradients, strict=True):
            weight.grad = own_gradient.view_as(weight)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return float(loss)

    def _part(self, states: Sequence[Example], count: int) -> Tensor:
        """What some states add to the mean over `count` pairs: the loss, then the gradient, [1 + parameters] float32."""
        batch = read_batch(states, self.model, self.device, needs_stats=self.estimator.needs_stats)
        predicted = self.estimator(batch.hidden, batch.mask, batch.stats)
        # What an output cannot reach must not weigh more the further away it is.
        mi = batch.mi if self.estimator.output == "identity" else batch.mi.clamp(min=0)
        loss = self.loss.total(predicted, mi, batch.pairs) / count
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)]).to(
            self.parameters[0].dtype
        )


class _Run:
    """How far a training is, in memory and in its checkpoint."""

    def __init__(
        self, estimator: PairScorer, optimizer: torch.optim.Optimizer, path: Path | None, settings: dict[str, Any]
    ) -> None:
        self._estimator, self._optimizer, self._path, self._settings = estimator, optimizer, path, settings
        self.epoch, self.best_epoch, self._best_score = 0, 0, -math.inf
        self.best: dict[str, Tensor] = {}
        if path is None:
            return
        if _rank() == 0:
            for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed while it wrote
                leftover.unlink()
        # The processes of one training may be on machines that share no folder.
        kept = _told_by_first(lambda: _read_checkpoint(path))
        if kept is not None:
            self._resume(path, kept)

    def finish_epoch(self, score: float) -> None:
        if not self.best or score > self._best_score:
            self.best_epoch, self._best_score = self.epoch, score
            self.best = copy.deepcopy(self._estimator.state_dict())
        self.epoch += 1
        if self._path is not None and _rank() == 0:
            held = io.BytesIO()  # written by torch itself, a full disk would be a RuntimeError that names no file
            torch.save({"settings": self._settings, "state": self._state()}, held)
            with replace_file(self._path) as temporary:
                temporary.write_bytes(held.getbuffer())

    def _state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_score": self._best_score,
            "best": self.best,
            "weights": self._estimator.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def _resume(self, path: Path, held: bytes) -> None:
        try:
            kept = torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
            settings, state = kept["settings"], kept["state"]
        except Exception as error:  # torch and pickle raise many kinds for a file that is something else
            raise ValueError(f"{path}: not the checkpoint of a training: {error}") from error
        changed = [name for name, value in self._settings.items() if settings.get(name) != value]
        if changed:
            raise ValueError(
                f"{path}: is of a training with other {', '.join(changed)}; delete it or choose another folder"
            )
        self._estimator.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.best_epoch, self._best_score = state["epoch"], state["best_epoch"], state["best_score"]
        self.best = state["best"]


def _order(n_new: int, n_old: int, seed: int, epoch: int) -> Tensor:
    """Numbers of the states of an epoch, in its order: all new ones, and as many of the old ones that follow them."""
    generator = torch.Generator().manual_seed(((seed << 20) + epoch + 1) % 2**63)
    order = torch.randperm(n_new, generator=generator, device="cpu")
    if n_old:
        some = n_new + torch.randperm(n_old, generator=generator, device="cpu")[:n_new]
        order = torch.cat([order, some])
        order = order[torch.randperm(len(order), generator=generator, device="cpu")]
    return order


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world() > 1 else 0


def _read_checkpoint(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise ValueError(f"{path}: not the checkpoint of a training: {error}") from error


def _from_all(tensor: Tensor) -> list[Tensor]:
    """A tensor of every process, in the order of the processes."""
    if _world() == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(_world())]
    dist.all_gather(found, tensor)
    return found


def _told_by_first(find: Callable[[], T]) -> T:
    """What the first process finds, in all of them: they must not disagree on where to begin and when to stop."""
    if _world() == 1:
        return find()
    box: list[Any] = [find() if _rank() == 0 else None]
    dist.broadcast_object_list(box)
    found: T = box[0]
    return found
