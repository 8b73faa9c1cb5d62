"""Hooks of MkDocs: a site of the repository's own files, in which every link leads somewhere.

Pages keep their paths in the repository, so the links that work there work in the site. What a page
links to becomes part of it: a folder is a list of its files, a source file a page that shows it,
and report pages and result files are copied. MkDocs checks the links; the finished site is checked
for anything that a browser would fetch from elsewhere.
"""

import html
import json
import logging
import posixpath
import re
from pathlib import Path
from urllib.parse import urlsplit

import latex2mathml.converter
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel

from coca_lab.cli.recipes import purpose

ROOT = Path(__file__).resolve().parents[1]
PAGES = (".ipynb", ".md")  # have to be in the navigation
SHOWN = {".cff": "yaml", ".py": "python", ".yaml": "yaml"}
START = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "docs/**/*.ipynb"]
START += ["results/**/*.md", "src/**/README.md", "docs/images/*"]
LINK = re.compile(r"(?<!!)\]\(([^)#\s]+)(#[^)\s]*)?\)")

FETCHED = re.compile(
    r'<(?!a |link [^>]*rel="?canonical)[^<>]* (?:src|href)="?((?:https?:)?//[^"> ]+)'
    r'|url\("?(https?:[^)]+)'
)
"""What a tag that is no link, or a style sheet, names on another host."""

# As pymdownx.arithmatex leaves formulas.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config) -> Files:
    """Collect the pages and, from them, everything that they link to."""
    waiting = sorted({path for pattern in START for path in ROOT.glob(pattern)})
    found = [file for file in files if not file.src_uri.endswith(PAGES)]
    seen = set(waiting)
    for path in waiting:  # grows
        text, links = _content(path)
        listed = InclusionLevel.INCLUDED if path.suffix in PAGES else InclusionLevel.NOT_IN_NAV
        found.append(File.generated(config, _uri(path), content=text, inclusion=listed))
        for link in links:
            target = Path(posixpath.normpath(path.parent / link if path.is_file() else path / link))
            if target.exists() and target not in seen and _listing(target) == target:
                seen.add(target)
                waiting.append(target)
    return Files(found)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Point links to files and folders at their pages."""
    here = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if urlsplit(target).scheme:
            return match[0]
        path = Path(posixpath.normpath(ROOT / here / target))
        if not path.exists():
            return match[0]  # MkDocs warns
        uri = _uri(_listing(path))
        return f"]({posixpath.relpath(uri, here or '.')}{anchor})"

    return LINK.sub(replace, markdown)


def on_page_content(content: str, **_) -> str:
    """Formulas as MathML, which browsers draw without a script."""
    return FORMULA.sub(_formula, content)


def on_post_page(output: str, **_) -> str:
    """Name the theme's search dialog, for screen readers."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">', 1)


@event_priority(-100)  # once the search has written its index
def on_post_build(config) -> None:
    """Check what is fetched, and take headings without text out of the search."""
    site = Path(config.site_dir)
    check_hosts(site)
    index = site / "search" / "search_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    content["docs"] = [entry for entry in content["docs"] if entry["text"].strip()]
    index.write_text(json.dumps(content), encoding="utf-8")


def check_hosts(site: Path) -> None:
    """Warn, which is an error in strict mode, of what a browser would fetch from other hosts."""
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        for found in FETCHED.finditer(path.read_text(encoding="utf-8")):
            log.warning(f"{path.relative_to(site)} fetches {found[1] or found[2]}")


def _formula(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return latex2mathml.converter.convert(html.unescape(match[2]), display=display)


def _listing(path: Path) -> Path:
    """A folder's README.md where it has one; every other path is itself."""
    readme = path / "README.md"
    return readme if readme.is_file() else path


def _uri(path: Path) -> str:
    """Where a file or folder of the repository is in the site."""
    uri = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{uri}/README.md"
    return f"{uri}.md" if path.suffix in (*SHOWN, ".ipynb") else uri


def _content(path: Path) -> tuple[str | bytes, list[str]]:
    """What the site has at `_uri(path)`, and its links, relative to the file or into the folder."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith(("_", ".")))
        lines = [f"- [{name}]({name}){_summary(path / name)}" for name in names]
        return "\n".join([f"# {path.name}", "", *lines]), names
    if path.suffix in SHOWN:
        code = path.read_text(encoding="utf-8")
        head = "---\nsearch:\n  exclude: true\n---\n"
        return f"{head}# {path.name}\n\n````{SHOWN[path.suffix]}\n{code}````\n", []
    if path.suffix == ".ipynb":
        return _notebook(json.loads(path.read_text(encoding="utf-8"))), []
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
        return text, [match[1] for match in LINK.finditer(text) if not urlsplit(match[1]).scheme]
    return path.read_bytes(), []


def _summary(path: Path) -> str:
    """What `coca recipes` says of a file."""
    text = purpose(path) if path.suffix == ".yaml" else ""
    return f": {text}" if text else ""


def _notebook(notebook: dict) -> str:
    """A notebook's cells and their outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        said = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if said:
            parts.append(f"```text\n{said.rstrip()}\n```")
        for output in cell["outputs"]:
            if image := output.get("data", {}).get("image/png"):
                alt, code = cell["metadata"]["alt"], "".join(image).replace("\n", "")
                parts.append(f"![{alt}](data:image/png;base64,{code})")
    return "\n\n".join(parts) + "\n"
