"""`mdmi-fast models`: which models there are, and fetching those whose weights come inside Python packages."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list models, fetch pretrained ones",
        description="List the models by name, or fetch pretrained antibody models: a pinned package is downloaded with "
        "pip, checked, and its weights converted into the user's cache folder (or MDMI_CACHE). Nothing is installed.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the names that --model takes")
    listing.set_defaults(run=run_list)
    fetching = actions.add_parser("fetch", help="download and convert a model")
    fetching.add_argument("name", metavar="NAME", help="sapiens or antiberty")
    fetching.add_argument("--wheel", type=Path, metavar="FILE", help="the package's file, if it is already here")
    fetching.set_defaults(run=run_fetch)


def run_list(options: argparse.Namespace) -> int:
    from mdmi_fast.models.loading import registered
    from mdmi_fast.tasks.protein.models import PACKAGES

    for name, entry in registered("mdmi_fast.models").items():
        if name in PACKAGES:
            parts = PACKAGES[name].members
            variants = [name] if len(parts) == 1 else [f"{name}:{part}" for part in parts]
            print(f"{', '.join(variants):<32}{_state(name)}")
        else:
            print(f"{name:<32}{(inspect.getdoc(entry.load()) or '').partition(chr(10))[0]}".rstrip())
    return 0


def _state(name: str) -> str:
    from mdmi_fast.tasks.protein.models import is_fetched

    try:
        return "fetched" if is_fetched(name) else f"mdmi-fast models fetch {name}"
    except ImportError as error:
        return str(error)


def run_fetch(options: argparse.Namespace) -> int:
    from mdmi_fast.tasks.protein.models import fetch

    print(fetch(options.name, wheel=options.wheel))
    return 0
