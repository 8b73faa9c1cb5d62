"""What a model finds in a prompt, measured next to perplexity during training.

Prompts and scoring are those of ``coca eval passkey`` and ``coca eval needles``, with a seed of
their own.
"""

import re
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from coca_attention.data.needles import Kind, ask_for_needles, recall
from coca_attention.data.passkey import Prompt, ask_for_passkeys, is_hit
from coca_attention.errors import error_prefix
from coca_attention.models.generation import greedy_answers
from coca_attention.training.recipe import Recipe

SEED = 7177  # unlike the evaluations', so that what was chosen by validation can be measured
KINDS: tuple[Kind, ...] = ("single", "multi-key")
ANSWER = 32
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Retrieval:
    """Prompts with known answers.

    Attributes:
        tokenizer: The model's tokenizer.
        prompts: By what is asked for and its length, such as ``passkey_256``.
        tokens: Prompt tokens of a batch.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, list[Prompt]]
    tokens: int

    def shares(self, model: Any) -> dict[str, float]:
        """Ask a model, in all processes together.

        Args:
            model: A causal language model in evaluation mode, sharded or not.

        Returns:
            The share found, by the names of `prompts`; the same in all processes.
        """
        return {name: self._share(model, name) for name in self.prompts}

    def _share(self, model: Any, name: str) -> float:
        prompts, state = self.prompts[name], PartialState()
        size = max(1, self.tokens // len(prompts[0].ids))
        score = _passkey_score if name.startswith("passkey") else _needle_score
        # All processes answer equally many; the first prompts are repeated, and counted once.
        every = -(-len(prompts) // state.num_processes) * state.num_processes
        mine = range(state.process_index, every, state.num_processes)
        found: list[float] = []
        for batch in torch.tensor(mine).split(size):
            asked = [prompts[index % len(prompts)] for index in batch.tolist()]
            answers = greedy_answers(
                model,
                self.tokenizer,
                torch.tensor([prompt.ids for prompt in asked]),
                max_new_tokens=ANSWER,
                together=state.num_processes > 1,
            )
            found += map(score, answers, asked)
        counted = [value for index, value in zip(mine, found, strict=True) if index < len(prompts)]
        return fmean(gather_object(counted))


def load_retrieval(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Retrieval | None:
    """The prompts that a recipe asks for, or None.

    Raises:
        UserError: If a length is too short, or the tokenizer cannot write the answers.
    """
    validation, block = recipe.validation, recipe.data.block_length
    prompts: dict[str, list[Prompt]] = {}
    for length in validation.lengths or [block]:
        if validation.passkeys:
            with error_prefix("validation.passkeys: "):
                count = range(validation.passkeys)
                prompts[f"passkey_{length}"] = ask_for_passkeys(tokenizer, length, count, seed=SEED)
        if validation.needles:
            with error_prefix("validation.needles: "):
                count = range(validation.needles)
                for kind in KINDS:
                    asked = ask_for_needles(tokenizer, kind, length, count, seed=SEED)
                    prompts[f"{kind}_{length}"] = asked
    tokens = recipe.training.micro_batch_size * block
    return Retrieval(tokenizer, prompts, tokens) if prompts else None


def is_retrieval(name: str) -> bool:
    """Whether a figure of the validation is that of some `Retrieval.prompts`."""
    return re.fullmatch(rf"(passkey|{'|'.join(KINDS)})_\d+", name) is not None


def _passkey_score(answer: str, prompt: Prompt) -> float:
    return float(is_hit(answer, prompt.facts["key"]))


def _needle_score(answer: str, prompt: Prompt) -> float:
    return recall(answer, prompt.facts["expected"])
