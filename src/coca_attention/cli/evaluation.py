"""Commands that measure a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coca_attention.cli.console import Progress, Run, parse, print_table
from coca_attention.errors import UserError
from coca_attention.options import take_option


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


def run_perplexity(words: list[str]) -> None:
    """Perplexity of a Transformers causal language model under sliding windows."""
    from coca_attention.evaluation.perplexity import (
        TextSettings,
        WindowSettings,
        check_settings,
        evaluate_perplexity,
        load_keys,
        load_text,
        tokens_needed,
    )

    def measure(model: Any, tokenizer: Any, sections: list[Any], **options: Any) -> Any:
        text, windows, loading = sections
        documents = load_text(text, tokenizer, at_least=tokens_needed(windows))
        keys = load_keys(windows, tokenizer, documents, dtype=loading.dtype, device=loading.device)
        return evaluate_perplexity(model, documents, windows, keys=keys, **options)

    _evaluate(
        "coca eval perplexity",
        run_perplexity,
        words,
        [TextSettings, WindowSettings, EvaluationSettings],
        check=lambda sections: check_settings(sections[1]),
        measure=measure,
    )


def run_passkey(words: list[str]) -> None:
    """Passkey retrieval: does a model find five digits hidden in a long prompt?"""
    from coca_attention.evaluation.passkey import (
        PasskeySettings,
        check_settings,
        evaluate_passkey,
    )

    _evaluate(
        "coca eval passkey",
        run_passkey,
        words,
        [PasskeySettings, EvaluationSettings],
        check=lambda sections: check_settings(sections[0]),
        measure=lambda model, tokenizer, sections, **options: evaluate_passkey(
            model, tokenizer, sections[0], **options
        ),
    )


def run_needles(words: list[str]) -> None:
    """Needles of RULER's kinds: one or many facts in a long prompt, and variables to follow."""
    from coca_attention.evaluation.needles import (
        NeedleSettings,
        check_settings,
        evaluate_needles,
    )

    _evaluate(
        "coca eval needles",
        run_needles,
        words,
        [NeedleSettings, EvaluationSettings],
        check=lambda sections: check_settings(sections[0]),
        measure=lambda model, tokenizer, sections, **options: evaluate_needles(
            model, tokenizer, sections[0], **options
        ),
    )


def run_harness(words: list[str]) -> None:
    """Short-context tasks of EleutherAI's lm-evaluation-harness (an optional extra)."""
    from coca_attention.evaluation.harness import (
        HarnessSettings,
        check_settings,
        evaluate_harness,
    )

    _evaluate(
        "coca eval harness",
        run_harness,
        words,
        [HarnessSettings, LoadingSettings],
        check=lambda sections: check_settings(sections[0]),
        measure=lambda model, tokenizer, sections, **options: evaluate_harness(
            model, tokenizer, sections[0], name=options["name"]
        ),
    )


def run_analyze(words: list[str]) -> None:
    """Angles between queries and keys, rotary borders and decay bounds of a model on a text."""
    from coca_attention.analysis import (
        AnalysisSettings,
        analyze,
        check_settings,
        read_token_ids,
    )
    from coca_attention.data import SourceSettings

    def measure(model: Any, tokenizer: Any, sections: list[Any], **options: Any) -> Any:
        source, analysis, _ = sections
        documents = read_token_ids(source, tokenizer, analysis)
        name, progress = options["name"], options["progress"]
        return [analyze(model, documents, analysis, progress=progress, name=name)]

    _evaluate(
        "coca analyze",
        run_analyze,
        words,
        [SourceSettings, AnalysisSettings, LoadingSettings],
        check=lambda sections: check_settings(sections[1]),
        measure=measure,
    )


def run_suite(words: list[str]) -> None:
    """Measure models x scalings x tasks from one YAML; started again, it does what is missing."""
    from coca_attention.evaluation import suite as suites
    from coca_attention.report import printed_tables, read_results

    if not words or words[0] in ("-h", "--help"):
        parser = suites.suite_parser()
        parser.add_argument("--output", help="Folder; by default runs/ and the suite's name.")
        parser.description = run_suite.__doc__
        parser.print_help()
        return
    path, *overrides = words
    if path.startswith("-"):
        raise UserError("the suite comes first: coca eval suite SUITE.yaml [--passkey.samples 20]")
    overrides, output = take_option(overrides, "--output")
    folder = Path(output or Path("runs") / Path(path).stem)
    with Progress() as advance:
        results = suites.run_suite(suites.load_suite(path, overrides), folder, progress=advance)
    for table in printed_tables(read_results([results])[0]["results"]):
        print_table(*table)
    print(f"Results: {results}")


def _evaluate(
    program: str,
    command: Run,
    words: list[str],
    sections: list[type],
    *,
    check: Callable[[list[Any]], Any],
    measure: Callable[..., list[dict[str, Any]]],
) -> None:
    """Parse, check, load, measure what is missing, write, print.

    Args:
        program: What help calls the command; its last word names the result file.
        command: Function whose docstring describes it.
        words: Words of the command line.
        sections: Classes of the options, the last one `LoadingSettings` or a child of it.
        check: Called with the sections' instances before anything is loaded.
        measure: Called with the model, its tokenizer, the sections' instances, and by name what
            the results call the model, what tells it from others, a journal, a progress function,
            and the rotary scaling where the sections have one.
    """
    from coca_attention.data import load_tokenizer
    from coca_attention.environment import check_writable, describe_environment, write_json
    from coca_attention.evaluation.journal import Journal, fingerprint
    from coca_attention.models import load_model
    from coca_attention.report import printed_tables

    path, *instances = parse(program, command, words, sections, positionals=["model"])
    check(instances)
    settings = instances[-1]
    name = settings.name or Path(path).name
    task = program.split()[-1]
    options: dict[str, Any] = {"name": name, "identity": f"{fingerprint(path)} {settings.dtype}"}
    file = f"{name}-{task}.json"
    if isinstance(settings, EvaluationSettings):
        options |= {"scaling": settings.scaling, "factor": settings.factor}
        file = f"{name}-{settings.scaling}-{task}.json"
    output = Path(settings.output or Path("runs", "eval", file))
    check_writable(output)
    journal = Journal(output.with_suffix(".journal.jsonl"))
    model = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer = load_tokenizer(path)
    with Progress() as advance:
        cells = measure(model, tokenizer, instances, journal=journal, progress=advance, **options)
    write_json(output, {"results": cells, "environment": describe_environment()})
    journal.remove()
    for table in printed_tables(cells):
        print_table(*table)
    print(f"Results: {output}")
