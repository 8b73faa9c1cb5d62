"""What a user says, in the chat template of a tokenizer."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.settings.sources import Thinking

THINK = "<think>"
"""What a template ends in that lets a model think."""
WORD = "Qsaid7x"
"""What no template has of itself."""
LINES = f'{WORD}: "a" <b> &\n\n{WORD}'
"""What a template might change beside leaving it out: it escapes, trims or truncates."""


def chat_text(tokenizer: PreTrainedTokenizerBase, said: str, thinking: Thinking = "default") -> str:
    """What a model reads when a user says something, up to where its answer begins.

    Templates that take no text as the content of a message get a list with one part.

    Raises:
        UserError: If there is no template, it raises, leaves out or repeats what the user says, or
            has no ``enable_thinking`` to set.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the tokenizer has no chat template: ask without one")
    problem = "it leaves out what the user says"
    for as_parts in (False, True):
        try:
            times = _applied(tokenizer, WORD, as_parts, thinking).count(WORD)
            if times == 1:
                return _applied(tokenizer, said, as_parts, thinking)
            if times > 1:
                problem = "it repeats what the user says"
        except Exception as error:  # whatever a template raises, or its language
            if not as_parts:
                problem = " ".join(str(error).split())[:300] or type(error).__name__
    raise UserError(f"the tokenizer's chat template cannot be used: {problem}")


def _applied(
    tokenizer: PreTrainedTokenizerBase, said: str, as_parts: bool, thinking: Thinking
) -> str:
    options: dict[str, Any] = {}
    if thinking != "default":
        if "enable_thinking" not in tokenizer.get_chat_template():
            raise UserError("it has no enable_thinking to set: leave out `thinking`")
        options["enable_thinking"] = thinking == "on"
    content = [{"type": "text", "text": said}] if as_parts else said
    messages: Any = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return str(text)


def chat_frame(
    tokenizer: PreTrainedTokenizerBase, thinking: Thinking = "default"
) -> tuple[str, str]:
    """What a chat template puts before and behind what the user says, once and as it is.

    Raises:
        UserError: As of `chat_text`, or if the template changes what the user says.
    """
    text = chat_text(tokenizer, LINES, thinking)
    if text.count(WORD) != LINES.count(WORD) or text.count(LINES) != 1:
        raise UserError(
            "the tokenizer's chat template changes what the user says, so no prompt has an exact "
            "length: ask without it"
        )
    opening, _, closing = text.partition(LINES)
    return opening, closing
