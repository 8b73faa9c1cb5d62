"""A model behind a server with OpenAI's completions: vLLM, llama.cpp, ``coca serve``.

The client of the package ``openai`` does the HTTP, waits and retries. What is here keeps the
answers comparable with a model in this process: exact prompts, greedy decoding, and errors in
place of answers to something else.
"""

import asyncio
import json
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError, install
from coca_lab.data.tasks import Prompt, leading_special_tokens

if TYPE_CHECKING:  # an optional package, whose import takes a second
    from openai import AsyncOpenAI
    from openai.types import Completion

log = logging.getLogger(__name__)

RETRIES = 6
"""How often a request is repeated that found no server, or a busy or broken one. The client waits
0.5, 1, 2, 4, 8 and 8 s, or as ``Retry-After`` says, up to two minutes (versions before 3: one)."""
TRIES = 2
"""How often a server that hangs is asked: it may still compute what it was asked before."""
CONNECT_TIMEOUT = 10.0
"""Seconds in which a server has to accept a connection."""
NO_PENALTY = {"frequency_penalty": 0, "repetition_penalty": 1, "repeat_penalty": 1}
"""In place of those of the model's own generation settings: as Transformers' server, vLLM with
SGLang, and llama.cpp call it. A server that refuses one of these names is asked without it."""
KEY = "OPENAI_API_KEY"
"""The environment variable with the server's key."""
ECHO = "log probabilities of a text need a server that takes echo with logprobs, as vLLM does"

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class TokenReading(NamedTuple):
    """What a model says about a token of its text."""

    log_probability: float
    likeliest: bool


@dataclass
class Endpoint:
    """A model behind a server.

    Attributes:
        url: Its address up to the version, such as http://127.0.0.1:8000/v1. The environment
            variable OPENAI_API_KEY is its key, if it needs one.
        model: What the server calls the model.
        requests: Number of requests at once.
        timeout: Seconds in which an answer has to begin. It is not streamed, so it begins with its
            last token, after the requests that the server answers before it.
        refused: Names of `NO_PENALTY` that the server does not take.
        failed: Why it does not answer any more.
        warned: Of what it was warned, once for all prompts.
    """

    url: str
    model: str
    requests: int = 8
    timeout: float = 600.0
    refused: set[str] = field(default_factory=set, repr=False)
    failed: UserError | None = field(default=None, repr=False)
    warned: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port, or brackets
            usable = False
        if not usable:
            raise UserError(f"{self.url}: expected an address such as http://127.0.0.1:8000/v1")
        if "@" in self.url:  # it would be in results and messages
            raise UserError(f"the address of an endpoint has no user or password: set {KEY}")
        if find_spec("openai") is None:
            raise UserError(f"an endpoint needs the package openai: {install('endpoint')}")
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(f"{KEY} has characters that no key has: set it to the key alone")

    @property
    def _key(self) -> str:  # read when it is used, so that no copy of an endpoint holds it
        return os.environ.get(KEY, "").strip()

    def answers(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], most: int
    ) -> list[str]:
        """Greedy continuations of at most so many tokens.

        Raises:
            UserError: If the server cannot be reached, refuses a prompt, reads another number of
                tokens, or says something else than an answer, with its words.
        """

        async def answer(client: "AsyncOpenAI", prompt: Prompt) -> str:
            said = await self._ask(client, prompt=as_sent(tokenizer, prompt), max_tokens=most)
            text = getattr(said.choices[0], "text", None)
            if not isinstance(text, str):
                raise self._error(f"expected a completion, got {_as_text(said)}")
            self._check_read(said, len(prompt.ids))
            return self._without_prompt(tokenizer, prompt, text, most)

        return self._together(answer, prompts)

    def log_probabilities(self, texts: Sequence[Sequence[int]]) -> list[list[TokenReading]]:
        """Log probability, in nats, of every token but the first of texts of token ids.

        Raises:
            UserError: As `answers`, and if the server returns no log probabilities of a prompt.
        """

        async def read(client: "AsyncOpenAI", ids: Sequence[int]) -> list[TokenReading]:
            # One token more, which is dropped: not every server takes 0.
            said = await self._ask(client, prompt=[*ids], max_tokens=1, echo=True, logprobs=1)
            found = getattr(said.choices[0], "logprobs", None)
            values = getattr(found, "token_logprobs", None)
            likeliest = getattr(found, "top_logprobs", None)
            if not isinstance(values, list) or not isinstance(likeliest, list):
                raise self._error(f"{ECHO}, got {_as_text(said)}")
            self._check_read(said, len(ids))
            if len(values) not in (len(ids), len(ids) + 1) or len(likeliest) != len(values):
                raise self._error(f"{ECHO}, got {len(values)} for {len(ids)} tokens")
            readings = []
            for value, others in zip(values[1 : len(ids)], likeliest[1 : len(ids)], strict=True):
                # Round-off may exceed 0.
                if not isinstance(value, float | int) or not -math.inf < value < 0.01:
                    raise self._error(f"expected a log probability, got {json.dumps(value)}")
                most = [*others.values()] if isinstance(others, dict) else []
                if not most or not all(isinstance(each, float | int) for each in most):
                    raise self._error(f"expected the likeliest token, got {json.dumps(others)}")
                readings.append(TokenReading(float(value), value >= max(most)))
            return readings

        return self._together(read, texts)

    def _together(
        self,
        ask: Callable[["AsyncOpenAI", Question], Awaitable[Answer]],
        questions: Sequence[Question],
    ) -> list[Answer]:
        """The answers to all questions, so many requests at once; the first error ends all."""
        import openai  # an optional package; anyio comes with it
        from anyio.from_thread import start_blocking_portal

        async def before(request: Any) -> None:
            if not self._key:  # which the client does not start without
                request.headers.pop("Authorization", None)
            if request.headers.get("x-stainless-retry-count", "0") != "0":
                self._warn("again", f"no answer, or busy; asking again, up to {RETRIES} times")

        async def ask_all() -> list[Answer]:
            http = openai.DefaultAsyncHttpxClient(
                follow_redirects=False,  # or the key would go where the server says
                event_hooks={"request": [before]},
            )
            client = openai.AsyncOpenAI(
                base_url=self.url,
                api_key=self._key or "none",
                max_retries=RETRIES,
                timeout=openai.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
                http_client=http,
            )
            places = asyncio.Semaphore(self.requests)

            async def ask_one(question: Question) -> Answer:
                async with places:
                    return await ask(client, question)

            async with client:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(ask_one(each)) for each in questions]
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        # The requests have a thread of their own, for which this one waits: an interruption
        # arrives here at once, whatever the server does, and then cancels them. A notebook,
        # whose thread has an event loop already, needs it too.
        with start_blocking_portal() as portal:
            return portal.call(ask_all)

    async def _ask(self, client: "AsyncOpenAI", **request: Any) -> "Completion":
        """The completion, of one choice or more, for a request."""
        import openai  # an optional package

        while True:
            if self.failed is not None:
                raise self.failed
            guards = {name: value for name, value in NO_PENALTY.items() if name not in self.refused}
            try:
                async with asyncio.timeout(TRIES * self.timeout):
                    said = await client.completions.create(
                        model=self.model, temperature=0, extra_body=guards, **request
                    )
            except TimeoutError:
                self.failed = self._error(
                    f"no answer within {TRIES} times {self.timeout:g} s: see whether it works, or "
                    "set a longer `timeout`, or fewer `requests` at once"
                )
                raise self.failed from None
            except openai.APIStatusError as error:
                status = error.status_code
                named = first_named(guards, error.response.text) if status in (400, 422) else None
                if named is not None:
                    self.refused.add(named)
                    self._warn(named, f"it takes no {named}, and is asked without")
                    continue
                problem = f"status {status}: {error.response.text or 'nothing'}"
                if 300 <= status < 400:
                    problem += (
                        f" (it redirects to {error.response.headers.get('location')}, which is not "
                        "followed: give the address itself, if you trust it with the key)"
                    )
                if status in (408, 409, 429) or status >= 500:  # after all `RETRIES`
                    self.failed = self._error(problem)
                if "echo" in request:
                    problem += f" ({ECHO})"
                raise self._error(problem) from None  # the client's has the server's whole text
            except openai.APIConnectionError as error:
                cause = str(error.__cause__ or "") or type(error.__cause__ or error).__name__
                self.failed = self._error(f"no answer ({cause})")
                raise self.failed from None
            except json.JSONDecodeError as error:
                raise self._error(f"expected JSON, got {error.doc}") from None
            if not getattr(said, "choices", None):
                raise self._error(f"expected a completion, got {_as_text(said)}")
            return said

    def _check_read(self, said: "Completion", count: int) -> None:
        """Raise UserError if the server has read another number of tokens than the prompt has."""
        read = getattr(said.usage, "prompt_tokens", None)
        if read is None:
            self._warn("usage", "without usage.prompt_tokens, cut prompts are not noticed")
        elif not isinstance(read, int):
            raise self._error(f"expected a number of prompt_tokens, got {json.dumps(read)}")
        elif read != count:
            details = getattr(said.usage, "prompt_tokens_details", None)
            cached = getattr(details, "cached_tokens", None)
            if isinstance(cached, int) and read + cached == count:
                return  # those of its cache are counted apart
            advice = "give the folder of its own tokenizer, and a length that it takes"
            if read < count:
                advice += "; if it counts no tokens that it finds in a cache, switch that cache off"
            raise self._error(f"it read {read} tokens of a prompt of {count}: {advice}")

    def _without_prompt(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str, most: int
    ) -> str:
        """An answer without the prompt, which some servers repeat: what it hides would be found."""
        if self._key and self._key in text:
            raise self._error(f"its answer repeats the key, {KEY}, and is not kept")
        special = len(leading_special_tokens(tokenizer))
        asked = prompt.text or str(tokenizer.decode(prompt.ids[special:]))
        if "".join(asked.split()) in "".join(text.split()):
            _, found, text = text.partition(asked)
            if not found:
                raise self._error("it repeats the prompt with other spaces: switch that off")
            self._warn("echo", "it repeats the prompt, which is taken off its answers")
        # A character that is no whole one may be three or four tokens when it is read again.
        count = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if count > 4 * most:
            raise self._error(f"it answered {count} tokens where {most} were asked for: {text}")
        return text

    def _warn(self, about: str, problem: str) -> None:
        if about not in self.warned:
            self.warned.add(about)
            log.warning("%s", self._error(problem))

    def _error(self, problem: str) -> UserError:
        """An error in one line of bounded length, without the key, whoever repeats it."""
        line = " ".join(problem.split())
        if self._key:
            for spelling in (self._key, json.dumps(self._key)[1:-1]):
                line = line.replace(spelling, f"[{KEY}]")
        if len(line) > 500:
            line = f"{line[:300]} … {line[-200:]}"
        return UserError(f"{self.url} ({self.model}): {line}")


def as_sent(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | list[int]:
    """The text that the tokenizer turns into exactly the tokens of a prompt, else their ids."""
    # Not every server takes ids. To a text, servers add special tokens as the tokenizer does.
    special = len(leading_special_tokens(tokenizer))
    text = prompt.text or str(tokenizer.decode(prompt.ids[special:]))
    return text if tokenizer(text, verbose=False)["input_ids"] == prompt.ids else prompt.ids


def first_named(fields: Sequence[str] | dict[str, Any], said: str) -> str | None:
    """The field that a refusal names first; not one in a repetition of the request."""
    # There a number follows: "repeat_penalty": 1, perhaps with escaped quotes.
    places = {
        name: found.start()
        for name in fields
        if (found := re.search(rf"\b{re.escape(name)}\b(?!\W{{0,6}}\d)", said))
    }
    return min(places, key=places.__getitem__, default=None)


def _as_text(said: Any) -> str:
    """What a server said, as text: a completion, or what the client could not make one of."""
    return said.to_json(indent=None, warnings=False) if hasattr(said, "to_json") else str(said)
