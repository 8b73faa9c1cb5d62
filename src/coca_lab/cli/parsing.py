"""From the words of a command to its options, or to its help; nothing here imports torch."""

from argparse import ArgumentError, Namespace
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from coca_attention.errors import UserError
from coca_attention.roles import Conversion
from coca_lab.options import (
    as_typed,
    build,
    option_names,
    option_of,
    option_parser,
    read_options,
)
from coca_lab.recipe import Recipe
from coca_lab.settings.commands import (
    CheckSettings,
    EndpointSettings,
    ExportSettings,
    ExtendSettings,
    FolderSettings,
    GenerateSettings,
    ListSettings,
    LoadingSettings,
    ReadingSettings,
    ReportSettings,
    ServeSettings,
)
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.settings.sources import SourceSettings
from coca_lab.settings.studies import StudySettings
from coca_lab.yaml_files import find_file

POSITIONALS = {
    "folder": "Folder of a Transformers model, or its NAME or NAME@REVISION on the Hub; with "
    "--endpoint, of its tokenizer.",
    "model": "Folder of a Transformers model, or its NAME or NAME@REVISION on the Hub.",
    "model?": "Folder or name of a model; without one, this machine is described.",
    "prompt": "Text to continue; - reads it from standard input.",
    "recipe?": "Name of a recipe or study, such as passkey-1m or studies/verdict.",
    "results+": "Result files (JSON), and folders of runs and studies.",
    "target": "Folder to write; it must not exist yet, or be empty.",
}
"""Help of the words that are no options; a last ``?`` may be missing, a last ``+`` repeated."""
EVERYTHING = "--help-all"
OUTPUT_HELP = "Folder; by default runs/NAME for NAME.yaml."
RAY_HELP = "Compute on Ray: started here, or the cluster at an address (--ray HOST:PORT)."
WORKERS_HELP = (
    "Processes that train a model each and share its evaluation; 0: none but this one. By default "
    "one per core, or one if there is a GPU; none if nothing is trained or converted."
)
SHOWN_OF_STUDY = ("models", "recipe", "seeds", "methods", "dtype", "device", "endpoint")
"""Fields of a study in the short help."""
SHOWN = (
    "model.attention", "model.hidden_size", "model.num_layers", "model.num_heads", "model.layers",
    "model.start", "data.source", "data.block_length", "data.held_out", "data.max_tokens",
    "data.passkey_share", "validation.every", "validation.passkeys",
    "training.steps", "training.global_batch_size", "training.micro_batch_size",
    "training.learning_rate", "training.precision", "training.seed", "training.save_every",
)  # fmt: skip
"""Fields of a recipe in the short help."""


@dataclass(frozen=True)
class Options:
    """The options of a command: names of `POSITIONALS`, and dataclasses."""

    positionals: tuple[str, ...] = ()
    settings: tuple[type, ...] = ()


@dataclass(frozen=True)
class FileOptions:
    """The options of a command that reads a YAML file, which is the first word.

    Attributes:
        kind: What the file is called.
        usage: How the command is called.
        settings: The dataclass of the file.
        others: Options that are not fields of the file, with how argparse adds them.
        sections: Makes the dataclasses of the optional sections of the file.
        shown: Fields in the short help.
    """

    kind: str
    usage: str
    settings: type
    others: dict[str, dict[str, Any]]
    shown: tuple[str, ...]
    sections: Callable[[], dict[str, type]] = dict


OPTIONS = {
    "convert": Options(("model", "target"), (Conversion, FolderSettings)),
    "export": Options(("model", "target"), (ExportSettings,)),
    "extend": Options(("model", "target"), (ExtendSettings, CheckSettings)),
    "generate": Options(("model", "prompt"), (GenerateSettings,)),
    "info": Options(("model?",)),
    "recipes": Options(("recipe?",), (ListSettings,)),
    "report": Options(("results+",), (ReportSettings,)),
    "serve": Options(("model",), (ServeSettings,)),
}
OUTPUT = {"--output": {"metavar": "FOLDER", "help": OUTPUT_HELP}}
FILES = {
    "study": FileOptions(
        "study",
        "coca study NAME|STUDY.yaml [--workers N] [--ray [ADDRESS]] [--training.steps 100 …]",
        StudySettings,
        {
            **OUTPUT,
            "--ray": {"nargs": "?", "const": "", "metavar": "ADDRESS", "help": RAY_HELP},
            "--workers": {"type": int, "metavar": "INT", "help": WORKERS_HELP},
        },
        sections=lambda: {name: options.settings for name, options in TASK_OPTIONS.items()},
        shown=SHOWN_OF_STUDY,
    ),
    "train": FileOptions(
        "recipe",
        "coca train NAME|RECIPE.yaml [--training.steps 100 …]",
        Recipe,
        OUTPUT,
        shown=SHOWN,
    ),
}


def parse(name: str, summary: str, words: list[str]) -> list[Any]:
    """The arguments of the function of a command, from the words behind its name.

    The positional words come first, then an instance of every dataclass of its options. Of a
    command with a file: its name, the words that override its fields, and the other options.
    """
    parser = command_parser(name, summary, short=EVERYTHING not in words)
    if name in FILES:
        return [*_parse_file(parser, FILES[name], words)]
    given = read_options(parser, words)
    if name == "convert" and not {"form", "from_original"} & vars(given).keys():
        raise UserError(
            "`form` is missing, such as strict (coca convert -h says which there are); to extend a "
            "model's context without training use coca extend MODEL TARGET"
        )
    options = _options(name)
    positionals = [given.get(each.rstrip("?+")) for each in options.positionals]
    return [*positionals, *(build(each, given) for each in options.settings)]


def check_values(command: str, values: list[Any]) -> None:
    """Raise UserError for what a command would refuse after seconds of importing Transformers.

    These are paths, devices, and options that are not for each other. ``values`` are those of
    `parse`.
    """
    from coca_lab.files import check_may_be_model, check_model_folder, check_new  # the Hub's client
    from coca_lab.source_files import source_files  # imports pyarrow

    if command == "train":  # which looks at the paths of its recipe itself
        return
    if command in FILES:
        find_file(values[0], FILES[command].kind)
        return
    for each in values:
        if isinstance(each, SourceSettings):
            source_files(each.source)
        elif isinstance(each, CheckSettings) and each.check:
            source_files(each.check)
    from_original = any(getattr(each, "from_original", False) for each in values)
    for name, path in zip(_options(command).positionals, values, strict=False):
        if path is None:  # info describes this machine
            continue
        if name == "folder" or (name == "model" and from_original):
            check_may_be_model(path)  # it may have a tokenizer alone, or another format
        elif name.startswith("model"):
            check_model_folder(path)
        elif name == "target" and not Path.cwd().is_relative_to(Path(path).resolve()):
            check_new(Path(path).resolve())
    if command == "extend":
        _, _, extend, check = values
        check_extension(extend, check)
    for each in values:
        device = getattr(each, "device", None)
        if device not in (None, "auto"):
            from coca_lab.environment import usable_device  # imports torch

            usable_device(device)


def check_extension(wanted: ExtendSettings, check: CheckSettings) -> None:
    """Raise UserError for options of ``coca extend`` without the one that they need."""
    if wanted.options and wanted.method == "auto":
        raise UserError(
            "`options` are those of one method, and without --method it is not known which one is "
            "taken: name it, for example --method shifted"
        )
    if wanted.near and wanted.method == "auto" and not check.check:
        raise UserError("`near` is for some methods: name one with --method, such as limited")
    plain = CheckSettings()
    given = [
        each.name
        for each in fields(check)
        if getattr(check, each.name) != getattr(plain, each.name)
    ]
    if given and not check.check:
        raise UserError(f"`{given[0]}` says how to measure: add --check TEXT, or leave it out")


def command_parser(name: str, summary: str, short: bool = False) -> ArgumentParser:
    """The parser of a command, or of a task of ``coca eval``; ``short`` for a short help."""
    program = f"coca {name}"
    if name in FILES:
        file = FILES[name]
        shown = file.shown if short else ()
        parser = option_parser(
            program,
            [file.settings],
            file.sections(),
            shown,
            usage=file.usage,
            description=summary,
            epilog=f"{program} {EVERYTHING} shows all fields of a {file.kind}." if shown else None,
        )
        for option, each in file.others.items():
            parser.add_argument(option, **each)
        about = f"Name of a {file.kind} that coca recipes lists, or a YAML file."
        parser.add_argument(file.kind, help=about)
        return parser
    options = _options(name)
    usage = " ".join([program, *(each.upper() for each in options.positionals), "[options]"])
    parser = option_parser(program, options.settings, usage=usage, description=summary)
    if name == "convert":
        parser.set_defaults(form=None)  # which has to be named: the help says no default
    for each in options.positionals:
        many: Any = {"nargs": each[-1]} if each[-1] in "?+" else {}
        parser.add_argument(each.rstrip("?+"), help=POSITIONALS[each], **many)
    return parser


def as_typed_in(name: str, message: str, words: Collection[str] = ()) -> str:
    """The message of an error in which a command's options are named as they are typed.

    The fields of a file keep their names, for most are set there, but for those among the words.
    """
    if "`" not in message:  # a parser takes 50 ms to make
        return message
    names = option_names(command_parser(name, ""))
    if name in FILES:
        typed = [word.partition("=")[0].replace("_", "-") for word in words]
        names = [each for each in names if option_of(each) in typed]
    return as_typed(message, names)


def _options(name: str) -> Options:
    """The options of a command without a file."""
    if name in OPTIONS:
        return OPTIONS[name]
    task = TASK_OPTIONS[name.removeprefix("eval ")]
    settings = (task.settings, ReadingSettings if task.scaled else LoadingSettings)
    if task.endpoint:  # --model is what a server calls it
        return Options(("folder",), (*settings, EndpointSettings))
    return Options(("model",), settings)


def _parse_file(
    parser: ArgumentParser, file: FileOptions, words: list[str]
) -> tuple[str, list[str], Namespace]:
    if {"-h", "--help", EVERYTHING} & set(words):
        parser.print_help()
        parser.exit()
    if words and words[0].endswith(".help"):
        read_options(parser, words)
    if not words or words[0].startswith("-"):
        raise UserError(
            f"the {file.kind} comes first, a name that coca recipes lists or a file: {file.usage}"
        )
    others = PlainParser(parser.prog, add_help=False, allow_abbrev=False, exit_on_error=False)
    for option, each in file.others.items():
        others.add_argument(option, **each)
    try:
        chosen, overrides = others.parse_known_args(words[1:])
    except ArgumentError as error:
        raise UserError(f"{error} (see {parser.prog} --help)") from error
    chosen.output = Path(chosen.output or Path("runs", Path(words[0]).stem)).expanduser()
    return words[0], overrides, chosen
