"""The published pages have the tables that their commands write from the committed results."""

import re
import runpy
import shutil
from pathlib import Path

import pytest

from coca_attention.errors import UserError
from coca_lab.report import printed_tables, read_results
from studies import trials
from studies.pages import BEGIN, END, write_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    "module", ["extension", "native", "recall", "retrieval_tables", "smollm2.table", "verdict.rule"]
)
def test_a_page_has_the_tables_of_its_results(module, tmp_path, monkeypatch):
    folder = Path("results", module.split(".")[0].removesuffix("_tables"))
    shutil.copytree(ROOT / folder, tmp_path / folder)
    page = tmp_path / folder / "README.md"
    published = page.read_text(encoding="utf-8")
    emptied = re.sub(r"(<!-- \w+ -->\n).*?(\n<!-- end)", r"\1old\2", published, flags=re.DOTALL)
    page.write_text(emptied, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [module])
    runpy.run_module(f"studies.{module}", run_name="__main__")
    assert page.read_text(encoding="utf-8") == published != emptied


def test_tables_go_between_marks_or_nowhere(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"Before\n{BEGIN}\nold\n{END}\nafter")
    write_tables(page, "new")
    assert page.read_text() == f"Before\n{BEGIN}\nnew\n{END}\nafter"
    page.write_text(f"Before\n{BEGIN}\n")
    with pytest.raises(UserError, match="has no place for tables"):
        write_tables(page, "new")


def test_the_report_reads_the_trials_of_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["trials", str(ROOT / "results" / "retrieval")])
    trials.main()
    (content,) = read_results(["runs/trials"])
    assert content["study"]["title"] and printed_tables(content["results"])
