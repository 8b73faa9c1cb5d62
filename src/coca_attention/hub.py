"""Where the name of a model leads: to a folder, or to the Hub if that answers."""

import os
import re
import threading
from functools import cache
from pathlib import Path

from coca_attention.errors import UserError

SECONDS = 3.0
"""How long to wait for the Hub's first answer."""


def check_name(name: str, what: str = "model") -> None:
    """Check that a name can lead somewhere, at once, before Transformers looks for it.

    A name that looks like a path never goes to the Hub. Where the Hub does not answer, a copy in
    its cache is used from then on.

    Args:
        name: Path of a folder, or name of a repository on the Hub.
        what: What it should be, for messages.

    Raises:
        UserError: If there is no such folder, and no such name on the Hub or no way to ask.
    """
    problem = f"{name}: no {what} could be loaded: "
    path = Path(name)
    if path.is_dir():
        return
    if path.exists():
        raise UserError(f"{problem}it is a file; give the folder that it is in")
    if _is_path(name):
        raise UserError(f"{problem}there is no such folder; check the path (here: {Path.cwd()})")
    if not go_online():
        from huggingface_hub.constants import HF_HUB_CACHE

        if not (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
            raise UserError(
                f"{problem}there is no such folder here, and the Hub cannot be asked for one of "
                "that name (offline); check the path, or the connection"
            )


def go_online() -> bool:
    """Whether the Hub answers; if not, its libraries stop asking it and use their caches alone."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _hub_answers():
        constants.HF_HUB_OFFLINE = True  # otherwise every file is tried for a minute
    return not constants.HF_HUB_OFFLINE


def _is_path(name: str) -> bool:
    """Whether a name is no repository: not NAME or OWNER/NAME, or in a folder that is there."""
    repository = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, flags=re.ASCII)
    owner = name.rpartition("/")[0]
    return repository is None or ".." in name or (owner != "" and os.path.isdir(owner))


@cache
def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session

    answers: list[bool] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:
            answers.append(False)
        else:
            answers.append(True)

    # In a thread, because looking up a name has no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answers == [True]
