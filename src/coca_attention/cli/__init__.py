"""The command ``coca``: a table of names and functions; options come from documented fields."""

import sys
from collections.abc import Sequence
from typing import Any

from coca_attention.cli.bench import run_bench
from coca_attention.cli.console import Run
from coca_attention.cli.evaluation import (
    run_analyze,
    run_harness,
    run_needles,
    run_passkey,
    run_perplexity,
    run_suite,
)
from coca_attention.cli.models import run_convert, run_generate, run_quickstart, run_train
from coca_attention.cli.report import run_report
from coca_attention.errors import UserError

COMMANDS: dict[str, Run | dict[str, Run]] = {
    "quickstart": run_quickstart,
    "train": run_train,
    "convert": run_convert,
    "eval": {
        "perplexity": run_perplexity,
        "passkey": run_passkey,
        "needles": run_needles,
        "harness": run_harness,
        "suite": run_suite,
    },
    "analyze": run_analyze,
    "bench": run_bench,
    "generate": run_generate,
    "report": run_report,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``coca``.

    Args:
        argv: Words after the program's name; by default those of the process.

    Returns:
        Exit code: 0, 2 for an error of use or of input, 1 for a defect, 130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        command, rest = _find(words)
        if command is not None:
            command(rest)
        return 0
    except KeyboardInterrupt:
        print("coca: interrupted; the same command goes on from what is finished", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        if debug:
            raise
        if isinstance(error, UserError):
            print(f"coca: error: {error}", file=sys.stderr)
            return 2
        print(
            f"coca: unexpected {type(error).__name__}: {' '.join(str(error).split())} (run again "
            "with --debug for the traceback)",
            file=sys.stderr,
        )
        return 1


def _find(words: list[str]) -> tuple[Run | None, list[str]]:
    """The function that the words name, and the words left; None after printing help."""
    table: dict[str, Any] = COMMANDS
    path = ["coca"]
    while True:
        if not words or words[0] in ("-h", "--help"):
            print(_overview(" ".join(path), table))
            return None, []
        if words[0] == "--version" and path == ["coca"]:
            from coca_attention import __version__

            print(f"coca {__version__}")
            return None, []
        if words[0] not in table:
            raise UserError(
                f"{' '.join(path)} has no command {words[0]!r}; choose one of {', '.join(table)}"
            )
        path.append(words[0])
        found, words = table[words[0]], words[1:]
        if not isinstance(found, dict):
            return found, words
        table = found


def _overview(program: str, table: dict[str, Any]) -> str:
    lines = [f"usage: {program} COMMAND [--help] [--debug]", ""]

    def describe(prefix: str, entries: dict[str, Any]) -> None:
        for name, entry in entries.items():
            if isinstance(entry, dict):
                describe(f"{prefix}{name} ", entry)
            else:
                summary = (entry.__doc__ or "").splitlines()[0]
                lines.append(f"  {prefix + name:<17} {summary}")

    describe("", table)
    lines += ["", "--debug shows tracebacks. COMMAND --help lists its options."]
    return "\n".join(lines)
