"""The command serve: Transformers' own server, with the models of this package registered."""

import socket
from pathlib import Path

from transformers.utils.import_utils import is_serve_available

import coca_attention.models  # noqa: F401 (registers the models)
from coca_attention.errors import UserError, install
from coca_lab.cli import ends_at_once
from coca_lab.loading import check_can_be_served
from coca_lab.settings.commands import ServeSettings


def serve_words(folder: str | Path) -> str:
    """The command that serves a model, and whether it needs an extra that is not installed."""
    missing = "" if is_serve_available() else " (with the extra serve)"
    return f"coca serve {folder}{missing}"


def serve_command(path: str, settings: ServeSettings) -> None:
    """Serve one model as transformers serve does, with the interface of OpenAI's."""
    if not is_serve_available():
        raise UserError(f"the server's packages are not installed: {install('serve')}")
    from transformers.cli.serve import Serve  # needs the optional packages

    check_address(settings.host, settings.port)
    check_can_be_served(path)  # where the server would show a traceback, or answer nonsense
    try:
        # uvicorn shuts down at Ctrl-C and raises the signal again.
        with ends_at_once("the server has stopped"):
            Serve(
                force_model=path,
                host=settings.host,
                port=settings.port,
                continuous_batching=settings.continuous_batching,
                cb_max_memory_percent=settings.cache if settings.continuous_batching else None,
                dtype=settings.dtype,
                device=settings.device,
                default_seed=settings.seed,
            )
    except ImportError as error:  # of a package that reads quantised weights
        raise UserError(f"{path}: no model could be loaded: {error}") from error


def check_address(host: str, port: int) -> None:
    """Raise UserError if nothing can listen there; the server finds out after loading the model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UserError(
            f"nothing can listen at {host}, port {port} ({error.strerror or error}): choose "
            "another --host or --port"
        ) from error
