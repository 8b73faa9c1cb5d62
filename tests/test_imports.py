"""The rules of the house: imports run one way, and importing does nothing else."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import coca_attention

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
# Each part of a package may import itself and the parts in its row, besides those of the library.
LIBRARY = {
    "__init__": {"ops", "layer", "models"},
    "errors": set(),
    "ops": {"errors"},
    "layer": {"ops", "errors"},
    "roles": {"errors", "ops"},  # ops where settings are checked
    "method_names": set(),
    "models": {"ops", "layer", "errors", "roles", "method_names"},
    "testing": {"errors"},
}
LOOSE = {
    "engine", "environment", "files", "fingerprints", "intervals", "loading", "old_names",
    "options", "settings", "source_files", "store", "weights", "yaml_files", "cells",
}  # fmt: skip
LABORATORY = {
    "__init__": {"cli"},
    **dict.fromkeys(("environment", "files", "intervals", "lm_eval", "source_files"), frozenset()),
    **dict.fromkeys(("old_names", "yaml_files"), frozenset()),
    "cells": {"intervals"},
    "options": {"old_names", "yaml_files"},
    "settings": {"options"},
    **dict.fromkeys(("store", "weights"), frozenset({"files"})),
    "engine": {"files", "store"},
    "fingerprints": {"engine", "files", "weights"},
    **dict.fromkeys(("processes", "cluster"), frozenset({"engine", "files", "store"})),
    **dict.fromkeys(("loading", "generation", "data", "report"), LOOSE),
    "folders": {*LOOSE, "data"},
    "recipe_sections": {*LOOSE, "data"},
    "recipe": {*LOOSE, "data", "recipe_sections"},
    "training": {*LOOSE, "folders", "data", "generation", "recipe", "recipe_sections"},
    "evaluation": {*LOOSE, "data", "generation"},
    "export": {*LOOSE, "folders", "data", "evaluation"},
    "studies": {
        *LOOSE, "cluster", "processes", "folders", "data", "recipe", "training", "evaluation",
        "report",
    },
    "cli": {
        *LOOSE, "generation", "folders", "data", "recipe", "training",
        "evaluation", "export", "report", "studies",
    },
}  # fmt: skip
OUTSIDE = {
    "__init__": set(),
    "errors": set(),
    "ops": {"torch", "triton"},  # triton in kernels/ alone, and only where it is called
    "layer": {"torch"},
    "roles": set(),
    "method_names": set(),
    # Transformers requires the others.
    "models": {"torch", "transformers", "huggingface_hub", "safetensors"},
    "testing": {"torch", "transformers"},
}


def part(path: Path) -> tuple[str, str]:
    """The package of a file, and its part in it."""
    package, *rest = path.relative_to(SOURCE).parts
    return package, rest[0].removesuffix(".py")


def statements(path: Path) -> list[tuple[str, list[str]]]:
    """The modules that a file imports anywhere, and what from each."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def imported(path: Path) -> set[str]:
    return {module for module, _ in statements(path)}


def test_imports_run_one_way():
    tables = {"coca_attention": LIBRARY, "coca_lab": LABORATORY}
    for path in FILES:
        package, here = part(path)
        allowed = {here, *tables[package][here]}
        for name in imported(path):
            there, _, rest = name.partition(".")
            if there not in tables or not rest:
                continue
            assert (package, there) != ("coca_attention", "coca_lab"), f"{path}: {name}"
            if there == package:
                assert rest.split(".")[0] in allowed, f"{path}: {here} imports {name}"


def test_no_module_imports_itself_through_others():
    """Those of functions and for type checkers count, too; a name can be a module of a package."""
    modules = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {}
    for module, path in modules.items():
        names = set()
        for source, members in statements(path):
            names |= {f"{source}.{member}" for member in members} & modules.keys() or {source}
        graph[module] = (names & modules.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from error


def test_the_library_needs_torch_and_transformers_alone():
    for path in FILES:
        package, here = part(path)
        if package == "coca_attention" and here in OUTSIDE:
            outside = {name.split(".")[0] for name in imported(path)} - {"coca_attention"}
            assert outside - set(sys.stdlib_module_names) <= OUTSIDE[here], path


def test_every_part_has_its_row():
    parts = {part(path) for path in FILES}
    assert {name for package, name in parts if package == "coca_attention"} == set(LIBRARY)
    assert {name for package, name in parts if package == "coca_lab"} == set(LABORATORY)


def test_importing_is_quiet_loads_no_optional_part_and_registers_the_models():
    """Operators without Transformers, the table of families, and commands that draw nothing, too.

    All in one process, since each import takes seconds.
    """
    optional = [
        "coca_lab", "datasets", "pyarrow", "altair", "peft", "tensorboard",
        "coca_attention.ops.kernels.maps",
    ]  # fmt: skip
    types = ["coca_llama", "coca_gpt_neox", "alibi_gpt_neox"]
    names = ["CoCALlamaForCausalLM", "CoCAQwen2Model", "CoCAPhi3Config", "AlibiGPTNeoXForCausalLM"]
    program = f"""
import sys
sys.modules["transformers"] = None
import coca_attention, coca_attention.roles
assert "torch" not in sys.modules
import torch
assert coca_attention.ops.FORMS
print(coca_attention.CoCAAttention(16, 2)(torch.zeros(1, 3, 16)).shape)
del sys.modules["transformers"]
import coca_attention.models
print([name for name in {optional} if name in sys.modules])
import transformers
print([transformers.AutoConfig.for_model(name).model_type for name in {types}])
print([getattr(transformers, name).__name__ for name in {names}])
from coca_attention.models.families import decoders
assert "arcee" in decoders()
import coca_lab.cli.evaluation
print({{"altair", "vl_convert"}} & {{*sys.modules}})
"""
    words = [sys.executable, "-W", "error::UserWarning", "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"torch.Size([1, 3, 16])\n[]\n{types}\n{names}\nset()\n"


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="'coca_attention' has no attribute 'other'"):
        coca_attention.other  # noqa: B018


def test_the_tree_in_the_architecture_page_is_the_folders():
    page = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.partition("```\n")[2].partition("```")[0]
    for package, here in {part(path) for path in FILES}:
        section = tree.partition(f"src/{package}/")[2].partition("src/")[0]
        assert here == "__init__" or re.search(rf"\b{here}(/|\.py)", section), f"{package}: {here}"
