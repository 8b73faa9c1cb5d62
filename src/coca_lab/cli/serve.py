"""The command ``coca serve``: Transformers' own server, which loads the models of this package."""

from coca_attention.errors import UserError
from coca_lab.files import check_name


def run_serve(words: list[str]) -> None:
    """Serve a model over HTTP, with the interface of OpenAI's.

    This is ``transformers serve`` once `coca_attention.models` has registered the models.

    Raises:
        UserError: If the model or the extra ``serve`` is missing.
        SystemExit: When the server ends, after printing help, or for an unknown option.
    """
    from transformers.cli.transformers import app

    import coca_attention.models  # noqa: F401 (registers the models)

    if words and not words[0].startswith("-"):
        check_name(words[0])
    try:
        app(["serve", *words], prog_name="coca")
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"nothing can be served: {error}") from error
