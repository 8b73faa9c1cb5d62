"""``python -m coca_attention.lm_eval``: lm-evaluation-harness' own command, with our models known.

Takes the words of ``lm_eval``, such as ``run --model hf --model_args pretrained=FOLDER --tasks …``.
"""

import importlib.util
import sys


def main() -> None:
    """Run the harness' command line."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit("this needs the lm-evaluation-harness: pip install 'coca-attention[harness]'")
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
