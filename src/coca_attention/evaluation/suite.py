"""A suite: models × rotary scalings × tasks from one YAML; what is finished is never redone."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coca_attention.data import load_tokenizer
from coca_attention.environment import check_writable, describe_environment, write_json
from coca_attention.errors import UserError
from coca_attention.evaluation import needles, passkey, perplexity
from coca_attention.evaluation.journal import Journal, fingerprint
from coca_attention.evaluation.needles import NeedleSettings
from coca_attention.evaluation.passkey import PasskeySettings
from coca_attention.evaluation.perplexity import TextSettings, WindowSettings
from coca_attention.models import load_model
from coca_attention.options import OptionParser, check_sections

RESULTS_FILE, JOURNAL_FILE = "results.json", "journal.jsonl"


@dataclass
class PerplexitySettings(TextSettings, WindowSettings):
    """The text that is judged, and the windows it is read through."""


@dataclass
class ScalingSettings:
    """One rotary scaling that every model is judged with."""

    kind: Literal["none", "linear", "ntk", "dynamic"] = "none"
    """none is the model as it was saved; ntk fixes the base from each window or prompt."""
    factor: float = 4.0
    """Factor of the scaling."""
    models: list[str] | None = None
    """Names of the models that it is for; by default all."""


@dataclass
class Suite:
    """What is measured."""

    models: dict[str, str] = field(default_factory=dict)
    """Names for the results, and the folder (or hub name) of each."""
    scalings: list[ScalingSettings] = field(default_factory=lambda: [ScalingSettings()])
    """Rotary scalings."""
    perplexity: PerplexitySettings | None = None
    """Perplexity under sliding windows."""
    passkey: PasskeySettings | None = None
    """Passkey retrieval."""
    needles: NeedleSettings | None = None
    """Needles of several kinds."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator where there is one."""

    def check(self) -> None:
        """Raise UserError where settings contradict each other or leave their range."""
        if not self.models:
            raise UserError("a suite needs models: a name and a folder each")
        if not self.scalings:
            raise UserError("a suite needs scalings; kind: none is the model as it was saved")
        if self.perplexity is None and self.passkey is None and self.needles is None:
            raise UserError("a suite needs a task: perplexity, passkey or needles")
        for scaling in self.scalings:
            unknown = sorted(set(scaling.models or []) - set(self.models))
            if unknown:
                raise UserError(
                    f"scaling {scaling.kind} names models that the suite does not have: "
                    f"{', '.join(unknown)}"
                )
        if self.perplexity is not None:
            perplexity.check_settings(self.perplexity)
        if self.passkey is not None:
            passkey.check_settings(self.passkey)
        if self.needles is not None:
            needles.check_settings(self.needles)


def suite_parser() -> OptionParser:
    """The parser of suite files and overrides; its help comes from the fields above."""
    parser = OptionParser("coca eval suite")
    parser.add_argument("--suite", action="config", help="YAML file; also the first argument.")
    parser.add_class_arguments(Suite)
    return parser


def load_suite(path: str | Path, overrides: list[str] | None = None) -> Suite:
    """A checked suite from a YAML file and command-line overrides.

    Raises:
        UserError: If the file is missing or broken, a key unknown, or a value unfit.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such suite; the project's own are in the folder suites/")
    check_sections(Path(path), "suite", [item.name for item in fields(Suite)])
    try:
        read = suite_parser().read([f"--suite={path}", *(overrides or [])])
        suite = Suite(**{item.name: read[item.name] for item in fields(Suite)})
        suite.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return suite


def run_suite(
    suite: Suite,
    output: str | Path,
    *,
    progress: Callable[[str, int, int], Any] | None = None,
) -> Path:
    """Measure what is missing and write all of it.

    Args:
        suite: What is measured.
        output: Folder for ``results.json``, and for the journal that finished parts are kept in.
        progress: Called with a label, the tokens read so far and the tokens to read in all.

    Returns:
        The result file.

    Raises:
        UserError: If a model cannot be loaded, or a task not be done.
    """
    suite.check()
    output = Path(output)
    results = output / RESULTS_FILE
    check_writable(results)
    journal = Journal(output / JOURNAL_FILE)
    jobs = [
        (name, path, scaling)
        for name, path in suite.models.items()
        for scaling in suite.scalings
        if scaling.models is None or name in scaling.models
    ]
    costs = _costs(suite)
    whole = sum(costs) * len(jobs)
    cells: list[dict[str, Any]] = []
    loaded: tuple[str, Any, Any, Any, Any] | None = None
    for number, (name, path, scaling) in enumerate(jobs):
        if loaded is None or loaded[0] != name:
            loaded = None  # the model before is let go first
            model = load_model(path, dtype=suite.dtype, device=suite.device)
            tokenizer = load_tokenizer(path)
            documents, keys = [], None
            if suite.perplexity is not None:
                at_least = perplexity.tokens_needed(suite.perplexity)
                documents = perplexity.load_text(suite.perplexity, tokenizer, at_least=at_least)
                keys = perplexity.load_keys(
                    suite.perplexity, tokenizer, documents, dtype=suite.dtype, device=suite.device
                )
            loaded = (name, model, tokenizer, documents, keys)
        _, model, tokenizer, documents, keys = loaded
        seen: list[str] = []

        def advance(
            label: str, done: int, total: int, number: int = number, seen: list[str] = seen
        ) -> None:
            # Every cell reports at its end, so their order says which one is at work.
            if label not in seen:
                seen.append(label)
            before = number * sum(costs) + sum(costs[: len(seen) - 1])
            if progress is not None:
                progress(label, before + costs[len(seen) - 1] * done // max(total, 1), whole)

        options: dict[str, Any] = {
            "scaling": scaling.kind,
            "factor": scaling.factor,
            "name": name,
            "identity": f"{fingerprint(path)} {suite.dtype}",
            "journal": journal,
            "progress": advance,
        }
        if suite.perplexity is not None:
            cells += perplexity.evaluate_perplexity(
                model, documents, suite.perplexity, keys=keys, **options
            )
        if suite.passkey is not None:
            cells += passkey.evaluate_passkey(model, tokenizer, suite.passkey, **options)
        if suite.needles is not None:
            cells += needles.evaluate_needles(model, tokenizer, suite.needles, **options)
    write_json(
        results,
        {"results": cells, "suite": asdict(suite), "environment": describe_environment()},
    )
    return results


def _costs(suite: Suite) -> list[int]:
    """Tokens read in every cell of one model and scaling, in the order in which they are done."""
    costs = []
    if suite.perplexity is not None:
        settings = suite.perplexity
        stride = perplexity.check_settings(settings)
        costs += [window // stride + 1 for window in settings.windows]
        if settings.attend_last is not None:
            costs.append(8)
        # Per judged token; documents of unknown number and length are taken for this many.
        judged = (settings.max_documents or 50) * (settings.max_tokens or 2 * settings.windows[-1])
        costs = [cost * judged for cost in costs]
    for task in (suite.passkey, suite.needles):
        if task is not None:
            kinds = len(getattr(task, "kinds", [""]))
            costs += [
                task.samples * (length + 4 * task.max_new_tokens) for length in task.lengths
            ] * kinds
    return [max(1, cost) for cost in costs]
