"""The rules of the house: imports run one way, and importing does nothing else."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "coca_attention"
# Each part may import itself and what stands in its row.
MAY_IMPORT = {
    "errors": set(),
    "imports": {"errors"},
    "options": {"errors"},
    "intervals": set(),
    "environment": {"errors"},
    "lazy": set(),
    "settings": {"errors"},
    "fields": set(),
    "info": {"fields", "errors", "environment"},
    "ops": set(),
    "layers": {"ops"},
    "hub": {"errors"},
    "models": {
        "fields", "settings", "lazy", "imports", "ops", "layers", "errors", "environment", "hub",
    },
    "testing": set(),
    "lm_eval": {"errors"},
    "data": {"settings", "lazy", "errors", "environment", "hub"},
    "training": {
        "fields", "settings", "lazy", "ops", "layers", "models", "data", "errors", "environment",
        "options",
    },
    "evaluation": {
        "fields", "settings", "ops", "layers", "models", "data", "errors", "environment", "options",
        "intervals", "hub",
    },
    "analysis": {
        "fields", "lazy", "ops", "layers", "models", "data", "errors", "environment", "intervals",
    },
    "benchmarks": {"lazy", "ops", "layers", "models", "testing", "errors", "environment"},
    "report": {"errors", "environment", "intervals"},
    "registry": {"ops", "models", "evaluation", "benchmarks", "report", "errors"},
    "quickstart": {
        "imports", "models", "data", "training", "evaluation", "report", "errors", "environment",
    },
    "reproduce": {
        "quickstart", "lazy", "data", "training", "evaluation", "report", "errors", "environment",
    },
    "search": {"training", "evaluation", "errors", "environment", "options"},
    "cli": {
        "fields", "info", "settings", "models", "data", "training", "evaluation", "analysis",
        "benchmarks", "report", "quickstart", "reproduce", "search", "errors", "environment",
        "options", "hub", "imports", "__init__",
    },
    "__init__": {"lazy", "imports", "ops", "layers", "models"},
}  # fmt: skip
OUTSIDE = {
    "ops": {"torch", "triton"},  # triton in kernels/ alone, and only where it is called
    "layers": {"torch"},
}


def part(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names.add(module)
            if module == "coca_attention":
                names |= {f"coca_attention.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    here = part(path)
    for name in imported(path):
        if not name.startswith("coca_attention"):
            continue
        words = name.split(".")
        there = words[1] if len(words) > 1 else None
        if there is None or there.startswith("__"):
            continue
        assert there == here or there in MAY_IMPORT[here], f"{path}: {here} imports {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_operators_and_layers_need_torch_alone(path):
    allowed = OUTSIDE.get(part(path))
    if allowed is None:
        return
    outside = {name.split(".")[0] for name in imported(path)} - {"coca_attention"}
    assert outside - set(sys.stdlib_module_names) <= allowed


def test_every_part_has_its_row():
    assert {part(path) for path in FILES} == set(MAY_IMPORT)


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_importing_is_quiet_and_loads_no_optional_or_heavy_part():
    program = (
        "import coca_attention, sys; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'coca_attention.ops') "
        "if m in sys.modules]); import coca_attention.models; "
        "print([m for m in ('datasets', 'pyarrow', 'matplotlib', 'jsonargparse', "
        "'tensorboard', 'coca_attention.ops.kernels.maps', "
        "'coca_attention.ops.kernels.decode') if m in sys.modules])"
    )
    assert run(program) == "[]\n[]\n"


def test_without_file_locks_everything_is_imported_and_one_process_works(tmp_path):
    """As on Windows; what other packages import there, they import on Linux."""
    program = (
        "import builtins\n"
        "found = builtins.__import__\n"
        "def on_windows(name, names=None, *rest, **more):\n"
        "    own = str((names or {}).get('__name__')).startswith('coca_attention')\n"
        "    if own and name in ('fcntl', 'resource'): raise ImportError(name)\n"
        "    return found(name, names, *rest, **more)\n"
        "builtins.__import__ = on_windows\n"
        "from coca_attention import convert\n"
        "import coca_lab.cli, coca_lab.studies.search\n"
        "from coca_lab.environment import hold, write_json\n"
        "from coca_lab.evaluation.journal import Journal\n"
        "from coca_lab.evaluation.pieces import Claims, Piece, Path, work\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with hold(folder / '.lock'): write_json(folder / 'a.json', 1)\n"
        "piece = Piece('a', ['b'], 1, 1, lambda missing, advance: [2])\n"
        "journal = Journal(folder / 'journal.jsonl')\n"
        "work([piece], journal, claims=Claims(folder / '.claims', alone=True))\n"
        "print(Journal(journal.path).get('b'))"
    )
    assert run(program) == "2\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import coca_attention; from transformers import AutoConfig",
        "from transformers import AutoConfig; import coca_attention",
        # The Auto classes are imported in the middle of importing a model.
        "import coca_attention; from transformers import LlamaForCausalLM, AutoConfig",
        "import coca_attention.models; from transformers import AutoConfig",
    ],
)
def test_the_auto_classes_know_the_models(imports):
    types = ["coca_llama", "coca_gpt_neox", "alibi_gpt_neox"]
    program = (
        f"{imports}; print([AutoConfig.for_model(m).model_type for m in {types}]); "
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING; "
        "print('coca_other' in CONFIG_MAPPING, 'llama' in CONFIG_MAPPING)"
    )
    assert run(program) == f"{types}\nFalse True\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import coca_attention, transformers",
        "import transformers, coca_attention",
        "import transformers; from transformers import AutoModelForCausalLM; import coca_attention",
    ],
)
def test_classes_are_found_by_name_in_transformers(imports):
    names = ["CoCALlamaForCausalLM", "CoCAQwen2Model", "CoCAPhi3Config", "AlibiGPTNeoXForCausalLM"]
    program = (
        f"{imports}; print([getattr(transformers, n).__name__ for n in {names}]); "
        "print(getattr(transformers, 'CoCAOther', None), transformers.LlamaConfig.model_type)"
    )
    assert run(program) == f"{names}\nNone llama\n"


def test_unknown_names_are_refused():
    program = (
        "import coca_attention\n"
        "try: coca_attention.other\n"
        "except AttributeError as error: print(error, 'convert' in dir(coca_attention))"
    )
    assert run(program) == "module 'coca_attention' has no attribute 'other' True\n"


def test_operators_work_where_transformers_is_missing():
    program = (
        "import importlib.abc, importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'transformers' "
        "else find(name, *a)\n"
        "import coca_attention, torch\n"
        "assert 'transformers' not in sys.modules\n"
        "print(coca_attention.CoCAAttention(16, 2)(torch.zeros(1, 3, 16)).shape)\n"
    )
    assert run(program) == "torch.Size([1, 3, 16])\n"


def test_the_tree_in_the_architecture_page_is_the_folders():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.partition("```\n")[2].partition("```")[0]
    # Entries end with their part's next line that is indented less.
    parts = dict(re.findall(r"^  (\w+)/ (.*?)(?=^  \w|^\w|\Z)", tree, re.S | re.M))
    for folder in sorted({path.parent for path in FILES} - {SOURCE}):
        top, *below = folder.relative_to(SOURCE).parts
        for name in [f"{part}/" for part in below] + [
            path.name for path in folder.glob("*.py") if not path.stem.startswith("__")
        ]:
            assert re.search(rf"(?<![\w]){re.escape(name)}", parts[top]), f"{top}: {name}"
    for path in SOURCE.glob("*.py"):
        assert path.stem.startswith("__") or path.name in tree
    named = set(re.findall(r"(\w+\.py)", tree))
    assert named <= {path.name for path in FILES}
