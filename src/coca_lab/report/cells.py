"""The types of what result files hold: sections read nothing that these have not checked."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from coca_attention.errors import UserError
from coca_lab.intervals import DocumentScore

Whole = Annotated[int, Field(ge=1, le=2**53)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
AboveZero = Annotated[float, Field(gt=1e-300, le=1e300)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
Content = dict[str, Any]
"""An object of a JSON file."""
Facts = dict[Any, Any]
"""What a figure depends on besides the model, by name."""


def having(*names: str) -> AfterValidator:
    """Of an object: that it has these fields."""

    def check(values: Content) -> Content:
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return values

    return AfterValidator(check)


class Record(BaseModel):
    """A part of a result file; other fields than its own are kept as they are."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class CheckedCell(Record):
    """A result of a task: what those of all tasks have in common.

    Attributes:
        task: Name of the task.
        model: What the results call the model.
        file: The file that it is from.
        machine: What times depend on.
        attention: The model's form of attention.
        training_length: Tokens of its training context.
    """

    task: str
    model: str = ""
    file: str = ""
    machine: str = ""
    attention: str | None = None
    training_length: Whole | None = None

    @property
    def facts(self) -> Facts:
        """What it depends on besides the model; cells that differ in a fact are shown apart."""
        return {}

    def _known(self, *names: str) -> Facts:
        """Those of these fields that the file has; old ones lack some."""
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None}


class Figure(CheckedCell):
    """A figure of a model at a length, of a seed and a size if it is one of a study's models.

    Figures that were not measured here say their ``conditions`` in words.
    """

    scaling: Name = "none"
    factor: AboveZero | None = None
    length: Whole
    value: Fraction | None
    interval: Interval | None = None
    kind: str = ""
    training_seed: Integer | None = None
    size: str = ""
    parameters: Whole | None = None
    conditions: str | None = None


class ScoredDocument(Record):
    """The score of a document; nats that overflowed are null."""

    id: str | int = ""
    nats: Number | None
    tokens: Natural

    @property
    def score(self) -> DocumentScore:
        return DocumentScore.of(vars(self))


class PositionRange(ScoredDocument):
    """The score of targets with so many tokens before them."""

    first: Natural
    last: Whole


class Repeats(Record):
    """Scores of the targets that end an n-gram which stands earlier, but only farther back."""

    n: Whole
    beyond: Natural
    documents: list[ScoredDocument]


class Perplexity(Figure):
    """The perplexity of a text, read through windows of one length."""

    length: Whole = Field(validation_alias="window")
    value: AboveZero | None = Field(validation_alias="perplexity")
    interval: Interval | None = Field(None, validation_alias="ci95")
    stride: Whole | None = None
    targets: str = ""
    text: Any = None
    tokens: Whole | None = None
    documents: list[ScoredDocument] = []
    by_position: list[PositionRange] | None = None
    repeats: Repeats | None = None

    @property
    def facts(self) -> Facts:
        """The documents, the tokens scored of each, and the stride."""
        # The last tokens alone have a stride of their own.
        stride = () if self.scaling == "attend-last" else ("stride",)
        documents = [(each.id, each.tokens) for each in self.documents]
        return self._known("conditions", "targets", "text", *stride) | {"documents": documents}


class Sample(Record):
    """An answer to a prompt."""

    hit: bool = False
    distance: Whole | None = None


class Prompts(Figure):
    """The share of what prompts of one length ask for that a model finds."""

    value: Fraction = Field(validation_alias="accuracy")
    interval: Interval | None = Field(None, validation_alias="wilson95")
    samples: list[Sample] = []

    @property
    def facts(self) -> Facts:
        """The prompts; the tokenizer shows in the distances."""
        named = ("key", "expected", "depth", "depths", "distance", "distances")
        prompts = [[getattr(sample, name, None) for name in named] for sample in self.samples]
        known = self._known("conditions", "seed", "depths", "chat", "thinking")
        # Each of RULER's tasks has its own length of answers, and text around what is asked for.
        known |= {(of, self.kind): n for of, n in self._known("max_new_tokens").items()}
        return known | {(self.kind, self.length): [getattr(self, "filler", None), *prompts]}


class Ruler(Prompts):
    """The score of one of RULER's tasks."""

    value: Fraction = Field(validation_alias="score")


class Recall(Prompts):
    """The share of right answers about a number of pairs."""

    kind: int | str = Field("", validation_alias="pairs")


class NeedleFigures(Record):
    """Nats a digit of hidden numbers, null where they overflowed, and how many are found."""

    nats: Annotated[float, Field(ge=0, le=1e300)] | None
    ci95: Interval | None = None
    found: Natural
    needles: Natural


class AskedNeedle(Record):
    """A number that was asked for; nats that overflowed are null."""

    distance: Natural
    nats: Number | None
    found: bool


class NeedleDocument(Record):
    """The numbers that were hidden in a document."""

    id: str | int
    needles: list[AskedNeedle]


class Needles(Figure):
    """How probable numbers are that are hidden in texts of one length."""

    value: Annotated[float, Field(ge=0, le=1e300)] | None = Field(validation_alias="nats")
    interval: Interval | None = Field(None, validation_alias="ci95")
    found: Natural
    needles: Natural
    near: Whole | None = None
    text: str = ""
    ranges: dict[str, NeedleFigures] = {}
    digits: Whole
    documents: list[NeedleDocument]

    @property
    def facts(self) -> Facts:
        """The texts, and what counts as near."""
        return self._known("near") | {("text", self.length): self.text}


class CurvePoint(Record):
    """A loss in training."""

    step: Natural
    loss: Number
    stage: str = ""


class Start(Record):
    """What validation measured of the model that training started from."""

    name: Name
    perplexity: AboveZero
    retrieval: dict[str, Fraction] = {}


class Validation(Record):
    """A measurement in training."""

    step: Natural
    perplexity: AboveZero
    stage: str = ""
    retrieval: dict[str, Fraction] = {}


class Asked(Record):
    """What a model was asked in validation."""

    what: str
    length: Whole


class Stage(Record):
    """A stage of training."""

    name: str
    objective: str


class TrainingRun(Record):
    """The ``training.json`` of a run."""

    model: str = Field(validation_alias="name")
    file: str = ""
    parameters: Whole
    steps: Whole
    tokens: Whole
    epochs: Number
    seconds: AboveZero | None = None
    seed: Integer | None = None
    curve: list[CurvePoint]
    validation: list[Validation] = []
    retrieval: dict[str, Asked] = {}
    start: Start | None = None
    stages: list[Stage] = []
    recipe: Any = None


class Environment(Record):
    """The machine and the versions of a measurement."""

    command: str
    processor: str
    cores: Whole
    threads: Whole
    gpus: list[str]
    system: str
    versions: dict[str, str]

    def __str__(self) -> str:
        """What times depend on."""
        processors = ", ".join(self.gpus or [self.processor])
        plural = "" if self.threads == 1 else "s"
        return f"{processors}, {self.threads} thread{plural}, PyTorch {self.versions.get('torch')}"


class StudyRecord(Record):
    """The study that results are from."""

    title: str = ""


class ResultFile(Record):
    """A result file as a whole; its cells are looked at by their tasks.

    ``failures`` says of a study's models that have no results why.
    """

    file: str = ""
    failures: dict[str, str] = {}
    results: list[Content] = []
    training: list[TrainingRun] = []
    environment: Environment | None = None
    environments: list[Environment] = []
    study: StudyRecord | None = None


Kind = TypeVar("Kind", bound=Record)


def read_as(kind: type[Kind], content: object, file: str, *place: str | int) -> Kind:
    """A part of a file of its kind; a UserError names the field where it is not."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        said = problem["msg"]
        if problem["type"] != "missing":
            said += f", got {problem['input']!r}"[:200]
        field = ".".join(map(str, (*place, *problem["loc"])))
        raise UserError(f"{file or 'results'}: not a result file: {field}: {said}") from error


def models_of(items: Sequence[CheckedCell | TrainingRun]) -> list[str]:
    """The names of the models, in their order."""
    return list(dict.fromkeys(item.model for item in items if item.model))
