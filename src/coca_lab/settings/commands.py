"""The options of the commands that have no YAML file."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from coca_attention.errors import UserError
from coca_attention.method_names import SavedMethod
from coca_lab.settings.sources import BadLines, Dtype, PathText, Precision, Thinking
from coca_lab.settings.studies import MethodSettings

COLDEST = 1e-3
"""Logits divided by less may overflow."""


@dataclass
class PlacedSettings:
    """In which precision and where a model is loaded."""

    dtype: Precision = "float32"
    """Precision of the weights. float32, whatever the files have, rounds least, and every processor
    computes in it; bfloat16 and float16 take half the memory."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator if there is one; auto spreads the model over all."""


@dataclass
class GenerateSettings(PlacedSettings, MethodSettings):
    """How text is generated."""

    max_new_tokens: PositiveInt = 64
    """Tokens to generate at most."""
    temperature: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """0 takes the likeliest token every time; above, tokens are drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that together have this probability; by default as the model's
    generation_config.json says."""
    top_k: PositiveInt | None = None
    """Draw from this many of the likeliest tokens; by default as generation_config.json says."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the draws."""
    chat: bool = False
    """Put the prompt into the tokenizer's chat template, as a user's message, and print the answer
    alone."""
    thinking: Thinking = "default"
    """With --chat, whether the model thinks first, where its chat template has enable_thinking; by
    default as the template says."""
    stream: bool = False
    """Print the text as it is made also where the output is not a terminal."""

    def __post_init__(self) -> None:
        if 0 < self.temperature < COLDEST:
            raise UserError(
                f"`temperature` must be 0, or at least {COLDEST}, got {self.temperature}"
            )
        if not self.temperature and (self.top_p, self.top_k) != (None, None):
            raise UserError(
                "`top_p` and `top_k` are for draws: set --temperature, for example to 1"
            )
        if self.thinking != "default" and not self.chat:
            raise UserError("`thinking` is said in the chat template: set --chat")
        self.check_is_used()


@dataclass
class LoadingSettings(PlacedSettings):
    """How a model is loaded, and where the results go."""

    name: str | None = None
    """What the results call the model; by default the name of its folder."""
    output: PathText | None = None
    """Result file (JSON); by default in runs/eval/, named after the model and the task."""


@dataclass
class ReadingSettings(LoadingSettings, MethodSettings):
    """How a model is loaded, by what method it reads farther, and where the results go."""

    def __post_init__(self) -> None:
        self.check_is_used()


@dataclass
class EndpointSettings:
    """A server in place of the model, whose tokenizer is in the folder."""

    endpoint: str | None = None
    """Its address, with OpenAI's completions, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """What the server calls the model, and so do the results; by default as the folder."""
    requests: PositiveInt = 8
    """Requests at once."""
    timeout: PositiveFloat = 600.0
    """Seconds in which the server has to answer a request, those before it included: enough for
    100,000 tokens at 170 a second. It is asked twice."""

    def __post_init__(self) -> None:
        if self.model is not None and self.endpoint is None:
            raise UserError("`model` is what a server calls it: set --endpoint, or instead --name")


@dataclass
class ListSettings:
    """What is listed."""

    all: bool = False
    """Also list the recipes and studies that repeat results/ and the paper."""


@dataclass
class ReportSettings:
    """The report page."""

    output: PathText = "report.html"
    """HTML file to write."""
    title: str | None = None
    """Heading of the page; by default it names what was measured."""
    paper: bool = False
    """Also show the paper's Tables 1 to 4."""
    figures: PathText | None = None
    """Also write every chart as SVG, PDF and PNG into this folder."""


@dataclass
class FolderSettings:
    """How the folders are read and written."""

    from_original: bool = False
    """MODEL is a checkpoint in the format of the paper's authors."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


@dataclass
class ExtendSettings:
    """How the context is extended."""

    to: PositiveInt | None = None
    """T, the longest text in tokens that the model is to read; by default 1.5 L."""
    method: Literal["auto", SavedMethod] = "auto"
    """auto takes the best by --check. Without --check, auto is shifted for T up to almost 2 L and
    limited beyond, which change nothing in texts of up to L tokens, or temperature for models that
    have layers without positions. limited (ReRoPE), leaky (Leaky ReRoPE), self_extend, shifted
    (STRING for queries beyond L) and string (STRING) change what distances count; yarn, dynamic,
    ntk, linear, llama3 and longrope the rotations; temperature the queries of layers without
    positions. docs/methods.md describes each."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of the method by name, such as {first: 64} for shifted; docs/methods.md
    lists them."""
    near: PositiveInt | None = None
    """W, for limited; by default L. S, for shifted."""
    length: PositiveInt | None = None
    """L, the length that the model was made for; by default what its configuration says."""
    dtype: Dtype = "auto"
    """Precision of the weights, to measure and to write; auto keeps it."""


@dataclass
class Margins:
    """Which loss within L does not matter."""

    perplexity: NonNegativeFloat = 0.01
    """Share of the perplexity: 0.01 is one percent."""
    needles: NonNegativeFloat = 0.05
    """Nats a digit of the numbers that are hidden in the text."""


@dataclass
class CheckSettings:
    """What the methods are measured on."""

    check: PathText = ""
    """Text on which every method is measured: stdlib; a file, folder or glob of .txt, .jsonl or
    .parquet; or hf:NAME. Perplexity, and the log probability of numbers that are hidden in the
    text, say which methods show no loss within L, and which of these is best beyond it."""
    check_lengths: list[PositiveInt] = field(default_factory=list)
    """Lengths of text to measure at beside L; by default 2 L, 4 L, … up to --to."""
    check_documents: PositiveInt = 10
    """Documents to read, of more tokens than the largest length."""
    check_numbers: PositiveInt = 10
    """Numbers that are hidden in a document for every length, and asked for there."""
    margins: Margins = field(default_factory=Margins)
    """Which loss within L does not matter."""
    device: str | None = None
    """cpu, cuda, …; by default the accelerator if there is one; auto spreads the model over all."""
    text_field: str = "text"
    """Field with the text in JSON records, Parquet files and datasets."""
    bad_lines: BadLines = "error"
    """How to handle an invalid JSON line: error, or skip with a warning."""


@dataclass
class ExportSettings:
    """What is written."""

    context: PositiveInt | None = None
    """N, the tokens among which the model is to find something: scores of global layers are
    multiplied by ln(N + 1) / ln(L + 1), for L the training length. By default they stay. What that
    costs within L, coca eval perplexity --method temperature --factor N/L measures."""
    gguf: bool = False
    """Write NAME.gguf for llama.cpp into the folder, too, for NAME its name."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""


@dataclass
class ServeSettings:
    """How the model is served."""

    host: str = "localhost"
    """Address to listen at."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    """Port to listen at."""
    continuous_batching: bool = False
    """Answer several requests at once."""
    cache: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With continuous batching, the share of the free memory that its cache takes."""
    dtype: Dtype = "auto"
    """Precision of the weights; auto keeps it."""
    device: str = "auto"
    """cpu, cuda, …; auto is the accelerator where there is one."""
    seed: int | None = None
    """Seed of the draws."""
