"""The command ``coca serve``."""

import json
import signal
import sys
from typing import Any

from coca_attention.errors import UserError, install
from coca_attention.hub import check_name

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

    from coca_attention.data import load_tokenizer
    from coca_attention.models.configuration import check_continuous_batching

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
    """Run ``transformers serve`` until it is interrupted."""
    from transformers.cli.transformers import app

    import coca_attention.models  # noqa: F401 (registers the models)

    try:
        server: Any = app(
            ["serve", *words, "--non-blocking"], prog_name="coca", standalone_mode=False
        )
    except (OSError, ValueError) as error:
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
        _wait(server)


def _wait(server: Any) -> None:
    """Wait for Ctrl-C or SIGTERM, then for the answers in progress; a second one ends them too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server._thread.join()
        if not server.server.started:
            raise UserError("the server could not start, for the reason above: try another --port")
    except KeyboardInterrupt:
        server.server.should_exit = True
        try:
            server._thread.join()
        except KeyboardInterrupt:
            server.server.force_exit = True
    finally:
        server.kill_server()  # also the thread of continuous batching
