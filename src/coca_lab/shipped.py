"""The project's own recipes, studies and suites, found by their names."""

from pathlib import Path

from coca_attention.errors import UserError, did_you_mean

KINDS = {"recipe": "recipes", "study": "studies", "suite": "suites"}
"""What a file is called, and its folder: in the wheel, or at the root of the repository."""


def shipped(kind: str) -> dict[str, Path]:
    """The project's files of a kind by their names."""
    here = Path(__file__).resolve()
    places = (here.parent / "yaml" / KINDS[kind], here.parents[2] / KINDS[kind])
    folder = next((place for place in places if place.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find_file(name: str | Path, kind: str) -> Path:
    """The file of a path, or the project's file of a name.

    Raises:
        UserError: If there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = shipped(kind) if kind in KINDS else {}
    if str(name) in known:
        return known[str(name)]
    other = "; coca recipes lists the project's own" if known else ""
    raise UserError(f"{name}: no such {kind}{did_you_mean(str(name), known, other)}")


def first_sentence(path: Path) -> str:
    """What the head of a file says first, in one line."""
    lines = path.read_text(encoding="utf-8").partition("\n#\n")[0].splitlines()
    words = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return words.partition(". ")[0].rstrip(".")
