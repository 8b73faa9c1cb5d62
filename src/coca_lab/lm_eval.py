"""``python -m coca_lab.lm_eval``: lm-evaluation-harness' own command, for CoCA models as well.

Takes the words of ``lm_eval``, such as ``run --model hf --model_args pretrained=FOLDER --tasks …``.
``coca report`` reads what ``--output_path`` writes. The harness cuts prompts to
``max_position_embeddings``: of a folder of ``coca extend`` that is what it was extended to.
"""

import importlib.util
import sys

import coca_attention.models  # noqa: F401 (registers the models with Transformers)
from coca_attention.errors import install


def main() -> None:
    """Run the harness' command line."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit(f"this needs the lm-evaluation-harness: {install('harness')}")
    from lm_eval.__main__ import cli_evaluate  # an optional package

    words = sys.argv[1:]
    if "--model_args" in words and not any("max_length" in word for word in words):
        print(
            "Prompts are cut on the left to max_position_embeddings of the model's configuration; "
            "max_length=TOKENS in --model_args lets a model read more.",
            file=sys.stderr,
        )
    cli_evaluate()


if __name__ == "__main__":
    main()
