"""The files of a saved estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mdmi_fast.files import read_json

WEIGHTS_FILE, CONFIG_FILE = "estimator.safetensors", "estimator.json"


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
