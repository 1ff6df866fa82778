"""`python -m tools.policy_table`: write the table of policies into README.md, from what each class says of itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mdmi_fast.decoding.policies.registry import registered

README = Path(__file__).resolve().parent.parent / "README.md"
HEAD = ["| policy | as text | unmasks in a pass |", "|---|---|---|"]


def table() -> list[str]:
    """The lines of the table."""
    rows = []
    for each in registered().values():
        needed = [field.name for field in dataclasses.fields(each.make) if field.default is dataclasses.MISSING]
        value = f":{each.value[0].upper()}" if each.value else ""
        rows.append(f"| `{each.make.__name__}({', '.join(needed)})` | `{each.name}{value}` | {each.unmasks} |")
    return HEAD + rows


def main() -> None:
    lines = README.read_text().splitlines()
    start = lines.index(HEAD[0])
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    README.write_text("\n".join([*lines[:start], *table(), *lines[end:]]) + "\n")


if __name__ == "__main__":
    main()
