"""Writes the README's table of families: runs its cells' tests and marks those that pass.

.venv/bin/python scripts/family_table.py
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from families import CELLS, readme_table  # noqa: E402

START, END = "<!-- families -->", "<!-- /families -->"


class Outcomes:
    """Remembers which cells' tests passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.partition("test_cell[")[2].rstrip("]"))


def main() -> int:
    outcomes = Outcomes()
    tests = str(ROOT / "tests" / "models" / "test_families.py")
    code = pytest.main(["-q", "--no-header", "--show-capture=no", tests], plugins=[outcomes])
    passed = {cell for cell in CELLS if "-".join(cell) in outcomes.passed}
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{readme}: no {START} … {END}")
    table = readme_table(passed)
    readme.write_text(f"{before}{START}\n{table}\n{END}{after}", encoding="utf-8")
    print(f"{readme}: {len(passed)} of {len(CELLS)} cells pass")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
