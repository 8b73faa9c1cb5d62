"""The command generate: a model continues a prompt."""

import io
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from transformers import TextStreamer, set_seed

from coca_attention.errors import UserError, error_prefix
from coca_lab.cli.console import PlacedSettings, parse
from coca_lab.data import load_tokenizer
from coca_lab.data.chat import Thinking, chat_text
from coca_lab.evaluation import MethodSettings
from coca_lab.generation import FiniteScores
from coca_lab.loading import guard_vocabulary, load_model

COLDEST = 1e-3
"""Logits divided by less may overflow."""


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
            raise UserError(f"temperature must be 0, or at least {COLDEST}, got {self.temperature}")
        if not self.temperature and (self.top_p, self.top_k) != (None, None):
            raise UserError("top_p and top_k are for draws: set --temperature, for example to 1")
        if self.thinking != "default" and not self.chat:
            raise UserError("thinking is said in the chat template: set --chat")
        if self.factor is not None and self.method == "none":
            raise UserError("factor is for a method: set --method, for example to yarn")


def generate_command(words: list[str]) -> None:
    """Continue a prompt with a Transformers causal language model."""
    positionals = ["model", "prompt"]
    path, prompt, settings = parse(
        "coca generate", generate_command, words, [GenerateSettings], positionals
    )
    if prompt == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # as in words of the command line
        prompt = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError("the prompt is not valid UTF-8 text")
    model: Any = load_model(path, dtype=settings.dtype, device=settings.device)
    tokenizer: Any = load_tokenizer(path)
    guard_vocabulary(model, tokenizer)
    if settings.chat:
        with error_prefix(f"{path}: "):
            prompt = chat_text(tokenizer, prompt, settings.thinking)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not settings.chat)
    inputs = inputs.to(model.device)
    before = inputs["input_ids"].shape[-1]
    if before == 0:
        raise UserError("the prompt has no tokens; give some text to continue")
    names = ("temperature", "top_p", "top_k")
    options: dict[str, Any] = {n: value for n in names if (value := getattr(settings, n))}
    streams = settings.stream or sys.stdout.isatty()
    if streams:
        options["streamer"] = TextStreamer(
            tokenizer, skip_prompt=settings.chat, skip_special_tokens=True
        )
    set_seed(settings.seed)
    with settings.applied(model, before + settings.max_new_tokens):
        (ids,) = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            logits_processor=[FiniteScores()],
            do_sample=bool(settings.temperature),
            **options,
        )
    if not streams:
        print(tokenizer.decode(ids[before if settings.chat else 0 :], skip_special_tokens=True))
