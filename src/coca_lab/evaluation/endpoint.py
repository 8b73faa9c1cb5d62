"""Prompts answered by a server with OpenAI's completions: vLLM, llama.cpp, ``coca serve``."""

import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_lab.data.tasks import Prompt, leading_special_tokens

log = logging.getLogger(__name__)

WAITS = (1.0, 4.0, 16.0)
"""Seconds before a request is repeated that found no server, or a busy or broken one."""
TIMEOUT = 3600.0
"""Seconds in which an answer has to begin."""
NO_PENALTY = {"frequency_penalty": 0, "repetition_penalty": 1, "repeat_penalty": 1}
"""In place of those of the model's own generation settings: as Transformers' server, vLLM with
SGLang, and llama.cpp call it. A server that refuses one of these names is asked without it."""
BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated."""


@dataclass
class Endpoint:
    """A model behind a server.

    Attributes:
        url: Its address up to the version, such as http://127.0.0.1:8000/v1. The environment
            variable OPENAI_API_KEY is its key, if it needs one.
        model: What the server calls the model.
        requests: Number of requests at once.
        refused: Names of `NO_PENALTY` that the server does not take.
        failed: Why it does not answer any more.
        warned: Of what it was warned, once for all prompts.
    """

    url: str
    model: str
    requests: int = 8
    refused: set[str] = field(default_factory=set, repr=False)
    failed: UserError | None = field(default=None, repr=False)
    warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{self.url}: expected an address such as http://127.0.0.1:8000/v1")

    def answers(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], most: int
    ) -> list[str]:
        """Greedy continuations of at most so many tokens.

        Raises:
            UserError: If the server cannot be reached, refuses a prompt, reads another number of
                tokens, or says something else than an answer, with its words.
        """
        with ThreadPoolExecutor(self.requests) as pool:
            return [*pool.map(lambda prompt: self._answer(tokenizer, prompt, most), prompts)]

    def _answer(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, most: int) -> str:
        sent = as_sent(tokenizer, prompt)
        said = self._ask(
            {"model": self.model, "prompt": sent, "max_tokens": most, "temperature": 0}
        )
        try:
            text, read = said["choices"][0]["text"], (said.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            text = read = None
        if not isinstance(text, str):
            raise self._error(f"expected a completion, got {_short(json.dumps(said))}")
        if read is None:
            self._warn("usage", "without usage.prompt_tokens, cut prompts are not noticed")
        elif not isinstance(read, int):
            raise self._error(f"expected a number of prompt_tokens, got {_short(json.dumps(read))}")
        elif read != len(prompt.ids):
            raise self._error(
                f"it read {read} tokens of a prompt of {len(prompt.ids)}: give the folder of its "
                "own tokenizer, and a length that it takes"
            )
        return text

    def _ask(self, body: dict[str, object]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        problem = said = ""
        for wait in (*WAITS, None):
            if self.failed is not None:
                raise self.failed
            sent = body | {n: value for n, value in NO_PENALTY.items() if n not in self.refused}
            request = Request(f"{self.url}/completions", json.dumps(sent).encode(), headers)
            try:
                with urlopen(request, timeout=TIMEOUT) as response:
                    said = response.read().decode(errors="replace")
                return json.loads(said)
            except HTTPError as error:
                problem = f"status {error.code}: {_short(error.read().decode(errors='replace'))}"
                if refused := {name for name in NO_PENALTY if name in sent and name in problem}:
                    self.refused |= refused
                    continue
                if error.code not in BUSY:
                    raise self._error(problem) from error
            except ValueError as error:
                raise self._error(f"expected JSON, got {_short(said)}") from error
            except (OSError, HTTPException) as error:
                problem = f"no answer ({error or type(error).__name__})"
            if wait is not None:
                self._warn("again", f"{problem}; asking again, up to {len(WAITS)} times")
            time.sleep(wait or 0)
        self.failed = self._error(f"{problem}, {len(WAITS) + 1} times")
        raise self.failed

    def _warn(self, about: str, problem: str) -> None:
        if about not in self.warned:
            self.warned.add(about)
            log.warning("%s", self._error(problem))

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.url} ({self.model}): {problem}")


def as_sent(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | list[int]:
    """The text that the tokenizer turns into exactly the tokens of a prompt, else their ids."""
    # Not every server takes ids. To a text, servers add special tokens as the tokenizer does.
    special = len(leading_special_tokens(tokenizer))
    text = prompt.text or str(tokenizer.decode(prompt.ids[special:]))
    return text if tokenizer(text, verbose=False)["input_ids"] == prompt.ids else prompt.ids


def _short(text: str) -> str:
    return " ".join(text.split())[:300] or "nothing"
