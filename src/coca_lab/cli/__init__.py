"""The command ``coca``: a table of names and functions; options come from documented fields."""

import io
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from coca_attention.errors import UserError, did_you_mean, known_problem
from coca_lab.cli.bench import run_bench
from coca_lab.cli.completion import run_completion
from coca_lab.cli.console import Run
from coca_lab.cli.evaluation import EvaluationCommands, run_analyze
from coca_lab.cli.info import run_info
from coca_lab.cli.messages import show_messages
from coca_lab.cli.models import (
    run_convert,
    run_export,
    run_generate,
    run_quickstart,
    run_train,
)
from coca_lab.cli.report import run_report
from coca_lab.cli.reproduce import run_reproduce
from coca_lab.cli.search import run_search
from coca_lab.cli.serve import run_serve
from coca_lab.extensions import import_extensions

COMMANDS: dict[str, Run | Mapping[str, Run]] = {
    "quickstart": run_quickstart,
    "train": run_train,
    "convert": run_convert,
    "export": run_export,
    "serve": run_serve,
    "eval": EvaluationCommands(),
    "search": run_search,
    "reproduce": run_reproduce,
    "analyze": run_analyze,
    "bench": run_bench,
    "generate": run_generate,
    "report": run_report,
    "info": run_info,
    "completion": run_completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``coca``.

    Args:
        argv: Command-line arguments; by default those of the process.

    Returns:
        Exit code: 0; 2 for a usage or input error, 1 for an internal error; 130 when interrupted,
        143 when training was ended by SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    show_messages()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # help and answers are not ASCII alone
    try:
        import_extensions()
        command, rest = _find(words)
        if command is not None:
            command(rest)
        return 0
    except KeyboardInterrupt as error:
        then = str(error) or "the same command goes on from what has been saved, if anything"
        print(f"coca: interrupted: {then}", file=sys.stderr)
        return 128 + getattr(error, "signal", signal.SIGINT)
    except BrokenPipeError:
        return 0
    except Exception as error:
        if debug:
            raise
        problem = str(error) if isinstance(error, UserError) else known_problem(error)
        if problem is not None:
            text = " ".join(problem.split())
            print(f"coca: error: {text[:1000]}{' …' * (len(text) > 1000)}", file=sys.stderr)
            return 2
        print(
            f"coca: unexpected {type(error).__name__}: {' '.join(str(error).split())} (run again "
            "with --debug for the traceback)",
            file=sys.stderr,
        )
        return 1


def _find(words: list[str]) -> tuple[Run | None, list[str]]:
    """The function that the words name, and the remaining words; None after printing help."""
    table: Mapping[str, Any] = COMMANDS
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
                f"{' '.join(path)} has no command {words[0]!r}"
                + did_you_mean(words[0], table, f"; choose one of {', '.join(table)}")
            )
        path.append(words[0])
        found, words = table[words[0]], words[1:]
        if not isinstance(found, Mapping):
            return found, words
        table = found


def _overview(program: str, table: Mapping[str, Any]) -> str:
    lines = [f"usage: {program} COMMAND [--help] [--debug]", ""]

    def describe(prefix: str, entries: Mapping[str, Any]) -> None:
        for name, entry in entries.items():
            if isinstance(entry, Mapping):
                describe(f"{prefix}{name} ", entry)
            else:
                summary = (entry.__doc__ or "").splitlines()[0]
                lines.append(f"  {prefix + name:<17} {summary}")

    describe("", table)
    lines += [
        "",
        "--debug shows tracebacks. COMMAND -h lists its options, COMMAND --help explains them.",
    ]
    return "\n".join(lines)
