"""Writes the tables of families and of caches in docs/families.md from their tests.

.venv/bin/python scripts/family_table.py
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import caches  # noqa: E402
import families  # noqa: E402

# Page, its marker, file of tests, cells, and the function from the cells that pass to the table.
TABLES = [
    ("docs/families.md", "families", "test_families.py", families.CELLS, families.table),
    ("docs/families.md", "caches", "test_caches.py", caches.CELLS, caches.table),
]


class Outcomes:
    """Remembers which cells' tests passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.partition("test_cell[")[2].rstrip("]"))


def main() -> int:
    worst = 0
    for name, marker, file, cells, table in TABLES:
        outcomes, page = Outcomes(), ROOT / name
        start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
        before, _, rest = page.read_text(encoding="utf-8").partition(start)
        _, _, after = rest.partition(end)
        if not after:
            raise SystemExit(f"{page}: no {start} … {end}")
        tests = str(ROOT / "tests" / "models" / file)
        code = pytest.main(["-q", "--no-header", "--show-capture=no", tests], plugins=[outcomes])
        passed = {cell for cell in cells if "-".join(cell) in outcomes.passed}
        written = f"{before}{start}\n{table(passed)}\n{end}{after}"
        page.write_text(written, encoding="utf-8")
        print(f"{page}: {len(passed)} of {len(cells)} cells pass")
        worst = max(worst, int(code))
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
