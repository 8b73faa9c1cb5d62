"""Every row of the first table in docs/integrations.md names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_row_names_its_test():
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, works, held = (cell.strip() for cell in row.strip("|").split("|"))
        assert works, row
        path, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", held).groups()
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), row
