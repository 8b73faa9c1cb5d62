"""Where the name of a model leads: to a folder, or to the Hub if that answers."""

import os
import re
import threading
import time
from pathlib import Path

from coca_attention.errors import UserError

SECONDS = 10.0
"""How long to wait for the Hub's answer, as its own library does."""
AGAIN = 60.0
"""Seconds after which a Hub that did not answer is asked again."""
_answered: bool | None = None
_asked_at = 0.0


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
    """Whether the Hub answers; if not, its libraries use their caches alone from now on.

    It is asked once; one that did not answer is asked again after a minute.
    """
    global _answered, _asked_at
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _answered is not False:
        return False  # the user's choice
    if _answered is None or (not _answered and time.monotonic() - _asked_at >= AGAIN):
        constants.HF_HUB_OFFLINE = False  # or else its library does not ask
        _answered, _asked_at = _hub_answers(), time.monotonic()
        constants.HF_HUB_OFFLINE = not _answered  # otherwise every file is tried for a minute
    return _answered


def check_online(repository: str) -> None:
    """Raise UserError if nothing can be uploaded because the Hub does not answer."""
    if not go_online() and _answered is False:
        raise UserError(
            f"{repository} cannot be uploaded: the Hub does not answer; check the connection, and "
            "try again"
        )


def _is_path(name: str) -> bool:
    """Whether a name is no repository: not NAME or OWNER/NAME, or in a folder that is there."""
    repository = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, flags=re.ASCII)
    owner = name.rpartition("/")[0]
    return repository is None or ".." in name or (owner != "" and os.path.isdir(owner))


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
