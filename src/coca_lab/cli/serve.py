"""The command ``coca serve``."""

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from coca_attention.errors import UserError, install
from coca_attention.models.hub import check_name

# Messages one after another, for models that were not trained on conversations.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def run_serve(words: list[str]) -> None:
    """Serve a model over HTTP, with the interface of OpenAI's, by Transformers' own server.

    usage: coca serve MODEL [options of transformers serve, such as --port 8000]
    """
    if not words or words[0].startswith("-"):
        if words[:1] in (["-h"], ["--help"]):
            _check_installed()
            return _start(["--help"])
        raise UserError("the model comes first: coca serve MODEL [--port 8000 …]")
    model, *options = words
    check_name(model)
    from transformers import AutoConfig

    from coca_attention.models.configuration import check_continuous_batching
    from coca_lab.data import load_tokenizer

    _check_installed()
    plain = load_tokenizer(model).chat_template is None
    if "--continuous-batching" in options:
        try:
            check_continuous_batching(AutoConfig.from_pretrained(model, trust_remote_code=False))
        except ValueError as error:
            raise UserError(f"{model}: {error}") from error
    if plain and not any(word.startswith("--chat-template-kwargs") for word in options):
        options += ["--chat-template-kwargs", json.dumps({"chat_template": PLAIN_TEMPLATE})]
        print(
            "the tokenizer has no chat template: a conversation is joined into one text, which the "
            "model continues",
            file=sys.stderr,
        )
    _start([model, *options])


def _check_installed() -> None:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UserError(f"this needs Transformers' server: {install('serve')}")


def _start(words: list[str]) -> None:
    """Run the server until it is interrupted, or print its help."""
    import typer
    from safetensors import SafetensorError

    import coca_attention.models  # noqa: F401 (registers the models)
    from coca_lab.cli.server import Server

    names = {"help_option_names": ["-h", "--help"]}
    app: Any = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=names)
    app.command()(Server)
    try:
        server = app([*words, "--non-blocking"], prog_name="coca serve", standalone_mode=False)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{words[0]} cannot be served: {reason}") from error
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        if not hasattr(error, "format_message"):
            raise
        usage: Any = error  # by the library that reads Transformers' command line
        first = usage.format_message().splitlines()[0].rstrip(".")
        raise UserError(f"{first}; see coca serve --help") from error
    if hasattr(server, "server"):  # not after printing help
        _run(server)


def _run(server: Any) -> None:
    """Answer until Ctrl-C or SIGTERM, then end the answers in progress; not at a second one."""
    web = server.server
    first = web.handle_exit

    def end(number: int, frame: Any) -> None:
        if web.should_exit:  # at once: the thread that computes an answer cannot be interrupted
            os._exit(130)
        first(number, frame)

    web.handle_exit = end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            web.run()
    except SystemExit as error:
        raise UserError(
            "the server could not start, for the reason above: try another --port"
        ) from error
    finally:
        server.kill_server()  # also the thread of continuous batching
