"""The command ``coca``: a table of names and functions; options come from documented fields."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coca_attention.errors import UserError

Run = Callable[[list[str]], None]


@dataclass
class LoadingSettings:
    """How a model is loaded, and where the results go."""

    name: str | None = None
    """What the results call the model; by default the name of its folder."""
    output: str | None = None
    """Result file (JSON); by default in runs/eval/, named after the model and what is measured."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator where there is one."""


@dataclass
class EvaluationSettings(LoadingSettings):
    """How a model is loaded and scaled, and where the results go."""

    scaling: Literal["none", "linear", "ntk", "dynamic"] = "none"
    """Rotary scaling; ntk fixes the base from each window, linear is position interpolation."""
    factor: float = 4.0
    """Factor of the scaling."""


@dataclass
class GenerateSettings:
    """How text is generated."""

    max_new_tokens: int = 64
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 takes the likeliest token every time; above, tokens are drawn."""
    seed: int = 0
    """Seed of the draws."""
    scaling: Literal["none", "linear", "ntk"] = "none"
    """Rotary scaling; ntk fixes the base from the prompt's length plus max_new_tokens."""
    factor: float = 4.0
    """Factor of the scaling."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator where there is one."""


@dataclass
class ConversionSettings:
    """What the converted model is like."""

    form: Literal["slack", "strict"] = "slack"
    """The scores: slack (the paper's Eq. 10) or strict (Eq. 9)."""
    init: Literal["fold", "random"] = "fold"
    """T projections: the pair means of the key projections, or drawn."""
    kv_cache: Literal["full", "half"] = "full"
    """What is kept of earlier tokens: whole keys, or coefficients of half their width."""
    from_original: bool = False
    """SOURCE is a checkpoint in the format of the paper's authors."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto keeps it."""


@dataclass
class ReportSettings:
    """The report page."""

    output: str = "report.html"
    """HTML file to write."""
    title: str | None = None
    """Heading of the page; by default after what was measured."""


def run_quickstart(words: list[str]) -> None:
    """Train four small models and see which of them reads long text: the whole project at once."""
    from coca_attention.quickstart import QuickstartSettings, quickstart
    from coca_attention.report import printed_table

    settings = _parse("coca quickstart", run_quickstart, words, [QuickstartSettings])[0]
    with _Progress() as advance:
        content = quickstart(settings, progress=advance)
    _print_table(*printed_table(content["results"]))
    output = Path(settings.output)
    print(f"Results: {output / 'results.json'}\nReport:  {output / 'report.html'}")


def run_train(words: list[str]) -> None:
    """Train a model from a recipe (YAML); started again, it goes on where it stopped."""
    from coca_attention.options import take_option
    from coca_attention.training import load_recipe, read_summary, recipe_parser, train

    if not words or words[0] in ("-h", "--help"):
        parser = recipe_parser()
        parser.add_argument("--output", help="Run folder; by default runs/ and the recipe's name.")
        parser.description = run_train.__doc__
        parser.print_help()
        return
    recipe, *overrides = words
    if recipe.startswith("-"):
        raise UserError("the recipe comes first: coca train RECIPE.yaml [--training.steps 100 …]")
    overrides, output = take_option(overrides, "--output")
    folder = Path(output or Path("runs") / Path(recipe).stem)
    summary = read_summary(train(load_recipe(recipe, overrides), folder))
    print(
        f"{folder}: {summary['parameters']:,} parameters, {summary['tokens']:,} tokens, "
        f"last loss {summary['curve'][-1]['loss']:.3f}"
    )


def run_perplexity(words: list[str]) -> None:
    """Perplexity of a Transformers causal language model under sliding windows."""
    from coca_attention.data import load_tokenizer
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.evaluation.perplexity import (
        TextSettings,
        WindowSettings,
        check_settings,
        evaluate_perplexity,
        load_keys,
        load_text,
        tokens_needed,
    )
    from coca_attention.models import load_model
    from coca_attention.report import printed_tables

    path, text, windows, settings = _parse(
        "coca eval perplexity",
        run_perplexity,
        words,
        [TextSettings, WindowSettings, EvaluationSettings],
        positionals=["model"],
    )
    check_settings(windows)
    name = settings.name or Path(path).name
    output = Path(settings.output or Path("runs", "eval", f"{name}-{settings.scaling}.json"))
    check_writable(output)
    model = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer = load_tokenizer(path)
    documents = load_text(text, tokenizer, at_least=tokens_needed(windows))
    keys = load_keys(windows, tokenizer, documents, dtype=settings.dtype, device=settings.device)
    with _Progress() as advance:
        cells = evaluate_perplexity(
            model,
            documents,
            windows,
            scaling=settings.scaling,
            factor=settings.factor,
            name=name,
            keys=keys,
            progress=advance,
        )
    write_json(output, {"results": cells, "environment": describe_environment()})
    for table in printed_tables(cells):
        _print_table(*table)
    print(f"Results: {output}")


def run_passkey(words: list[str]) -> None:
    """Passkey retrieval: does a model find five digits hidden in a long prompt?"""
    from coca_attention.evaluation.passkey import (
        PasskeySettings,
        check_settings,
        evaluate_passkey,
    )

    _evaluate_prompts(
        "passkey", run_passkey, words, PasskeySettings, check_settings, evaluate_passkey
    )


def run_needles(words: list[str]) -> None:
    """Needles of RULER's kinds: one or many facts in a long prompt, and variables to follow."""
    from coca_attention.evaluation.needles import (
        NeedleSettings,
        check_settings,
        evaluate_needles,
    )

    _evaluate_prompts(
        "needles", run_needles, words, NeedleSettings, check_settings, evaluate_needles
    )


def _evaluate_prompts(
    task: str,
    command: Run,
    words: list[str],
    settings_class: type,
    check: Callable[[Any], None],
    evaluate: Callable[..., list[dict[str, Any]]],
) -> None:
    """A task that asks prompts: parse, load, ask what is missing, write, print."""
    from coca_attention.data import load_tokenizer
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.evaluation.journal import Journal, fingerprint
    from coca_attention.models import load_model
    from coca_attention.report import printed_tables

    path, task_settings, settings = _parse(
        f"coca eval {task}",
        command,
        words,
        [settings_class, EvaluationSettings],
        positionals=["model"],
    )
    check(task_settings)
    name = settings.name or Path(path).name
    output = Path(settings.output or Path("runs", "eval", f"{name}-{settings.scaling}-{task}.json"))
    check_writable(output)
    journal = Journal(output.with_suffix(".journal.jsonl"))
    model = load_model(path, dtype=settings.dtype, device=settings.device)
    with _Progress() as advance:
        cells = evaluate(
            model,
            load_tokenizer(path),
            task_settings,
            scaling=settings.scaling,
            factor=settings.factor,
            name=name,
            identity=f"{fingerprint(path)} {settings.dtype}",
            journal=journal,
            progress=advance,
        )
    write_json(output, {"results": cells, "environment": describe_environment()})
    journal.remove()
    for table in printed_tables(cells):
        _print_table(*table)
    print(f"Results: {output}")


def run_harness(words: list[str]) -> None:
    """Short-context tasks of EleutherAI's lm-evaluation-harness (an optional extra)."""
    from coca_attention.data import load_tokenizer
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.evaluation.harness import (
        HarnessSettings,
        check_settings,
        evaluate_harness,
    )
    from coca_attention.models import load_model
    from coca_attention.report.harness import harness_sections

    path, tasks, settings = _parse(
        "coca eval harness",
        run_harness,
        words,
        [HarnessSettings, LoadingSettings],
        positionals=["model"],
    )
    check_settings(tasks)
    name = settings.name or Path(path).name
    output = Path(settings.output or Path("runs", "eval", f"{name}-harness.json"))
    check_writable(output)
    model = load_model(path, dtype=settings.dtype, device=settings.device)
    cells = evaluate_harness(model, load_tokenizer(path), tasks, name=name)
    write_json(output, {"results": cells, "environment": describe_environment()})
    for section in harness_sections(cells):
        _print_table(section.header, section.rows)
    print(f"Results: {output}")


def run_suite_command(words: list[str]) -> None:
    """Measure models x scalings x tasks from one YAML; started again, it does what is missing."""
    from coca_attention.evaluation.suite import load_suite, run_suite, suite_parser
    from coca_attention.options import take_option
    from coca_attention.report import printed_tables, read_results

    if not words or words[0] in ("-h", "--help"):
        parser = suite_parser()
        parser.add_argument("--output", help="Folder; by default runs/ and the suite's name.")
        parser.description = run_suite_command.__doc__
        parser.print_help()
        return
    path, *overrides = words
    if path.startswith("-"):
        raise UserError("the suite comes first: coca eval suite SUITE.yaml [--passkey.samples 20]")
    overrides, output = take_option(overrides, "--output")
    folder = Path(output or Path("runs") / Path(path).stem)
    with _Progress() as advance:
        results = run_suite(load_suite(path, overrides), folder, progress=advance)
    for table in printed_tables(read_results([results])[0]["results"]):
        _print_table(*table)
    print(f"Results: {results}")


def run_analyze(words: list[str]) -> None:
    """Angles between queries and keys, rotary borders and decay bounds of a model on a text."""
    from coca_attention.analysis import (
        AnalysisSettings,
        analyze,
        check_settings,
        read_token_ids,
    )
    from coca_attention.data import SourceSettings, load_tokenizer
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.models import load_model
    from coca_attention.report.angles import angle_table

    path, source, analysis, settings = _parse(
        "coca analyze",
        run_analyze,
        words,
        [SourceSettings, AnalysisSettings, LoadingSettings],
        positionals=["model"],
    )
    check_settings(analysis)
    name = settings.name or Path(path).name
    output = Path(settings.output or Path("runs", "eval", f"{name}-angles.json"))
    check_writable(output)
    model = load_model(path, dtype=settings.dtype, device=settings.device)
    documents = read_token_ids(source, load_tokenizer(path), analysis)
    with _Progress() as advance:
        cell = analyze(model, documents, analysis, progress=advance, name=name)
    write_json(output, {"results": [cell], "environment": describe_environment()})
    _print_table(*angle_table([cell]))
    print(f"Results: {output}")


def run_generate(words: list[str]) -> None:
    """Continue a prompt with a Transformers causal language model."""
    from transformers import TextStreamer, set_seed

    from coca_attention.data import load_tokenizer
    from coca_attention.models import load_model, set_rotary_scaling, training_length

    path, prompt, settings = _parse(
        "coca generate",
        run_generate,
        words,
        [GenerateSettings],
        positionals=["model", "prompt"],
    )
    if settings.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {settings.max_new_tokens}")
    if settings.temperature < 0:
        raise UserError(f"temperature must be 0 or above, got {settings.temperature}")
    model: Any = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer = load_tokenizer(path)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if inputs["input_ids"].shape[-1] == 0:
        raise UserError("the prompt has no tokens; give some text to continue")
    if settings.scaling != "none":
        total = inputs["input_ids"].shape[-1] + settings.max_new_tokens
        length = max(total, training_length(model.config.get_text_config()) or 0)
        set_rotary_scaling(
            model,
            settings.scaling,
            factor=settings.factor,
            length=length if settings.scaling == "ntk" else None,
        )
    set_seed(settings.seed)
    drawn = {"do_sample": True, "temperature": settings.temperature}
    model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=settings.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **(drawn if settings.temperature else {"do_sample": False}),
    )


def run_convert(words: list[str]) -> None:
    """Turn a vanilla model's folder into the CoCA model of its family, to be trained on."""
    from coca_attention.models.folders import convert_folder

    source, target, settings = _parse(
        "coca convert",
        run_convert,
        words,
        [ConversionSettings],
        positionals=["source", "target"],
    )
    model = convert_folder(source, target, **vars(settings))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{target}: {model.config.model_type}, {settings.form}, {parameters:,} parameters"
        + ("" if settings.from_original else "; another function than before: train it on")
    )


def run_report(words: list[str]) -> None:
    """Turn result files and run folders into one self-contained HTML page."""
    from coca_attention.report import write_report

    split = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    paths, rest = words[:split], words[split:]
    settings = _parse("coca report RESULT …", run_report, rest, [ReportSettings])[0]
    if not paths:
        raise UserError("give result files first: coca report RESULT.json … --output report.html")
    print(f"Report: {write_report(paths, settings.output, title=settings.title)}")


COMMANDS: dict[str, Run | dict[str, Run]] = {
    "quickstart": run_quickstart,
    "train": run_train,
    "convert": run_convert,
    "eval": {
        "perplexity": run_perplexity,
        "passkey": run_passkey,
        "needles": run_needles,
        "harness": run_harness,
        "suite": run_suite_command,
    },
    "analyze": run_analyze,
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


def _parse(
    program: str,
    command: Run,
    words: list[str],
    sections: list[type],
    positionals: Sequence[str] = (),
) -> list[Any]:
    """Parse words into the positionals' texts and an instance of every section.

    Args:
        program: What help calls the command.
        command: Function whose docstring describes it.
        words: The words.
        sections: Documented dataclasses; their fields are the options.
        positionals: Names of the required words before the options.

    Raises:
        UserError: If a word is unknown or a value unfit.
        SystemExit: After printing help.
    """
    from coca_attention.options import OptionParser

    parser = OptionParser(program, command.__doc__)
    described = {
        "model": "Folder or name of a Transformers model.",
        "prompt": "Text to continue.",
        "source": "Folder or name of the model to convert.",
        "target": "Folder to write; it must not exist yet, or be empty.",
    }
    for name in positionals:
        parser.add_argument(name, type=str, help=described[name])
    for section in sections:
        parser.add_class_arguments(section)
    instances = parser.read(_listed(words))
    values: list[Any] = [instances[name] for name in positionals]
    for section in sections:
        fields = section.__dataclass_fields__
        values.append(section(**{name: instances[name] for name in fields}))
    return values


def _listed(words: list[str]) -> list[str]:
    """Write the items of ``--windows 64,128,256`` as the list that they are meant as."""
    from coca_attention.options import take_option

    for option in ("--windows", "--lengths", "--kinds", "--tasks", "--shifts"):
        words, items = take_option(words, option)
        if items is not None:
            words = [*words, f"{option}=[{items.strip('[]')}]"]
    return words


class _Progress:
    """A rich progress bar as a function of (label, done, total)."""

    def __enter__(self) -> Callable[[str, int, int], None]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task("")
        return self.advance

    def advance(self, label: str, done: int, total: int) -> None:
        # Shown only while something is judged: training has a bar of its own.
        self.bar.start()
        self.bar.update(self.task, description=label, completed=done, total=total)
        if done >= total:
            self.bar.stop()

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
