"""The command serve: Transformers' server with bounds, and reasons for what it refuses."""

import asyncio
import errno
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig
from transformers.utils.import_utils import is_serve_available

import coca_attention.models  # noqa: F401 (registers the models)
from coca_attention.errors import UserError, install
from coca_lab.cli.console import parse
from coca_lab.loading import model_without_weights

PAGE = 32
"""Tokens of a page of the cache of continuous batching."""
BYTES_PER_TOKEN = 16
"""Bytes of a request a token at most, besides `OTHER_BYTES`."""
OTHER_BYTES = 65_536
"""Bytes for the other fields of a request."""
LAST_ANSWERS = 5
"""Seconds in which requests may end after a signal."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ANSWER = 1024
"""Tokens of an answer at most where a request states no limit, as in Transformers."""
HARMLESS = {"metadata", "prediction", "service_tier", "store", "stream_options", "user"}
"""Fields of a request that Transformers ignores, and that change no answer."""
NOT_BATCHED = {"frequency_penalty", "generation_config", "logit_bias", "stop"}
"""Fields that are ignored in continuous batching."""
NEUTRAL = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": 0, "logit_bias": {},
    "presence_penalty": 0, "frequency_penalty": 0, "tool_choice": "auto", "modalities": ["text"],
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "truncation": "disabled",
    "background": False, "include": [], "text": {"format": {"type": "text"}},
}  # fmt: skip
"""Values of ignored fields that ask for nothing, as null does."""


@dataclass
class ServeSettings:
    """How the model is served."""

    host: str = "localhost"
    """Address to listen at."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    """Port to listen at."""
    context: PositiveInt | None = None
    """Tokens of a prompt and its answer at most; by default the model's training length, which
    those with limited distances or roles may exceed."""
    continuous_batching: bool = False
    """Answer several requests at once."""
    requests: PositiveInt = 16
    """With continuous batching, requests of the whole context that the cache has room for."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto keeps it."""
    device: str = "auto"
    """cpu, cuda, …; auto is the accelerator where there is one."""
    seed: int | None = None
    """Seed of the draws."""


def serve_command(words: list[str]) -> None:
    """Serve a model over HTTP, with the interface of OpenAI's, by Transformers' server."""
    path, settings = parse("coca serve", serve_command, words, [ServeSettings], ["model"])
    if not is_serve_available():
        raise UserError(f"the server's packages are not installed: {install('serve')}")
    import uvicorn  # an optional package

    config: PreTrainedConfig = model_without_weights(path, "auto").config.get_text_config()
    context = settings.context or getattr(config, "max_position_embeddings", None)
    if context is None:
        raise UserError(f"{path} has no training length: set --context")
    _check_address(settings.host, settings.port)
    server = uvicorn.Config(
        make_app(path, context, settings),
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=LAST_ANSWERS,
    )
    uvicorn.Server(server).run()


def _check_address(host: str, port: int) -> None:
    """Raise UserError if nothing can listen there, before the model is loaded."""

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port)).close()

    try:
        asyncio.run(listen())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use: choose another --port") from error
        raise UserError(
            f"nothing can listen at {host}, port {port} ({error.strerror or error}): choose "
            "another --host or --port"
        ) from error


def make_app(path: str, context: int, settings: ServeSettings) -> Any:
    """Transformers' application for one model, which answers 400 with the reason."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerationState, set_torch_seed

    if settings.seed is not None:
        set_torch_seed(settings.seed)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=settings.requests * math.ceil(context / PAGE),
        max_batch_tokens=max(context, PAGE),
    )
    models = ModelManager(
        device=settings.device,
        dtype=settings.dtype,
        continuous_batching=settings.continuous_batching,
        force_model=path,
    )
    state = GenerationState(
        continuous_batching=settings.continuous_batching,
        cb_config=batching if settings.continuous_batching else None,
    )

    def bounded(handler: Any, *unread: str) -> Any:
        # The fields that a handler ignores: those it states itself, and others.
        ignored = handler._unused_fields.union(unread) - HARMLESS
        if settings.continuous_batching:
            ignored |= NOT_BATCHED
        name, fields = f"Bounded{handler.__name__}", {"context": context, "ignored": ignored}
        kind: Any = type(name, (_Bounded, handler), fields)
        return kind(models, state)

    app = build_server(
        models,
        bounded(ChatCompletionHandler, "moderation", "verbosity"),
        completion_handler=bounded(CompletionHandler, "logit_bias"),
        response_handler=bounded(
            ResponseHandler, "context_management", "conversation", "moderation", "reasoning"
        ),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(models, state),
        generation_state=state,
    )

    _refuse_with_reasons(app, OTHER_BYTES + BYTES_PER_TOKEN * context)
    return app


def _refuse_with_reasons(app: Any, most: int) -> None:
    """Let an application answer 400 to errors, and nothing that is longer than so many bytes."""
    from fastapi.responses import JSONResponse

    async def refuse(_: object, error: Exception) -> JSONResponse:
        return JSONResponse({"error": " ".join(str(error).split())}, status_code=400)

    for kind in (ValueError, TypeError, KeyError):  # no chat template, for one
        app.add_exception_handler(kind, refuse)

    @app.middleware("http")
    async def bound(request: Any, answer: Any) -> Any:
        """Keep nothing of what is too long; what is in chunks does not say how long it is."""
        code, error = 0, ""
        if "transfer-encoding" in request.headers:
            code, error = 411, "the request is in chunks: send it whole, with a Content-Length"
        elif int(request.headers.get("content-length", 0)) > most:
            code, error = 413, f"the request is longer than the {most:,} bytes that fit the context"
        if not code:
            return await answer(request)
        async for _ in request.stream():  # a client hears no answer while it sends
            pass
        return JSONResponse({"error": error}, status_code=code)


class _Bounded:
    """What handlers of Transformers' server check before they answer; the context in tokens."""

    context: int
    ignored: Collection[str]

    async def handle_request(self: Any, body: Any, request_id: str) -> Any:
        """As the handler's; ValueError for what no model can answer."""
        check_request(body, self.ignored)
        return await super().handle_request(body, request_id)  # pyright: ignore

    def _build_generation_config(self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config(body, *args, **kwargs)  # pyright: ignore
        if body.get("temperature"):
            config.do_sample = True  # which a temperature alone does not set
        if not any(body.get(name) for name in (*LIMITS, "generation_config")):
            config.max_new_tokens = None  # as many as fit
        return config

    def _streaming(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._fit(*args)
        return super()._streaming(*args, **kwargs)  # pyright: ignore

    async def _non_streaming(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._fit(*args)
        return await super()._non_streaming(*args, **kwargs)  # pyright: ignore

    def _fit(self, *args: Any) -> None:
        """Bound the answer by what is left of the context; ValueError if more was asked for."""
        config = next(each for each in args if isinstance(each, GenerationConfig))
        inputs = next(each for each in args if isinstance(each, Mapping) and "input_ids" in each)
        ids = inputs["input_ids"]
        count = len(ids) if isinstance(ids, list) else ids.shape[-1]
        if not 0 < count < self.context:
            raise ValueError(
                f"the prompt has {count:,} tokens; 1 to {self.context - 1:,} fit into the context, "
                "which coca serve --context sets"
            )
        asked, left = config.max_new_tokens, self.context - count
        if asked is not None and asked > left:
            raise ValueError(
                f"{asked:,} tokens are asked for; after the prompt's {count:,}, {left:,} fit into "
                "the context, which coca serve --context sets"
            )
        config.max_new_tokens = asked or min(ANSWER, left)


def check_request(body: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Raise ValueError, with the reason, for what no model can answer or the server ignores."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the request has half a surrogate pair, which is no text") from error
    if body.get("prompt") == "" or body.get("messages") == [] or body.get("input") in ("", []):
        raise ValueError("the prompt is empty: give some text to continue")
    for name in LIMITS:
        count = body.get(name)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be a positive integer, got {count!r}")
    for name, most in (("temperature", 1e3), ("top_p", 1)):
        value = body.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            raise ValueError(f"{name} must be a number from 0 to {most:g}, got {value!r}")
    for name in sorted(body.keys() & ignored):
        value, neutral = body[name], NEUTRAL.get(name)
        # JSON's false is not 0: of completions, logprobs: 0 asks for those of the tokens.
        if value is not None and (value != neutral or (neutral is False and value is not False)):
            or_give = f" or give {json.dumps(neutral)}" if name in NEUTRAL else ""
            raise ValueError(f"{name} is not supported by this server: leave it out{or_give}")
