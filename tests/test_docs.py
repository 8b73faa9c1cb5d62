"""The documentation: its commands parse, its tutorials and its notebook run, its site builds."""

import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coca_lab.arguments import SettingsParser
from coca_lab.cli import main
from conftest import some_text

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "results/**/*.md", "src/**/README.md")
    for path in sorted(ROOT.glob(pattern))
]
TUTORIALS = [ROOT / "docs" / "tutorials" / f"{name}.md" for name in (
    "quickstart", "your-text", "convert", "evaluate", "serve"
)]  # fmt: skip


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """Every ``coca`` command of a page, in words; a loop of the shell is run once."""
    found = []
    for block in (block for language, block in blocks(page) if language == "sh"):
        variables = re.findall(r'^(\w+)="([^"]*)"', block, re.M)
        variables += re.findall(r"^for (\w+) in (\S+)", block, re.M)
        for name, value in variables:
            block = block.replace(f"${name}", value)
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.search(r"(?:^|[|&] )\s*coca (.*)", line):
                words = shlex.split(match[1], comments=True)
                found.append(words[: words.index(">")] if ">" in words else words)
    return found


class Parsed(BaseException):
    """The words of a command are valid."""


@pytest.fixture
def parse_only(monkeypatch):
    """Stop commands when they have parsed their words, before they do anything."""
    read = SettingsParser.read

    def stop(self, words):
        read(self, words)
        raise Parsed

    monkeypatch.setattr(SettingsParser, "read", stop)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page, parse_only, capsys, tmp_path):
    suites = [block for kind, block in blocks(page) if kind == "yaml"]
    for words in commands(page):
        if words[0] == "serve":
            assert not words[1].startswith("-")  # tests/lab/test_serve.py has the rest
            continue
        for position, word in enumerate(words):
            if word == "runs/e/suite.yaml":
                words[position] = str(tmp_path / "suite.yaml")
                Path(words[position]).write_text(suites[0], encoding="utf-8")
            elif re.fullmatch("runs/.*/recipe.yaml", word):  # of a run that is not there
                words[position] = "recipes/books-5m.yaml"
            elif word == "my.yaml":  # a copy of one
                words[position] = "studies/long-context.yaml"
        try:
            main(words)
        except Parsed:
            continue
        raise AssertionError(f"coca {shlex.join(words)}: {capsys.readouterr().err}")


def test_python_of_the_tutorials_is_valid():
    for page in PAGES:
        for language, block in blocks(page):
            if language == "python":
                compile(block, str(page), "exec")


SMALL_RUN = [
    "--model.hidden-size=16", "--model.num-heads=2", "--data.vocab-size=300",
    "--data.max-tokens=20000", "--training.steps=2", "--training.global-batch-size=4",
    "--training.micro-batch-size=4",
    "--training.report-to=[]", "--training.precision=float32", "--validation.batches=1",
]  # fmt: skip
SMALL_STAGES = [
    "--data.max-tokens=20000", "--training.report-to=[]", "--training.precision=float32",
    "--stages=[{name: a, train: qt, objective: attention, steps: 1}]",
]  # fmt: skip
SMALL = {
    "study": [
        "--training.steps=2", "--model.hidden-size=16", "--data.vocab-size=300",
        "--perplexity.windows=64,128", "--perplexity.max-documents=2",
    ],
    "train": SMALL_RUN,
    "generate": ["--max-new-tokens=2"],
}  # fmt: skip


ARXIV = re.compile(r"arxiv(?:\.org/abs/|[\s:]+)(\d{4}\.\d{5})", re.IGNORECASE)
POST = re.compile(r"kexue\.fm/archives/(\d+)")


@pytest.mark.parametrize("cited", [ARXIV, POST], ids=["arxiv", "posts"])
def test_whatever_is_cited_is_among_the_related_work(cited):
    sources = [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("recipes/*.yaml")]
    listed = set(cited.findall((ROOT / "docs" / "related-work.md").read_text(encoding="utf-8")))
    for path in sources:
        missing = set(cited.findall(path.read_text(encoding="utf-8"))) - listed
        assert not missing, f"{path.relative_to(ROOT)} cites {missing}"


@pytest.mark.slow
def test_the_tutorials_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """With models that learn nothing; a server is started in tests/lab/test_serve.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for folder, index in itertools.product(("books", "test"), range(4)):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = some_text(6000, seed=index + 10 * (folder == "test"))
        (tmp_path / folder / f"{index}.txt").write_text(text)
    done = set()
    assert main(["study", "quickstart", *SMALL["study"]]) == 0, capsys.readouterr().err
    for page in TUTORIALS:
        for language, block in blocks(page):
            if language == "yaml":
                Path("runs/e").mkdir()  # as the page's first commands do
                Path("runs/e/suite.yaml").write_text(block, encoding="utf-8")
            if language == "python":
                exec(compile(block, str(page), "exec"), {})
        for words in commands(page):
            if words[0] == "serve" or "-" in words:
                continue
            small = SMALL.get(words[0], [])
            if "--model.start" in words:
                small = SMALL_STAGES
            assert main([*words, *small]) == 0, (words, capsys.readouterr().err)
            done.add(words[0] if words[0] != "eval" else words[1])
    assert {"train", "convert", "suite", "passkey", "analyze", "report"} <= done


NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()


def test_the_notebook_is_committed_with_its_outputs():
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    for output in (output for cell in cells for output in cell["outputs"]):
        output.get("data", {}).pop("image/png", None)
    text = json.dumps(cells).replace("\\n", "\n")
    # An absolute path would be one of the machine that it ran on.
    assert not re.search(r"(?<![\w.:/<])/\w[\w.-]*/|file://|Traceback", text)


def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    """Strict, with its links checked: see scripts/docs_site.py."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    reference = site / "docs" / "reference"
    index = (reference / "index.html").read_text(encoding="utf-8")
    for name in importlib.import_module("coca_attention").__all__:
        assert f"<code>{name}</code>" in index
    for source in (ROOT / "docs" / "reference").glob("[!R]*.md"):
        path = re.findall(r"^::: ([\w.]+)", source.read_text(encoding="utf-8"), re.M)[0]
        text = (reference / f"{source.stem}.html").read_text(encoding="utf-8")
        for name in getattr(importlib.import_module(path), "__all__", ()):
            there = rf'id="{re.escape(path)}\.([\w.]+\.)?{name}"'
            assert re.search(there, text), f"{path}.{name} has no docstring"


def targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z-]+)", text))


def test_the_forge_runs_what_the_project_runs():
    """The same make targets, and the Python versions that the package declares."""
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflows = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert targets(workflows["tests"]) == targets(run)
    assert set().union(*map(targets, workflows.values())) <= targets(
        (ROOT / "Makefile").read_text()
    )
    jobs = yaml.safe_load(workflows["tests"])["jobs"]
    classified = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["tests"]["strategy"]["matrix"]["python"] == classified
    for name, text in workflows.items():
        assert yaml.safe_load(text)["permissions"] is not None, name
        for action in re.findall(r"uses: (\S+)", text):
            assert re.search(r"@(v\d+|release/v\d+)$", action), action
