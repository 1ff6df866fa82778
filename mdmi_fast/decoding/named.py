"""What commands and the service are told by name, turned into objects: models, sources of their MI, couplings."""

from __future__ import annotations

from collections.abc import Sequence

from mdmi_fast import coupling as couplings
from mdmi_fast import estimator as estimators
from mdmi_fast import models
from mdmi_fast.decoding.coupling import Coupling
from mdmi_fast.decoding.policies import Probing
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.estimator import PairScorer
from mdmi_fast.estimator.loading import has_estimator
from mdmi_fast.labels import FORMS
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.loading import model_options


def kind_of(model: str) -> str:
    """The loader's name in a model's name: "sudoku" of "sudoku:weak", "hf" of "hf:FOLDER?dtype=bfloat16"."""
    return model.partition("?")[0].partition(":")[0]


def load_decoded(name: str, specs: Sequence[str]) -> MaskedModel:
    """The model of a name; one that can show its attention does where one of the policies `specs` reads it."""
    attentive = any(spec.startswith("attention-graph") for spec in specs) and "attention" in model_options(name)
    return models.load_model(name, attention="eager") if attentive else models.load_model(name)


def find_estimator(source: str | None, *, model: str) -> PairScorer:
    """The estimator of a name or folder; without one that which ships for the model, or was trained for it here.

    Args:
        source: as `load_estimator` takes it.
        model: as `load_model` takes it.

    Raises:
        UnsupportedError: none is named and there is none for the model.
        FileNotFoundError, ValueError: as `load_estimator`.
    """
    if source is None and not has_estimator(model):
        missing = (
            f"no estimator ships for {model}, and none was trained here: name one with --estimator, or make one with "
            f"`mdmi-fast label --model {model}` and `mdmi-fast train --model {model}`"
        )
        raise UnsupportedError([missing], "find_estimator")
    return estimators.load_estimator(source or model.partition("?")[0])


def find_source(source: str | None, *, model: str) -> PairScorer | Probing:
    """The source of mutual information of a name: "probe" or "probe:FORM", else as `find_estimator`.

    Raises:
        UnsupportedError: there is no such form; else as `find_estimator`.
    """
    kind, colon, form = (source or "").partition(":")
    if kind != "probe":
        return find_estimator(source, model=model)
    for known in FORMS:
        if form == known or (known == "joint" and not colon):
            return Probing(known)
    raise UnsupportedError([f"--estimator {source}: the forms are {', '.join(FORMS)}"], "find_source")


def load_source(source: str | None, model: MaskedModel, *, name: str) -> PairScorer | Probing:
    """As `find_source`, for a model that is loaded.

    Args:
        source: an estimator's name or folder, or probe[:FORM]; None: what ships for the model, or was trained for it here.
        model: whose mutual information it shall tell.
        name: of the model, as `load_model` takes it.

    Raises:
        UnsupportedError: as `find_source`.
        ValueError: the estimator was trained on another model.
    """
    found = find_source(source, model=name)
    if not isinstance(found, Probing):
        found.check_model(model)
    return found


def find_coupling(source: str | None) -> Coupling | None:
    """The coupling of a folder; "probing" (or "probe") asks the model itself; None: none.

    Raises:
        FileNotFoundError, ValueError: as `mdmi_fast.coupling.load_coupling`.
    """
    if source is None:
        return None
    return Probing() if source in ("probing", "probe") else couplings.load_coupling(source)
