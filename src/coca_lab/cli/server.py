"""Transformers' server, for one model: sampling, checked requests, NaN, clients that go away."""

import asyncio
import json
import threading
from typing import Annotated, Any

import torch
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

from coca_attention.errors import UserError
from coca_lab.generation import FiniteScores

# What would load or unload a model at a client's word.
REMOVED = ("/load_model", "/reset", "/v1/audio/transcriptions")


class Server(Serve):
    """Serve a model over HTTP, with the interface of OpenAI's, by Transformers' own server.

    \b
    POST /v1/chat/completions   answers in a conversation, also as a stream
    POST /v1/completions        continues a text, also as a stream
    POST /v1/responses          the same as the first, in the newer interface
    GET  /v1/models             the name of the model, which requests give
    GET  /health                200 if the server works

    Example: coca serve runs/quickstart/CoCA-Strict --port 8000
    """  # noqa: D301

    _thread = None  # `kill_server` asks for it

    def start_server(self) -> None:
        """Prepare the server; Transformers' own would start it in a thread of its own.

        Raises:
            UserError: If the model returns NaN.
        """
        models: Any = self._model_manager
        name = models.force_model
        key = models.process_model_name(name)
        _check_scores(models.load_model_and_processor(key)[0])
        models.get_gen_models = lambda: [
            {"id": name, "object": "model", "created": 0, "owned_by": ""}
        ]
        state = self._generation_state
        state._generate_managers[key] = OneByOne()
        state._cb_manager, state._cb_model_id = Batched(state._cb_config), key
        _guard(self._chat_handler, ChatRequest)
        _guard(self._completion_handler, CompletionRequest)
        _guard(self._response_handler, ResponseRequest)
        app: Any = self.server.config.app
        app.router.routes = [route for route in app.routes if route.path not in REMOVED]
        for kind, status in ((ValueError, 400), (TemplateError, 400), (UserError, 500)):
            app.add_exception_handler(kind, _answer_with(status))
        app.add_exception_handler(Exception, _answer_with(500))
        self.server.config.app = cancel_when_gone(app)


def _check_scores(model: Any) -> None:
    """UserError if the model returns NaN for a single token."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        FiniteScores()(ids, model(input_ids=ids).logits)


def _answer_with(status: int) -> Any:
    """A handler of exceptions that tells the client what is wrong."""

    async def answer(_request: Any, error: Exception) -> JSONResponse:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return JSONResponse({"detail": text}, status)

    return answer


class _Request(BaseModel):
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(_Request):
    """What is checked of a request to /v1/chat/completions."""

    messages: list[_Message]


class CompletionRequest(_Request):
    """What is checked of a request to /v1/completions."""

    prompt: str


class ResponseRequest(_Request):
    """What is checked of a request to /v1/responses."""

    input: str | list[dict[str, Any]]


def _guard(handler: Any, schema: type[BaseModel]) -> None:
    """Make a handler of Transformers check requests, and sample where one gives a temperature."""
    validate, build = handler._validate_request, handler._build_generation_config

    def check(body: dict[str, Any]) -> None:
        validate(body)
        if any("\ud800" <= letter <= "\udfff" for letter in json.dumps(body, ensure_ascii=False)):
            raise ValueError("the request has half a surrogate pair (\\ud800 to \\udfff) in a text")
        try:
            schema.model_validate(body)
        except ValidationError as error:
            detail = error.errors(include_url=False, include_input=False)
            raise HTTPException(422, detail) from error

    def settings(body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = build(body, *args, **kwargs)
        asked = (body.get("temperature"), body.get("top_p"))
        if asked != (None, None) and asked[0] != 0:
            found.do_sample = True
        return found

    handler._validate_request, handler._build_generation_config = check, settings


def _check_prompt(inputs: Any) -> None:
    ids = inputs["input_ids"]
    if len(ids if isinstance(ids, list) else ids[0]) == 0:
        raise ValueError("the prompt has no tokens; give some text to continue")


class OneByOne(GenerateManager):
    """Answers one request after another; stops at NaN, and when the client has gone."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kw: Any):
        _check_prompt(inputs)
        inputs = {**inputs, "logits_processor": [FiniteScores()]}
        return super().generate_streaming(model, processor, inputs, *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any
    ):
        _check_prompt(inputs)
        gone = threading.Event()
        inputs = {
            **inputs,
            "logits_processor": [FiniteScores()],
            "stopping_criteria": [lambda *_, **__: gone.is_set()],
        }
        answer = super().generate_non_streaming(model, processor, inputs, *args, **kwargs)
        try:
            # Shielded, because the thread that generates cannot report to a cancelled task.
            return await asyncio.shield(asyncio.ensure_future(answer))
        finally:
            gone.set()


class Batched(CBGenerateManager):
    """Answers requests together; they have to agree in how they sample."""

    _sampling: dict[str, Any] | None = None

    def init_cb(self, model: Any, gen_config: Any) -> None:
        super().init_cb(model, gen_config)
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        sampling = {name: getattr(gen_config, name) for name in names if gen_config.do_sample}
        if self._sampling is None:
            self._sampling = sampling
        if sampling != self._sampling:
            raise ValueError(
                "with --continuous-batching all requests sample as the first one did "
                f"({self._sampling or 'greedily'}); this one asks for {sampling or 'greedy'}"
            )

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kw: Any):
        _check_prompt(inputs)
        return super().generate_streaming(model, processor, inputs, *args, **kw)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ):
        _check_prompt(inputs)
        batches: Any = self._cb
        try:
            return await super().generate_non_streaming(
                model, processor, inputs, gen_config, request_id
            )
        except asyncio.CancelledError:
            batches.cancel_request(request_id)
            raise


def cancel_when_gone(app: Any) -> Any:
    """An ASGI application that cancels a request when its client disconnects.

    Args:
        app: The application that answers. By itself, it would go on computing answers for nobody.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def listen() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                messages.put_nowait(message)
            answering.cancel()

        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(app(scope, messages.get, send))
            listening = tasks.create_task(listen())
            answering.add_done_callback(lambda _: listening.cancel())

    return answer
