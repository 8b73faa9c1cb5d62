"""Every row of the first table in docs/integrations.md links to its tests."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"


def test_every_row_links_to_its_tests():
    table = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, works = row.strip("| ").split("|")
        linked = re.match(r" \[.+\]\((\.\./tests/[\w/]+\.py)\)", works)
        assert linked and (PAGE.parent / linked[1]).is_file(), row
