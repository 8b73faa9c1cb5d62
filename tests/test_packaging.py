"""What a built package contains, and that it runs where nothing else of this project is."""

import importlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import coca_attention

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_versions_agree_and_the_changelog_has_a_section_for_this_one():
    assert PROJECT["version"] == coca_attention.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f"version={{{PROJECT['version']}}}" in (ROOT / "README.md").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.*?)\]", changes, re.M)
    development = ".dev" in coca_attention.__version__
    assert sections[0] == ("Unreleased" if development else coca_attention.__version__)
    kinds = set(re.findall(r"^### (.*)", changes, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_one_sentence_says_what_it_is():
    first = " ".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[2:4])
    assert first.strip().rstrip(".").endswith(PROJECT["description"])
    for page in ("CITATION.cff", "mkdocs.yml"):
        assert PROJECT["description"] in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("source", ["", "https://a.b/c"])
def test_the_readme_on_package_indexes_has_no_link_within_the_repository(source):
    pytest.importorskip("hatchling")
    for_indexes = importlib.import_module("scripts.package_readme").for_indexes
    text = for_indexes((ROOT / "README.md").read_text(encoding="utf-8"), source)
    addresses = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)", text)
    assert addresses
    assert all("".join(found).startswith("https://") for found in addresses)
    if source:
        assert "[results](https://a.b/c/blob/main/results)" in text
        assert 'src="https://a.b/c/raw/main/docs/images/' in text
    assert ("<picture>" in text) == bool(source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_built_package_runs_alone(tmp_path, kind):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (package,) = tmp_path.glob("coca_attention-*")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # The dependencies, without this project: its own path is added by a .pth file, which is not
    # read in a folder that another .pth file names.
    Path(purelib, "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", package],
        check=True,
    )
    program = "import coca_attention, importlib.resources as r; print(coca_attention.__file__)"
    program += "; print((r.files('coca_attention') / 'py.typed').is_file())"
    program += "; print((r.files('coca_lab') / 'report/page.html.j2').is_file())"
    shown = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    file, *there = shown.stdout.split()
    assert file.startswith(str(tmp_path)) and there == ["True", "True"]
    coca = tmp_path / "venv" / "bin" / "coca"
    assert "usage: coca" in subprocess.run([coca, "--help"], capture_output=True, text=True).stdout
    listed = subprocess.run(
        [coca, "recipes", "--all"], capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert all(f"  {name} " in listed for name in ("passkey-1m", "quickstart", "small"))
