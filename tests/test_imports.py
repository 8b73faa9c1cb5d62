"""The rules of the house: imports run one way, and importing does nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "coca_attention"
# Each part may import itself and what stands in its row.
MAY_IMPORT = {
    "errors": set(),
    "options": {"errors"},
    "intervals": set(),
    "environment": {"errors"},
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers", "errors"},
    "testing": set(),
    "data": {"errors", "environment"},
    "training": {"ops", "layers", "models", "data", "errors", "environment", "options"},
    "evaluation": {
        "ops", "layers", "models", "data", "errors", "environment", "options", "intervals",
    },
    "analysis": {"ops", "layers", "models", "data", "errors", "environment"},
    "benchmarks": {"ops", "layers", "models", "testing", "errors"},
    "report": {"errors", "environment", "intervals"},
    "registry": {"evaluation", "report", "errors"},
    "quickstart": {"models", "data", "training", "evaluation", "report", "errors", "environment"},
    "cli": {
        "models", "data", "training", "evaluation", "analysis", "benchmarks", "report",
        "quickstart", "errors", "environment", "options", "__init__",
    },
    "__init__": {"ops", "layers", "models"},
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
        "print([m for m in ('datasets', 'pyarrow', 'matplotlib', 'jsonargparse', "
        "'tensorboard', 'coca_attention.ops.kernels.maps', "
        "'coca_attention.ops.kernels.decode') if m in sys.modules])"
    )
    assert run(program) == "[]\n"


def test_importing_registers_the_models():
    program = (
        "import coca_attention; from transformers import AutoConfig; "
        "print([AutoConfig.for_model(m).model_type for m in ('coca_llama', 'coca_gpt_neox')])"
    )
    assert run(program) == "['coca_llama', 'coca_gpt_neox']\n"


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
