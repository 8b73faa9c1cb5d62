"""``python -m coca_lab.lm_eval``: lm-evaluation-harness' own command, for CoCA models as well.

Takes the words of ``lm_eval``, such as ``run --model hf --model_args pretrained=FOLDER --tasks …``.
``coca report`` reads what ``--output_path`` writes.
"""

import importlib.util
import sys

import coca_attention.models  # noqa: F401 (registers the models with Transformers)
from coca_attention.errors import install


def main() -> None:
    """Run the harness' command line."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit(f"this needs the lm-evaluation-harness: {install('harness')}")
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
