"""The settings of evaluation tasks, and the table of what commands say of them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from coca_attention.errors import UserError
from coca_lab.settings.sources import SourceSettings, TextSettings, Thinking, check_text

# Making a prompt takes some 70 bytes a token.
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=10**7)]], Field(min_length=1)]
RulerTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3",
    "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
]  # fmt: skip
RULER_TASKS: tuple[RulerTask, ...] = get_args(RulerTask)


@dataclass
class WindowSettings:
    """Which windows the text is read through."""

    windows: Annotated[list[PositiveInt], Field(min_length=1)] = field(
        default_factory=lambda: [512]
    )
    """Window sizes: tokens read in one pass."""
    stride: PositiveInt | None = None
    """Tokens scored in one pass; by default the smallest window."""
    targets: Literal["shared", "all", "one-pass"] = "shared"
    """shared: the same last tokens at every window; all: every token except the first, once;
    one-pass: the first tokens of every document, read once, by the number of tokens before them in
    ranges that end at the windows."""
    attend_last: PositiveInt | None = None
    """Also score the tokens with only this many tokens of context."""
    batch_tokens: PositiveInt = 8192
    """Tokens per batch; a batch has at least one window."""
    positions: PositiveInt | None = None
    """Also report perplexity by the number of tokens read before, in this many ranges."""
    repeats: PositiveInt | None = None
    """Also score separately the targets that end an n-gram of this length that stands earlier in
    the document, but only farther back than attend_last, or else than the smallest window."""

    def __post_init__(self) -> None:
        for window in self.windows:
            check_stride(window, self.step)
        if (self.attend_last or 1) > max(self.windows):
            raise UserError(
                f"`attend_last` must be at most the largest window, got {self.attend_last}"
            )
        if (self.positions or 1) > min(self.windows):
            raise UserError(
                f"`positions` must be at most the smallest window, got {self.positions}"
            )
        if self.targets == "one-pass" and not self.stride == self.positions is None:
            raise UserError(
                "one pass over a document has neither `stride` nor `positions`: its ranges end at "
                "the windows; leave both out"
            )

    @property
    def step(self) -> int:
        """The stride, or its default."""
        return min(self.windows) if self.stride is None else self.stride

    @property
    def near(self) -> int:
        """Tokens of the short context that longer windows are compared with."""
        return self.attend_last or min(self.windows)

    @property
    def tokens_needed(self) -> int:
        """Minimum number of tokens in a document: the largest window and one target."""
        return max(self.windows) + 1


def check_stride(window: int, stride: int) -> None:
    """Raise UserError unless 1 <= stride <= window."""
    if not 1 <= stride <= window:
        raise UserError(
            f"`stride` must be at least 1 token and at most the window, or the tokens in between "
            f"would never be scored; got a stride of {stride} and a window of {window}"
        )


@dataclass
class PerplexitySettings(TextSettings, WindowSettings):
    """Which text to score, and the windows it is read through."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text(self, self.tokens_needed)


@dataclass
class PromptSettings:
    """Which prompts a model answers, and how."""

    lengths: Lengths = field(default_factory=lambda: [512, 1024])
    """Prompt lengths in tokens."""
    samples: PositiveInt = 100
    """Prompts per length."""
    seed: NonNegativeInt = 0
    """Random seed of the prompts."""
    batch_tokens: PositiveInt = 16384
    """Prompt tokens per batch; a batch has at least one prompt."""
    use_cache: bool = True
    """Whether to decode with a key/value cache; the result is the same."""


@dataclass
class PasskeySettings(PromptSettings):
    """Which passkey prompts to use (CoCA paper, App. B.1)."""

    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens in an answer."""
    depths: PositiveInt | None = None
    """Number of evenly spaced depths that the keys cycle through; by default depths are random."""


@dataclass
class RulerSettings(SourceSettings, PromptSettings):
    """Which prompts of RULER's tasks to use.

    The source is the text that needles are hidden in where RULER has essays.
    """

    lengths: Lengths = field(default_factory=lambda: [4096, 8192])
    """Tokens of prompt and answer together."""
    kinds: Annotated[list[RulerTask], Field(min_length=1)] = field(
        default_factory=lambda: [*RULER_TASKS]
    )
    """RULER's names of tasks; docs/evaluation.md describes them."""
    samples: PositiveInt = 50
    """Prompts per task and length."""
    chat: bool = False
    """Whether prompts are in the tokenizer's chat template; by default they are plain text."""
    thinking: Thinking = "default"
    """Whether a model with a chat thinks first, where its chat template has enable_thinking; by
    default as the template says. What it thinks counts as the answer, and towards its length."""

    def __post_init__(self) -> None:
        if self.thinking != "default" and not self.chat:
            raise UserError("`thinking` is said in the chat template: set `chat`")


@dataclass
class NeedleSettings(TextSettings):
    """In which text numbers are hidden, and how many."""

    lengths: Annotated[list[PositiveInt], Field(min_length=1)] = field(
        default_factory=lambda: [2048, 4096]
    )
    """Tokens of a text, with what is hidden in it, the questions and the answers."""
    count: PositiveInt = 10
    """Numbers that are hidden in a document."""
    attend_last: PositiveInt | None = None
    """Also read only this many tokens at the end of longer texts, which hides what is before."""
    near: PositiveInt | None = None
    """Distance in tokens up to which a number counts as near; by default the training length."""
    seed: NonNegativeInt = 0
    """Random seed of the numbers and their places."""


@dataclass(frozen=True)
class TaskOptions:
    """What the commands say of a task, and which options it has.

    Attributes:
        name: Name of the command ``coca eval NAME``, of the section in a study, and of the field
            ``task`` of its cells.
        summary: One line for ``--help``.
        settings: Documented dataclass whose fields are the options; all need defaults. Its
            ``__post_init__`` raises UserError for settings that contradict each other.
        scaled: Whether methods apply. If not, a task runs once per model.
        endpoint: Whether a model behind a server can do it, without methods.
    """

    name: str
    summary: str
    settings: type
    scaled: bool = True
    endpoint: bool = False


PERPLEXITY = TaskOptions(
    "perplexity",
    "Perplexity of a causal language model under sliding windows.",
    PerplexitySettings,
)
NEEDLES = TaskOptions(
    "needles",
    "Needles by log probability: how probable are the numbers hidden in a text?",
    NeedleSettings,
    endpoint=True,
)
PASSKEY = TaskOptions(
    "passkey",
    "Passkey retrieval: does a model find five digits hidden in a long prompt?",
    PasskeySettings,
    endpoint=True,
)
RULER = TaskOptions(
    "ruler",
    "RULER's tasks: needles, chains of variables, frequent words.",
    RulerSettings,
    endpoint=True,
)
TASK_OPTIONS = {task.name: task for task in (PERPLEXITY, NEEDLES, PASSKEY, RULER)}
"""Of the tasks of ``coca eval`` by their names, those that are registered included."""
