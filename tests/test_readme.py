"""The README's Python runs as it stands, and what it says of files is so."""

import re
from pathlib import Path
from typing import Any

import pytest

from tools import policy_table

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "step" in names:
        assert names["step"] < 40  # of 81, at the setting shown


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_table_of_policies_is_what_their_classes_say() -> None:
    readme = policy_table.README.read_text()
    assert "\n".join(policy_table.table()) in readme, "run python -m tools.policy_table"
