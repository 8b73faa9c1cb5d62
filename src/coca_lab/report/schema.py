"""What result files must be, by their tasks: types and ranges of the fields that reports read.

A field that is missing is named where it is read, as files of several versions differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coca_attention.errors import UserError

Count = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Positive = Annotated[float, Field(gt=1e-300, le=1e300)]
Share = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
Bins = Annotated[list[Number | None], Field(min_length=1)]


class Part(BaseModel):
    """A part of a result file; other fields are not looked at."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Document(Part):
    """The score of a document."""

    id: str | int = ""
    nats: Number | None
    tokens: Count


class CopiedDocument(Document):
    """The score of a document's targets that stand earlier in it, too, if any."""

    tokens: Natural


class PositionRange(Part):
    """The score of targets with so many tokens before them."""

    first: Natural
    last: Natural
    nats: Number | None
    tokens: Natural


class Repeats(Part):
    """Scores of targets that can be copied from far back."""

    n: Count
    beyond: Natural
    documents: list[CopiedDocument]


class Cell(Part):
    """What cells of all tasks have in common."""

    task: str
    model: Name = ""
    training_length: Count | None = None
    attention: str | None = None
    rope_parameters: dict[str, Any] | None = None
    scaling: Name = ""
    factor: Positive | None = None
    training_seed: Integer | None = None
    size: str = ""
    parameters: Count | None = None


class Perplexity(Cell):
    """A model on a text, by window."""

    window: Count = 1
    stride: Count = 1
    targets: str = ""
    tokens: Count = 1
    perplexity: Positive | None = None
    ci95: Interval | None = None
    documents: Annotated[list[Document], Field(min_length=1)] = []
    by_position: list[PositionRange] | None = None
    repeats: Repeats | None = None

    @model_validator(mode="after")
    def _same_documents(self) -> Self:
        if self.repeats and len(self.repeats.documents) != len(self.documents):
            raise ValueError("repeats has other documents than the cell")
        return self


class Sample(Part):
    """An answer to a prompt."""

    hit: bool = False
    score: Share = 0.0
    depth: Share = 0.0
    distance: Count = 1


class Prompts(Cell):
    """Passkeys, or a task of RULER, in prompts of one length."""

    length: Count = 1
    kind: Name = ""
    chat: bool = False
    accuracy: Share = 0.0
    score: Share = 0.0
    wilson95: Interval | None = None
    samples: Annotated[list[Sample], Field(min_length=1)] = []


class Harness(Cell):
    """A task of lm-evaluation-harness."""

    name: Name = ""
    metrics: dict[str, Any] = {}
    harness: str = ""
    limit: Positive | None = None


class Variant(Part):
    """What one of the things compared in a benchmark needs."""

    median_ms: Positive = 1.0
    rounds: Count = 1
    ratio: Positive = 1.0
    ratio_quartiles: Interval = []
    error: Number | None = None
    cache_megabytes: Number | None = None
    peak_megabytes: Positive = 1.0


class Bench(Cell):
    """A benchmark at one length."""

    case: Name = ""
    title: Name = ""
    text: str = ""
    measure: str = ""
    device: str = ""
    dtype: str = ""
    batch: Count | None = None
    length: Count = 1
    sizes: dict[str, int | str | None] = {}
    variants: Annotated[dict[str, Variant], Field(min_length=1)] = {}


class Cases(Part):
    """Shares of the angles in the paper's cases."""

    d: Share | None


class AnomalousShares(Part):
    """By rotary pair, at one length."""

    anomalous_share: list[Share | None]


class Angles(Part):
    """Angles of a layer."""

    cases: Cases
    largest: Number | None
    zero_share: list[Share | None]
    histogram: Annotated[list[Bins], Field(min_length=1)]
    lengths: list[AnomalousShares]


class Check(Part):
    """How often an inequality was looked at, and violated."""

    checked: Natural
    violations: Natural
    largest_ratio: Number | None


class Distance(Part):
    """A mean score and its bounds."""

    distance: Natural
    score: Number | None
    eq19: Number | None
    eq20: Number | None


class Decay(Part):
    """Scores by distance, and the paper's bounds of them."""

    by_distance: list[Distance]
    eq19: Check
    eq20: Check
    eq21: Check
    score_against_eq20: Check


class ScoreChange(Part):
    """Of one shift of all positions."""

    score_change: Number | None


class Layer(Part):
    """A layer's angles."""

    layer: Natural
    form: str = ""
    angles: Angles
    effective_angles: Angles | None
    decay: Decay
    shifts: list[ScoreChange]
    absolute_share: Share | None = None


class Shift(Part):
    """The loss when all positions are moved."""

    shift: Integer
    nats: Number
    nats_shifted: Number


class AngleSettings(Part):
    """Lengths at which anomalous tokens were counted."""

    lengths: Annotated[list[Count], Field(min_length=1)]


class AngleCell(Cell):
    """Angles between queries and keys."""

    form: str
    documents: Count
    tokens: Count
    longest: Count
    settings: AngleSettings
    shifts: list[Shift]
    layers: Annotated[list[Layer], Field(min_length=1)]

    @model_validator(mode="after")
    def _same_shapes(self) -> Self:
        bins = set()
        for layer in self.layers:
            for angles in filter(None, (layer.angles, layer.effective_angles)):
                pairs = len(angles.histogram)
                shares = [len(each.anomalous_share) for each in angles.lengths]
                if {len(angles.zero_share), *shares} != {pairs}:
                    raise ValueError("angles of a layer differ in their number of rotary pairs")
                if len(shares) != len(self.settings.lengths):
                    raise ValueError("a layer has other lengths than the settings")
                bins |= {len(row) for row in angles.histogram}
            if len(layer.shifts) != len(self.shifts):
                raise ValueError("a layer has other shifts than the cell")
        if len(bins) > 1:
            raise ValueError("histograms have different numbers of bins")
        return self


class CurvePoint(Part):
    """A loss in training."""

    step: Natural
    loss: Number
    stage: str = ""


class Validation(Part):
    """A measurement in training."""

    step: Natural
    perplexity: Positive
    stage: str = ""
    retrieval: dict[str, Share] = {}


class Start(Part):
    """The same of the model that training started from."""

    name: Name
    perplexity: Positive
    retrieval: dict[str, Share] = {}


class Asked(Part):
    """What a model was asked in validation."""

    what: str
    length: Count


class Stage(Part):
    """A stage of training."""

    name: str
    objective: str


class Run(Part):
    """The ``training.json`` of a run."""

    name: Name = ""
    parameters: Count = 1
    steps: Count = 1
    tokens: Count = 1
    epochs: Number = 0.0
    seconds: Annotated[float, Field(ge=0, le=1e300)] | None = None
    curve: list[CurvePoint]
    validation: list[Validation] = []
    retrieval: dict[str, Asked] = {}
    start: Start | None = None
    stages: list[Stage] = []

    @model_validator(mode="after")
    def _same_questions(self) -> Self:
        if any(not each.retrieval.keys() >= self.retrieval.keys() for each in self.validation):
            raise ValueError("a validation lacks a figure of what was asked")
        return self


class Environment(Part):
    """The machine and the versions of a measurement."""

    command: str
    processor: str
    cores: Count
    threads: Count
    gpus: list[str]
    system: str
    versions: dict[str, str]


class Study(Part):
    """The study that results are from."""

    title: str = ""


class ResultFile(Part):
    """A result file as a whole; its cells are looked at by their tasks."""

    results: list[dict[str, Any]] = []
    training: list[Run] = []
    environment: Environment | None = None
    environments: list[Environment] = []
    study: Study | None = None


class HarnessFile(Part):
    """A result file of lm-evaluation-harness."""

    lm_eval_version: str
    model_name: Name
    results: dict[str, dict[str, Any]]
    config: dict[str, Any] = {}


CELLS: Mapping[str, type[Cell]] = {
    "perplexity": Perplexity,
    "passkey": Prompts,
    "ruler": Prompts,
    "harness": Harness,
    "bench": Bench,
    "angles": AngleCell,
}
"""By the field ``task`` of a cell."""


def check_part(kind: type[Part], content: Any, path: Path, *place: str | int) -> None:
    """Raise UserError, which names the field, unless a part of a result file is of a kind."""
    try:
        kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        said = problem["msg"]
        if problem["type"] not in ("missing", "value_error"):
            said += f", got {problem['input']!r}"[:200]
        field = ".".join(map(str, (*place, *problem["loc"])))
        raise UserError(f"{path}: not a result file: {field}: {said}") from error


def check_cells(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Raise UserError unless the cells of a file are as their tasks have them."""
    for number, cell in enumerate(cells):
        kind = CELLS.get(str(cell.get("task")), Cell)
        check_part(kind, {"task": "", **cell}, path, "results", number)
