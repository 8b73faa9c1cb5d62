"""The documentation: its examples run, its commands parse, its site builds."""

import ast
import functools
import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from transformers import pipeline

import studies.recall  # noqa: F401 (registers the task, as COCA_IMPORT does)
from coca_attention.errors import UserError
from coca_lab.cli import COMMANDS, main
from coca_lab.cli.parsing import command_parser
from coca_lab.evaluation import choice
from coca_lab.options import option_names, option_of
from coca_lab.recipe import StageRecipe, WeightedSource
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.studies import load_study
from conftest import some_text
from families import vanilla

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PATTERNS = ("*.md", "docs/**/*.md", "results/**/*.md", "src/**/README.md")
PAGES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOK = TUTORIALS / "notebook.ipynb"
IN_ORDER = ("quickstart", "your-text", "convert", "evaluate", "serve")
# What stands for files that are not there, in commands of the pages.
STAND_INS = {
    "runs/e/study.yaml": "studies/small.yaml",
    "runs/quickstart/CoCA-Strict/recipe.yaml": "recipes/books-5m.yaml",
    "my.yaml": "studies/long-context.yaml",
}
UNLOGGED = ["--data.max-tokens=20000", "--training.report-to=[]", "--training.precision=float32"]
SMALL_RUN = [
    *UNLOGGED, "--model.hidden-size=16", "--model.num-heads=2", "--data.vocab-size=300",
    "--training.steps=2", "--training.global-batch-size=4", "--training.micro-batch-size=4",
    "--validation.batches=1",
]  # fmt: skip
SMALL_STAGES = [*UNLOGGED, "--stages=[{name: a, train: qt, objective: attention, steps: 1}]"]
SMALL_STUDY = [
    "--training.steps=2", "--model.hidden-size=16", "--data.vocab-size=300",
    "--perplexity.windows=64,128", "--perplexity.max-documents=2",
]  # fmt: skip
SMALL = {"study": SMALL_STUDY, "train": SMALL_RUN, "generate": ["--max-new-tokens=2"]}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """Every ``coca`` command of a page, in words."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    matches = filter(None, (re.search(r"(?:^|[|&] )\s*coca ([^>]*)", line) for line in lines))
    return [shlex.split(match[1], comments=True) for match in matches]


def parses(words: list[str]) -> None:
    """The command stops when it has read its options, before it does anything."""

    class Parsed(BaseException):
        pass

    def stop(name):
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr("coca_lab.cli.load", stop)
        # What pages speak of is not here.
        patch.setattr("coca_lab.cli.parsing.check_values", lambda command, values: None)
        assert not main([STAND_INS.get(word, word) for word in words]), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_and_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    for words in commands(page):
        parses(words)


@pytest.mark.parametrize("kind", ["recipes", "studies"])
def test_commands_at_the_top_of_recipes_and_studies_parse(kind, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = []
    for file in (ROOT / kind).glob("*.yaml"):
        text = re.sub(r" \\\n#", "", file.read_text(encoding="utf-8"))
        for line in re.findall(r"^# (?:Command|Then) +coca (.*)$", text, re.M):
            parses(shlex.split(line))
            found.append(line)
    assert len(found) > 5


@pytest.fixture
def workplace(tmp_path, monkeypatch, tokenizer):
    """A folder with what the README's examples speak of: a model, books and recipes."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 160}
    vanilla("Llama", **sizes).save_pretrained(tmp_path / "MODEL")
    tokenizer.save_pretrained(tmp_path / "MODEL")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "books").mkdir()
    for index in range(3):
        (tmp_path / "books" / f"{index}.txt").write_text(some_text(3000, seed=index))
    monkeypatch.chdir(tmp_path)


def test_the_readme_fits_on_few_screens_and_its_first_sentence_in_one_breath():
    lines = README.read_text(encoding="utf-8").splitlines()
    first = " ".join(itertools.takewhile(bool, lines[2:]))
    assert len(lines) <= 100 and len(first.split()) <= 25


def test_the_readmes_python_prints_what_it_says(workplace, capsys):
    (block,) = blocks(README, "python")
    smaller = block.replace("12288", "240")
    assert main(["extend", "MODEL", "SmolLM2-12k", "--to", "240"]) == 0
    capsys.readouterr()
    # In a process of its own, which knows the models by the block's import alone.
    ran = subprocess.run([sys.executable, "-c", smaller], capture_output=True, text=True)
    assert ran.stdout == smaller.rpartition("  # ")[2], ran.stderr


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_page_of_an_own_model_trains_compiles_and_caches(backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    page, names = TUTORIALS / "own-model.md", {}
    model, trains, generates = blocks(page, "python")
    assert len([line for line in model.partition("class")[2].splitlines() if line]) <= 15
    for block in (model, trains, generates):
        exec(block, names)
    assert names["loss"] < 3.5  # nats a byte; ln 256 = 5.5 before training
    torch.testing.assert_close(names["logits"], names["whole"], atol=1e-4, rtol=1e-4)


def test_the_readmes_commands_run_and_print_what_it_shows(workplace, capsys):
    """The extended model is MODEL, of 160 tokens in place of SmolLM2's, and loads in a pipeline."""
    template = Path("MODEL", "chat_template.jinja")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (extend,) = (block for block in blocks(README, "sh") if "# Method:" in block)
    command, *shown, finds = extend.splitlines()
    smaller = command.replace("12288", "240").replace(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "MODEL"
    )
    assert main(shlex.split(smaller)[1:]) == 0
    said = "".join(f"# {line}\n" for line in capsys.readouterr().out.splitlines())
    said = said.replace("240", "12288").replace("160 tokens", "8,192 tokens")
    lines = [line for line in shown if line != "# …"]
    assert lines and all(f"{line}\n" in said for line in lines)
    assert f"# What it finds: {finds.partition('  #')[0]}\n" in said
    (written,) = pipeline("text-generation", "SmolLM2-12k")("Once upon", max_new_tokens=9)
    assert written["generated_text"].startswith("Once upon") and len(written["generated_text"]) > 12


def test_the_commands_of_the_page_on_long_context_train_and_export(workplace, capsys):
    train, export = commands(ROOT / "docs" / "long-context.md")[:2]
    small = [*SMALL_RUN, "--model.num-layers=3", "--data.source=books", "--data.passkey-share=0"]
    assert main([*train, *small, "--validation.source=books"]) == 0, capsys.readouterr().err
    pytest.importorskip("gguf")
    assert main(export) == 0 and "native/native.gguf" in capsys.readouterr().out


def test_the_readmes_check_writes_a_model(workplace, monkeypatch, capsys):
    """What else it does is tested in test_extend.py."""
    monkeypatch.setattr(choice, "GUESS", 100.0)  # random weights find nothing
    monkeypatch.setattr(choice.Choice, "helps", True)  # and no method helps them
    (words,) = (words for words in commands(README) if "--check" in words)
    smaller = ["--check", "books", "--check-documents", "2", "--check-numbers", "1", "--to", "640"]
    code = main([words[0], "MODEL", words[2], *words[3:], *smaller])
    assert code == 0, capsys.readouterr()
    assert f"{words[2]}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [ROOT / "results" / "quickstart" / "README.md", TUTORIALS / "quickstart.md"], ids=str
)
def test_the_quickstarts_tables_have_the_figures_of_its_run(page):
    run = json.loads((ROOT / "results" / "quickstart" / "seed-0.json").read_text("utf-8"))
    found = {}
    for cell in run["results"]:
        name = cell["model"] + " + NTK" * (cell["scaling"] == "ntk_text")
        column = "alone" if cell["scaling"] == "attend-last" else f"{cell['window']:,}"
        found[name, column] = f"{cell['perplexity']:.1f}"
    header, _, *rows = re.findall(r"^\|(.+)\|$", page.read_text("utf-8"), re.M)
    columns = [column.split()[-1] for column in header.split("|")[1:]]
    assert {name for name, _ in found} >= {"RoFormer", "CoCA-Strict", "Native"}
    for row in rows:
        first, *values = row.split("|")
        (name,) = re.match(r"[\s*]*([\w-]+(?: \+ NTK)?)", first).groups()
        shown = dict(zip(columns, (value.strip(" *") for value in values), strict=True))
        assert shown == {column: found.pop((name, column), "") for column in columns}
    left = {name for name, _ in found}
    assert not left if "results" in page.parts else all("NTK" in name for name in left)


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
    for page in (TUTORIALS / f"{name}.md" for name in IN_ORDER):
        for block in blocks(page, "yaml"):
            Path("runs/e").mkdir()  # as the page's first commands do
            Path("runs/e/study.yaml").write_text(block, encoding="utf-8")
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), {})
        for words in commands(page):
            if words[0] != "serve" and "-" not in words:
                small = SMALL_STAGES if "--model.start" in words else SMALL.get(words[0], [])
                assert main([*words, *small]) == 0, (words, capsys.readouterr().err)
                done.add(words[0] if words[0] != "eval" else words[1])
    assert {"train", "convert", "study", "passkey", "report"} <= done


def test_the_studies_of_their_page_are_complete(tmp_path):
    """And sizes are set for the base alone, as it says of the last one."""
    *_, last = written = blocks(ROOT / "docs" / "studies.md", "yaml")
    for block in written:
        (tmp_path / "my.yaml").write_text(block, encoding="utf-8")
        study = load_study(tmp_path / "my.yaml")
        assert len(study.trials(tmp_path)) >= len(study.models) > 2 and study.tasks
    content = yaml.safe_load(last)
    content["options"]["model.hidden_size"] = 64
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(UserError, match="start determines the model's sizes"):
        load_study(tmp_path / "my.yaml").trials(tmp_path)


@pytest.mark.slow
def test_what_starts_from_the_base_of_a_page_is_trained_and_converted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(blocks(ROOT / "docs" / "studies.md", "yaml")[-1])
    for model in content["models"].values():
        model |= {} if "path" in model else {"training.steps": 2}
    content["models"]["base"] |= {"model.hidden_size": 16, "model.num_heads": 2}
    stages = [{"name": "a", "train": "qt", "objective": "attention", "steps": 1}]
    content["models"]["strict"] |= {"stages": stages}
    content["options"] |= {"data.max_tokens": 20000, "training.report_to": []}
    content["perplexity"] |= {"max_documents": 2}
    content["passkey"] = {"lengths": [256], "samples": 2}
    Path("my.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    assert main(["study", "my.yaml"]) == 0
    results = json.loads(Path("runs/my/results.json").read_text())["results"]
    assert {cell["model"] for cell in results} == {*content["models"]}


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
    assert "CoCA-Strict trained" in text
    # An absolute path would be one of the machine that it ran on.
    assert not re.search(r"(?<![\w.:/<])/\w[\w.-]*/|file://|Traceback", text)


@pytest.mark.parametrize(
    "cited", [r"(?i)arxiv(?:\.org/abs/|[\s:]+)(\d{4}\.\d{5})", r"kexue\.fm/archives/(\d+)"]
)
def test_whatever_is_cited_is_among_the_related_work(cited):
    listed = re.findall(cited, (ROOT / "docs" / "related-work.md").read_text(encoding="utf-8"))
    for path in [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("recipes/*.yaml")]:
        missing = set(re.findall(cited, path.read_text(encoding="utf-8"))) - set(listed)
        assert not missing, f"{path.relative_to(ROOT)} cites {missing}"


def test_messages_of_the_troubleshooting_are_in_the_code():
    said = "".join(
        part.value
        for path in ROOT.glob("src/**/*.py")
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.M)  # behind others is whose they are
    assert len(messages) > 15
    assert not [message for message in messages if message not in said]


def test_every_integration_links_to_its_tests():
    page = ROOT / "docs" / "integrations.md"
    table = page.read_text(encoding="utf-8").partition("\n## Tools\n")[2].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, works = row.strip("| ").split("|")
        linked = re.match(r" \[.+\]\((\.\./tests/[\w/]+\.py)\)", works)
        there = linked is not None and (page.parent / linked[1]).is_file()
        assert there or "not run" in works, row


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings on GitHub, which keeps a hyphen for every space."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    counts: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.*)", text, re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return found


def test_links_to_headings_hold_on_github():
    """Those of the site, whose anchors can differ, are checked as it is built."""
    pages = [page for pattern in PATTERNS for page in ROOT.glob(pattern)]
    linked = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)\s]*#.*?)\)", page.read_text("utf-8"))
    ]
    assert len(linked) > 100
    for page, link in linked:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        target = target / "README.md" if target.is_dir() else target
        if "://" not in link and target.suffix == ".md":
            assert anchor in headings(target), f"{page}: {link}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Strict, with its links checked: see scripts/docs_site.py."""
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    made = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert not [entry["location"] for entry in index["docs"] if not entry["text"].strip()]


def test_the_reference_is_what_the_code_says(monkeypatch, capsys):
    """Every public name, command and field; after a change: python scripts/reference.py."""
    monkeypatch.delitem(TASK_OPTIONS, "recall")  # of studies.recall, which this file imports
    monkeypatch.syspath_prepend(ROOT / "scripts")
    reference = importlib.import_module("reference")
    pages = reference.pages()
    for name, text in pages.items():
        written = (reference.FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert written == text, f"{name}.md is not up to date: python scripts/reference.py"
        for public in importlib.import_module(reference.PAGES.get(name, "re")).__all__:
            assert name == "commands" or f"## {public}\n\n" in text
    everything = "".join(pages.values())
    assert not re.search(r"\*\*Raises\*\*\n\n(?:- `.*\n)*- [^`]", everything)  # half an error
    for public in importlib.import_module("coca_attention").__all__:
        assert f"## {public}\n\n```py\n{public}(" in everything
    assert not re.search(r"(?<![\w.~:/<>`])/(?:home|root|work|tmp)\b", everything)
    check_commands(pages["commands"], capsys)
    for name in option_names(command_parser("train", "")):
        option = re.escape(f"- `{option_of(name)}")
        assert re.search(rf"^{option}\b[^`]*`: \S", pages["commands"], re.MULTILINE), name
    for each in (*fields(StageRecipe), *fields(WeightedSource)):
        assert f"  - `{each.name}`: " in pages["commands"], each.name


def check_commands(page: str, capsys) -> None:
    """The page has every command with every option of its help."""
    names = [name for table in COMMANDS.values() for name in table]
    for name in [*names, *(f"eval {task}" for task in TASK_OPTIONS)]:
        _, found, section = page.partition(f"## coca {name}\n")
        assert found, name
        if name != "eval":  # a list of commands
            with pytest.raises(SystemExit):
                main([*name.split(), "--help"])
            options = set(re.findall(r"^  (--[\w.-]+)", capsys.readouterr().out, re.M))
            options = {each for each in options if not each.endswith(".help")}
            there = re.findall(r"^- `(--[\w.-]+)", re.split("\n##", section)[0], re.M)
            assert options <= set(there), name


def test_the_forge_runs_what_the_project_runs():
    """The same make targets, and the Python versions that the package declares."""
    workflows = [*(ROOT / ".github/workflows").glob("*.yml")]
    targets = {
        path.name: set(re.findall(r"\bmake ([a-z-]+)", path.read_text(encoding="utf-8")))
        for path in [*workflows, ROOT / ".ci/run", ROOT / "Makefile"]
    }
    assert targets["tests.yml"] | targets["lowest.yml"] == targets["run"]
    assert set().union(*targets.values()) == targets["Makefile"]
    for path in workflows:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] is not None, path
        if path.name == "tests.yml":
            classified = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
            assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == classified
        for action in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8")):
            assert re.search(r"@(v\d+|release/v\d+)$", action), action
