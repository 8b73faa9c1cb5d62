"""The command ``coca``: a table of commands, of which the chosen one's module is imported.

Options are read before that, so that a help or an error waits for no import of torch.
"""

import io
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TextIO

from coca_attention import __version__
from coca_attention.errors import UserError, did_you_mean, install
from coca_lab.old_names import GONE

Command = Callable[..., None]
"""A command: takes what `coca_lab.cli.parsing.parse` makes of the words behind its name."""

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "start here": {
        "extend": ("models", "Let a model read longer texts, without training."),
        "study": ("evaluation", "Train or load several models, evaluate them, and draw a page."),
        "recipes": ("recipes", "List the project's recipes and studies, or print one."),
    },
    "train": {
        "train": ("recipes", "Train a model from a recipe, or in the stages that it names."),
    },
    "evaluate": {
        "eval": ("evaluation", "Evaluate a model on one task; coca study does so for many."),
    },
    "convert and serve": {
        "convert": ("models", "Turn a vanilla model's folder into the CoCA model of its family."),
        "export": (
            "models",
            "Write a model with layers with roles for vLLM or llama.cpp (untried: SGLang).",
        ),
        "generate": ("generate", "Continue a prompt with a causal language model."),
        "serve": ("serve", "Serve models behind an interface like OpenAI's."),
    },
    "look": {
        "report": ("report", "Turn result files, or folders of runs, into one page."),
        "info": ("look", "Print versions and hardware, or the configuration of a model."),
    },
}
"""By group and name: the module here whose function ``NAME_command`` it is, and a line of help."""
RESUMED = ("eval", "extend", "study", "train")
"""Commands that keep what they have measured or trained when they end early."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command ``coca`` with words, by default those of the process, and return the exit code."""
    # 2 for a usage or input error, 1 for an internal one; 130 when interrupted, 143 by SIGTERM,
    # 141 where nobody reads what it prints.
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # help and answers are not ASCII alone
    try:
        _run(words)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as error:
        then = "nothing is saved"
        if words and words[0] in RESUMED:
            then = "the same command goes on from what has been saved, if anything"
        then = str(error) or then
        print(f"coca: interrupted: {then}", file=sys.stderr)
        return 128 + getattr(error, "signal", signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at the exit
            return 128 + signal.SIGPIPE  # as other programs; not all may be done
        if debug:
            raise
        return _explain(error)


def _has_no_reader(output: TextIO) -> bool:
    """Whether an output is a pipe that nobody reads, as in ``coca … | head``."""
    with suppress(OSError):  # it is no file
        poll = select.poll()
        poll.register(output.fileno())
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def _explain(error: Exception) -> int:
    """Print an error in one line, and return the exit code."""
    if isinstance(error, UserError):
        problem = str(error)
    else:
        from coca_lab.files import known_problem  # imports the Hub's client

        problem = known_problem(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("coca_"):
        problem = f"this needs {error.name}: {install('lab')}"
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


def _run(words: list[str]) -> None:
    """Run the command that the words name with its options, or print what there is."""
    for word in words:
        word.encode()  # names of another encoding: no card, result or page could say them
    if words[:1] == ["--version"]:
        print(f"coca {__version__}")
        return
    groups = {g: {n: line for n, (_, line) in table.items()} for g, table in COMMANDS.items()}
    if words[:1] == ["help"]:  # as git and cargo have it
        words = [*words[1:], "--help"]
    name = choose("coca", words, groups)
    if name is None:
        return
    if "COCA_IMPORT" in os.environ:  # which may register tasks
        from coca_lab.engine import import_extensions  # imports cloudpickle

        import_extensions()
    # They import pydantic, of the extra.
    from coca_lab.cli.parsing import as_typed_in, check_values, parse
    from coca_lab.settings.evaluations import TASK_OPTIONS

    full_name = name
    words = words[1:]
    arguments = []
    lines = {n: line for table in groups.values() for n, line in table.items()}
    summary = lines[name]
    if name == "eval":
        tasks = {task: options.summary for task, options in TASK_OPTIONS.items()}
        task = choose("coca eval", words, {"tasks": tasks})
        if task is None:
            return
        full_name = f"eval {task}"
        words = words[1:]
        arguments = [task]
        summary = tasks[task]
    show_messages(full_name, words)
    try:
        values = parse(full_name, summary, words)
        with ends_at_once("nothing was done"):
            check_values(full_name, values)
        load(name)(*arguments, *values)
    except UserError as error:
        raise type(error)(as_typed_in(full_name, str(error), words)) from error


def load(name: str) -> Command:
    """The function of a command."""
    (module,) = {table[name][0] for table in COMMANDS.values() if name in table}
    with ends_at_once("nothing was done"):
        return getattr(import_module(f"coca_lab.cli.{module}"), f"{name}_command")


@contextmanager
def ends_at_once(then: str) -> Iterator[None]:
    """Within the block, Ctrl-C ends the process with one line; for where nothing is to be saved.

    A KeyboardInterrupt that meets torch while it is imported aborts the process with a message of
    C++, and threads of a server outlive one.
    """

    def end(number: int, frame: object) -> None:
        print(f"coca: interrupted: {then}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def choose(program: str, words: list[str], groups: Mapping[str, Mapping[str, str]]) -> str | None:
    """The command that the first word names; None after printing all, with their lines of help."""
    known = {name: line for table in groups.values() for name, line in table.items()}
    if words and words[0] in known:
        return words[0]
    if words and words[0] not in ("-h", "--help"):
        called = f"{program} {words[0]}"
        if called in GONE:
            raise UserError(f"{called}: {GONE[called]}")
        raise UserError(
            f"{program} has no command {words[0]!r}"
            + did_you_mean(words[0], known, f"; choose one of {', '.join(known)}")
        )
    version = " | --version" if program == "coca" else ""
    print(f"usage: {program} COMMAND [--help] [--debug]{version}")
    for group, table in groups.items():
        print(f"\n{group}:")
        for name, line in table.items():
            print(f"  {name:<12} {line}")
    called = program.replace("coca", "coca help", 1)
    print(f"\n{called} COMMAND lists its options, as -h does; --debug shows tracebacks.")
    return None


class _Lines(logging.Handler):
    """Writes messages of a command to standard error, above a bar or with the time of day."""

    def __init__(self, command: str, words: Sequence[str]) -> None:
        super().__init__()
        self.command = command
        self.words = words

    def emit(self, record: logging.LogRecord) -> None:
        from coca_lab.cli.parsing import as_typed_in  # imports pydantic, of the extra

        text = as_typed_in(self.command, self.format(record), self.words)
        if record.levelno >= logging.WARNING:
            text = f"coca: warning: {text}"
        if not sys.stderr.isatty():
            text = f"{time.strftime('%H:%M:%S')} {text}"
        with suppress(BrokenPipeError):  # work continues where nobody reads
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr)


def show_messages(command: str, words: Sequence[str]) -> None:
    """Show what the two packages log in a command, each message in a line of its own."""
    for package in ("coca_attention", "coca_lab"):
        log = logging.getLogger(package)
        log.setLevel(logging.INFO)
        log.handlers = [each for each in log.handlers if not isinstance(each, _Lines)]
        log.addHandler(_Lines(command, words))
