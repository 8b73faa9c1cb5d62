"""The table of cases: what is computed in several ways, which are measured side by side."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)

from benchmarks.operators import ROTARY, Operator, error_of, operators, random_inputs
from benchmarks.timing import Variant, isolated, peak_megabytes
from coca_attention import ops
from coca_attention.models import CoCALlamaConfig
from coca_attention.models.configuration import Roles
from coca_attention.ops import FORMS
from coca_attention.testing import decoded_logits, difference, logits, some_tokens

Run = Callable[[], Any]
VOCABULARY = 1024
LLAMA, COPY = "Llama", "copy of as many bytes"


class Case(NamedTuple):
    """Something that can be computed in several ways.

    Attributes:
        title: Title of its section in the report.
        make: Returns the variants for a length in tokens; the first one is the baseline. A variant
            of ``memory`` returns megabytes (see `peak_megabytes`) and is called once.
        sizes: Settings to report with the results.
        text: Text below the title.
    """

    title: str
    make: Callable[[int, Namespace], Sequence[Variant]]
    sizes: tuple[str, ...]
    text: str = ""


def operator_variants(
    make_run: Callable[[Operator, dict[str, Tensor]], Run], length: int, settings: Namespace
) -> list[Variant]:
    """A variant per operator; ``make_run`` turns its function and tensors into what is timed."""
    tensors = random_inputs(length, settings)
    variants = []
    for name, (function, form) in operators(length, settings).items():
        with torch.inference_mode():
            error = error_of(function(**tensors), tensors, form)
        variants.append(Variant(name, make_run(function, tensors), error))
    return variants


def forward_run(function: Operator, tensors: dict[str, Tensor]) -> Run:
    """One call without gradients."""
    return torch.inference_mode()(partial(function, **tensors))


def backward_run(function: Operator, tensors: dict[str, Tensor]) -> Run:
    """One forward and backward pass."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def run() -> None:
        output = function(**leaves)
        ones, reads = torch.ones_like(output), list(leaves.values())
        # An operator reads either the keys or the key coefficients: the others have no gradient.
        torch.autograd.grad(output, reads, ones, allow_unused=True)

    return run


def memory_variants(length: int, settings: Namespace) -> list[Variant]:
    """A variant per operator, whose run returns its peak memory."""
    peak = partial(peak_megabytes, settings.device, single_forward)
    return [
        Variant(name, partial(peak, name, length, settings)) for name in operators(length, settings)
    ]


def single_forward(name: str, length: int, settings: Namespace) -> Run:
    """One operator for the process that measures its memory, after a short run to warm up."""
    function = operators(length, settings)[name][0]
    function(**random_inputs(64, settings))
    return forward_run(function, random_inputs(length, settings))


def one_query_variants(length: int, settings: Namespace) -> list[Variant]:
    """SDPA, every form, and a copy of as many bytes as keys and values have.

    No kernel that reads keys and values can be faster than the copy.
    """
    tensors = {name: x.contiguous() for name, x in random_inputs(length, settings).items()}
    value, t = tensors["value"], tensors["key_coefficients"]
    positions = torch.arange(length, device=value.device)
    cos, sin = ops.Rotation(settings.head_width).tables(positions)
    key = ops.apply_rotary(tensors["key"], cos, sin)
    query = ops.apply_rotary(tensors["query"], cos, sin)[..., -1:, :].contiguous()
    grouped = query.shape[1] != key.shape[1]
    sdpa = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=grouped)
    half = partial(half_attention, tensors["query"], t, value, cos, sin)
    target, variants = torch.empty_like(value), []
    compared = [(ROTARY, sdpa, key, None)]
    compared += [(f"half keys, CoCA {form}", half(form), t, form) for form in FORMS]
    for name, run, keys, form in [*compared, (COPY, partial(target.copy_, value), value, COPY)]:
        run = torch.inference_mode()(run)
        error = None if form == COPY else error_of(run(), tensors, form)
        read = (keys.numel() + value.numel()) * value.element_size() / 1e6
        variants.append(Variant(name, run, error, {"cache_megabytes": read}))
    return variants


def half_attention(
    query: Tensor, t: Tensor, value: Tensor, cos: Tensor, sin: Tensor, form: Any
) -> Callable[[], Tensor]:
    """Attention of the last query over key coefficients, without forming keys."""
    width, divisor = query.shape[-1], ops.score_scale(query.dtype)
    frames = ops.key_frames(
        torch.zeros(1, dtype=torch.long, device=query.device),
        t.shape[-2],
        ops.Rotation(width),
        tile=ops.tile_length(t, query.shape[1]),
        pairs=width // 2,
    )
    scale, last = width**-0.5 / divisor, query[..., -1:, :]
    mapped = ops.query_map(last, cos[-1:], sin[-1:], form=form, scale=scale).contiguous()
    return partial(ops.attend_half, mapped, t, value, frames, scale=divisor)


def make_model(
    settings: Namespace, form: str | None = None, kv_cache: str = "full"
) -> PreTrainedModel:
    """A Llama of the settings' sizes, always with the same weights.

    Args:
        settings: Sizes and, if there are any, roles of the layers.
        form: None for vanilla; a score form, with roles that of local layers (or ``rotary``).
        kv_cache: ``full`` or ``half``.
    """
    heads = settings.hidden_size // settings.head_width
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 4 * settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.kv_heads or heads,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    if form is not None and settings.roles:
        fields |= Roles(settings.roles, settings.window).fields(
            "rope" if form == "rotary" else form,
            num_layers=settings.layers,
            head_width=settings.head_width,
            length=8 * settings.window,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    elif form is not None:
        fields |= {"coca_form": form, "kv_cache": kv_cache}
    config = LlamaConfig(**fields) if form is None else CoCALlamaConfig(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model.to(settings.device, getattr(torch, settings.dtype)).eval()


def decoding_error(model: PreTrainedModel) -> float:
    """Largest difference between logits decoded with a cache and those of a single pass."""
    window = getattr(model.config, "sliding_window", None) or 0
    ids = some_tokens(model, length=24 + 4 * window)
    return difference(decoded_logits(model, ids), logits(model, ids))


def random_tokens(length: int, settings: Namespace) -> Tensor:
    """Random token ids (batch, length)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (settings.batch, length), generator=generator)
    return ids.to(settings.device)


def random_cache(cache: Any, model: PreTrainedModel, length: int, settings: Namespace) -> Any:
    """Fill a cache with random keys (or key coefficients) and values for so many tokens."""
    half = getattr(model.config, "kv_cache", "full") == "half"
    shape = (settings.batch, model.config.num_key_value_heads, length)
    widths = (settings.head_width // 2 if half else settings.head_width, settings.head_width)
    generator = torch.Generator().manual_seed(2)
    for layer in range(settings.layers):
        drawn = (torch.randn(*shape, width, generator=generator) for width in widths)
        cache.update(*(x.to(model.device, model.dtype) for x in drawn), layer)
    return cache


def decoder_variants(compiled: bool, length: int, settings: Namespace) -> list[Variant]:
    """The vanilla model, and the paper's forms with full and half cache.

    Other forms differ in the query map of one token alone.
    """
    kinds = {LLAMA: (None, "full")} | {
        f"CoCA {form}, {kind} cache": (form, kind)
        for form in ("slack", "strict")
        for kind in ("full", "half")
    }
    make = partial(isolated, decoder) if settings.device == "cpu" else decoder
    return [make(name, *kind, length, settings, compiled) for name, kind in kinds.items()]


def decoder(
    name: str, form: str | None, kind: str, length: int, settings: Namespace, compiled: bool
) -> Variant:
    """A model that decodes the same token in every run, and removes it from the cache.

    A compiled model, which is compared with itself without compilation, has a static cache, which
    grows by a token in every run.
    """
    model, token = make_model(settings, form, kind), random_tokens(1, settings)
    cache = random_cache(DynamicCache(), model, length, settings)
    step = model.forward

    @torch.no_grad()
    def run() -> Tensor:
        output = step(input_ids=token, past_key_values=cache).logits
        if not compiled:
            cache.crop(-1)
        return output

    exact = run()
    if compiled:
        empty = StaticCache(model.config, length + settings.rounds + 8)
        cache = random_cache(empty, model, length, settings)
        torch._dynamo.reset()  # after another length, the compiler would assume dynamic shapes
        step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    error = max(difference(run(), exact), decoding_error(model))
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    size = sum(x.numel() * x.element_size() for x in tensors) / 1e6
    return Variant(name, run, error, {"cache_megabytes": size})


def model_variants(
    make_run: Callable[[PreTrainedModel, Tensor], Run], length: int, settings: Namespace
) -> list[Variant]:
    """The vanilla model and one per form, each compared with itself decoding token by token.

    With roles, the forms are those of the local layers, and rotary attention is one of them.
    """
    forms = ["rotary", *FORMS] if settings.roles else [*FORMS]
    label = f"{settings.roles}, local" if settings.roles else "CoCA"
    models = {LLAMA: make_model(settings)}
    models |= {f"{label} {form}": make_model(settings, form) for form in forms}
    ids = random_tokens(length, settings)
    return [Variant(name, make_run(x, ids), decoding_error(x)) for name, x in models.items()]


def prefill(model: PreTrainedModel, ids: Tensor) -> Run:
    """One pass over a prompt, with the logits of its last token."""

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1)

    return run


def training_step(model: PreTrainedModel, ids: Tensor) -> Run:
    """Forward pass, backward pass and AdamW step."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


HEADS = ("heads", "kv_heads", "head_width")
MODEL = ("kv_heads", "head_width", "hidden_size", "layers")
ROLES = (*MODEL, "roles", "window")
FIGURE, TABLE = "As in the paper's Figure 6.", "Linear or quadratic in the length, as in Table 6."
STEP, PREFILL = partial(model_variants, training_step), partial(model_variants, prefill)
FORWARD, BACKWARD = (
    partial(operator_variants, forward_run),
    partial(operator_variants, backward_run),
)
CASES = {
    "operator": Case("Operator, forward", FORWARD, HEADS, FIGURE),
    "operator-training": Case("Operator, forward and backward", BACKWARD, HEADS),
    "operator-decode": Case("One query over a cache, attention alone", one_query_variants, HEADS),
    "memory": Case("Memory of the operator, forward", memory_variants, HEADS, TABLE),
    "prefill": Case("Prefill of a model", PREFILL, ROLES),
    "training": Case("Training step of a model", STEP, ROLES),
    "decode": Case("One token decoded, by cache length", partial(decoder_variants, False), MODEL),
    "decode-compiled": Case(
        "One token decoded with torch.compile, static caches",
        partial(decoder_variants, True),
        MODEL,
    ),
}
"""Cases by their names for ``--cases`` and in result files."""
