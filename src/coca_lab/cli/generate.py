"""The command generate: a model continues a prompt."""

import io
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TextStreamer, set_seed

from coca_attention.errors import UserError, error_prefix
from coca_attention.models.configuration import extension_of
from coca_lab.data import load_tokenizer
from coca_lab.data.chat import chat_text
from coca_lab.generation import FiniteScores
from coca_lab.loading import guard_vocabulary, load_model, model_without_weights
from coca_lab.settings.commands import GenerateSettings

log = logging.getLogger(__name__)


def generate_command(path: str, prompt: str, settings: GenerateSettings) -> None:
    """Continue a prompt with a Transformers causal language model."""
    if prompt == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # as in words of the command line
        prompt = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError("the prompt is not valid UTF-8 text")
    # What is refused is refused before the weights are read.
    settings.parameters(model_without_weights(path), 1)
    tokenizer: Any = load_tokenizer(path)
    if settings.chat:
        with error_prefix(f"{path}: "):
            prompt = chat_text(tokenizer, prompt, settings.thinking)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not settings.chat)
    before = inputs["input_ids"].shape[-1]
    if before == 0:
        raise UserError("the prompt has no tokens; give some text to continue")
    model: Any = load_model(path, dtype=settings.dtype, device=settings.device)
    guard_vocabulary(model, tokenizer)
    extended = extension_of(model.config.get_text_config())
    if extended and before + settings.max_new_tokens > extended["to"]:
        log.warning(
            f"a prompt of {before:,} tokens and an answer of up to {settings.max_new_tokens:,} are "
            f"more than the {extended['to']:,} that {path} was extended for: it may answer wrongly"
        )
    inputs = inputs.to(model.device)
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


def generate_words(folder: str | Path) -> str:
    """The command that tries a model, in its tokenizer's chat template if it has one."""
    words = f"coca generate {folder} PROMPT"
    with suppress(UserError):  # no tokenizer, or no chat template
        chat_text(load_tokenizer(folder), "PROMPT")
        words += " --chat"
    return words
