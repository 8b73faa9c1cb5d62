"""What a model finds in a prompt, measured next to perplexity during training.

Prompts and scoring are those of ``coca eval passkey`` and ``coca eval ruler``, with a seed of their
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import error_prefix
from coca_lab.data.ruler import ANSWER_TOKENS, RulerTask, ask_for_ruler, string_match
from coca_lab.data.tasks import Prompt, ask_for_passkeys, is_hit
from coca_lab.generation import greedy_answers
from coca_lab.recipe import Recipe

SEED = 7177  # unlike the evaluations', so that what was chosen by validation can be measured
NEEDLES: tuple[RulerTask, ...] = ("niah_single_1", "niah_multikey_2")
"""One fact among filler, and one of many; neither needs a text."""
ANSWER = 32
"""Tokens of a passkey's answer at most."""


@dataclass(frozen=True)
class Questions:
    """Prompts of one kind and length with known answers."""

    what: str  # such as passkeys
    length: int
    prompts: list[Prompt]
    score: Callable[[str, Prompt], float]
    answer: int  # tokens at most


@dataclass(frozen=True)
class Retrieval:
    """What a model is asked next to perplexity."""

    tokenizer: PreTrainedTokenizerBase
    questions: dict[str, Questions]  # by the names of their figures, such as passkey_256
    tokens: int  # of the prompts of a batch

    def describe(self) -> dict[str, dict[str, str | int]]:
        """``what`` is asked for, the ``length`` and the number of ``prompts``, by name."""
        return {
            name: {"what": each.what, "length": each.length, "prompts": len(each.prompts)}
            for name, each in self.questions.items()
        }

    def shares(self, model: PreTrainedModel) -> dict[str, float]:
        """What a model in evaluation mode finds, by name; all processes ask together."""
        state = PartialState()
        mine: Any
        found = {}
        for name, questions in self.questions.items():
            prompts = questions.prompts
            size = max(1, self.tokens // questions.length)
            scores: dict[int, float] = {}
            # All processes answer equally many: some repeat the last prompt, which counts once.
            with state.split_between_processes([*range(len(prompts))], apply_padding=True) as mine:
                for start in range(0, len(mine), size):
                    part = mine[start : start + size]
                    answers = greedy_answers(
                        model,
                        self.tokenizer,
                        torch.tensor([prompts[index].ids for index in part]),
                        max_new_tokens=questions.answer,
                        together=state.num_processes > 1,
                    )
                    for index, answer in zip(part, answers, strict=True):
                        scores[index] = questions.score(answer, prompts[index])
            found[name] = fmean(dict(gather_object([*scores.items()])).values())
        return found


def load_retrieval(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Retrieval:
    """What a recipe asks for; UserError if there is no room, or token, for an answer."""
    validation = recipe.validation
    block = recipe.data.block_length
    questions: dict[str, Questions] = {}
    passkeys = range(validation.passkeys)
    needles = range(validation.needles)
    for length in validation.lengths or [block]:
        if passkeys:
            with error_prefix("validation.passkeys: "):
                prompts = ask_for_passkeys(tokenizer, length, passkeys, seed=SEED)
            questions[f"passkey_{length}"] = Questions(
                "passkeys",
                length,
                prompts,
                lambda answer, prompt: float(is_hit(answer, prompt.facts["key"])),
                ANSWER,
            )
        for task in NEEDLES if needles else ():
            with error_prefix("validation.needles: "):
                prompts = ask_for_ruler(tokenizer, task, length, needles, seed=SEED)
            questions[f"{task}_{length}"] = Questions(
                task,
                length,
                prompts,
                lambda answer, prompt: string_match(answer, prompt.facts["expected"]),
                ANSWER_TOKENS[task],
            )
    tokens = recipe.training.micro_batch_size * block
    return Retrieval(tokenizer, questions, tokens)
