"""Estimators by name: of a folder, of a package that ships one, or made here for a model."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from mdmi_fast.estimator.configuration import CONFIG_FILE, read_configuration
from mdmi_fast.estimator.general import PairwiseMIEstimator
from mdmi_fast.estimator.scorer import PairScorer, ShippedScorer
from mdmi_fast.estimator.table import DistanceTable
from mdmi_fast.files import cache_folder
from mdmi_fast.models.loading import find_for_model, registered, resolve


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
        own = {made.architecture: made for made in (PairwiseMIEstimator, DistanceTable)}
        architecture_class: type[PairScorer] = own.get(architecture) or resolve("mdmi_fast.estimators", architecture)
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
