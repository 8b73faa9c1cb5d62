"""Hook of hatchling: README.md as package indexes show it, where links need whole addresses.

They begin with ``Source`` of pyproject.toml's URLs; without it, links become text and the picture
is left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)")


def for_indexes(text: str, source: str) -> str:
    """The text with addresses of files in the repository at ``source``, which may be empty."""
    if not source:
        return LINK.sub(r"\1", re.sub(r"<picture>.*?</picture>\n\n", "", text, flags=re.DOTALL))
    text = LINK.sub(rf"[\1]({source}/blob/main/\2)", text)
    return re.sub(r'(src(?:set)?=")(?!\w+:)', rf"\1{source}/raw/main/", text)


class ReadmeHook(MetadataHookInterface):
    """Sets the project's readme."""

    def update(self, metadata: dict) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        made = for_indexes(text, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": made}
