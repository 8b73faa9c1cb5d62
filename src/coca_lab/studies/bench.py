"""Time and memory of CoCA beside plain rotary attention: results are checked, then timed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coca_attention import ops
from coca_attention.errors import UserError, did_you_mean
from coca_attention.models import CoCALlamaConfig
from coca_attention.models.roles import Roles
from coca_attention.ops import FORMS, Rotation, coca_attention
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from coca_lab.studies.timing import IsolatedVariant, Variant, interleaved, peak_megabytes

CHECKED_QUERIES = 4
"""Number of queries compared with float64: the last ones, which see the whole text."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest error, relative to the largest exact value, of a variant that is timed."""
ROTARY, CONTRACTION, LLAMA = "RoPE + SDPA", "paper's contraction", "Llama"
COPY = "copy of as many bytes"
CUDA_BACKENDS = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass
class BenchSettings:
    """What is measured, and how."""

    cases: list[str] = field(default_factory=lambda: ["operator", "operator-training"])
    """Names of the cases, which are listed below."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    """Tokens in the text or, for decoding, in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device."""
    batch: PositiveInt = 1
    """Batch size."""
    heads: PositiveInt = 16
    """Query heads of the operator."""
    kv_heads: PositiveInt | None = None
    """Key/value heads; by default as many as query heads."""
    head_width: PositiveInt = 64
    """Width of a head."""
    hidden_size: PositiveInt = 512
    """Hidden size of the models; 12 layers of 512 have 50 million parameters."""
    layers: PositiveInt = 12
    """Layers of the models."""
    roles: str | None = None
    """Roles of the layers in training and prefill, as model.layers in a recipe (llg: two local
    layers and a global one, repeated); by default, CoCA in every layer."""
    window: PositiveInt | None = None
    """Tokens that a local layer sees; required with roles."""
    longest_contraction: int = 4096
    """Longest text for the paper's contraction, whose memory is quadratic in the length."""
    rounds: PositiveInt = 15
    """Maximum number of rounds; each round times every variant once."""
    seconds: float = 60.0
    """Time limit for each case and length; at least three rounds always run."""
    threads: PositiveInt | None = None
    """CPU threads; by default PyTorch decides."""


@dataclass(frozen=True)
class Case:
    """Something that can be computed in several ways, which are measured side by side.

    Attributes:
        title: Title of its section in the report.
        make: Returns the variants for a length in tokens; the first one is the baseline.
        text: Text below the title.
        sizes: Fields of `BenchSettings` to report with the results.
        measure: ``ratio`` times the variants and reports ratios to the baseline. For ``memory``,
            each variant's ``run`` returns megabytes (see `peak_megabytes`) and is called once.
    """

    title: str
    make: Callable[[int, BenchSettings], Sequence[Variant]]
    text: str = ""
    sizes: tuple[str, ...] = ("heads", "kv_heads", "head_width")
    measure: Literal["ratio", "memory"] = "ratio"


class Operator(NamedTuple):
    """A function of the tensors of `random_inputs`, and its score form (None: rotary scores)."""

    function: Callable[..., Tensor]
    form: str | None


def rotary_attention(query: Tensor, key: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Rotary attention as Transformers' Llama computes it: angles, rotation, SDPA."""
    length = query.shape[-2]
    theta = Rotation(query.shape[-1]).frequencies().to(query.device, torch.float32)
    angles = torch.arange(length, device=query.device, dtype=torch.float32)[:, None] * theta
    angles = torch.cat((angles, angles), dim=-1)[None]
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )


def coca(
    query: Tensor, key_coefficients: Tensor, value: Tensor, *, form: Any, **_: Tensor
) -> Tensor:
    """`coca_attention` as users call it."""
    return coca_attention(query, key_coefficients, value, form=form)


def contraction(query: Tensor, key_coefficients: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Slack scores contracted into a matrix (paper, Eq. 18), mask, softmax, times V.

    The order is the one opt_einsum chooses: q with its own rotation first, then with the keys.
    """
    length, width = query.shape[-2:]
    positions = torch.arange(length, device=query.device)
    cos, sin = Rotation(width).tables(positions, query.dtype)
    cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
    rotated, key = apply_rotary_pos_emb(
        query, torch.cat((key_coefficients, key_coefficients), dim=-1), cos[None], sin[None]
    )
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.einsum("bhqd,bhqd,bhkd->bhqk", query, rotated, key) / width**0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def random_inputs(length: int, settings: BenchSettings) -> dict[str, Tensor]:
    """q, k, t and V (B, H or G, T, D or D/2), with the strides that projections give them."""
    generator = torch.Generator(settings.device).manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        shape = (settings.batch, length, heads, width)
        drawn = torch.randn(shape, generator=generator, device=settings.device)
        return drawn.to(getattr(torch, settings.dtype)).transpose(1, 2)

    heads, width = settings.heads, settings.head_width
    kv_heads = settings.kv_heads or heads
    return {
        "query": draw(heads, width),
        "key": draw(kv_heads, width),
        "key_coefficients": draw(kv_heads, width // 2).relu(),
        "value": draw(kv_heads, width),
    }


def operators(length: int, settings: BenchSettings) -> dict[str, Operator]:
    """The operators compared at a length, by name."""
    found = {ROTARY: Operator(rotary_attention, None)}
    found |= {f"CoCA {form}": Operator(partial(coca, form=form), form) for form in FORMS}
    if length <= settings.longest_contraction:
        found[CONTRACTION] = Operator(contraction, "slack")
    return found


def relative_error(output: Tensor, tensors: dict[str, Tensor], form: str | None) -> float:
    """Largest error against the operator in float64, relative to the largest exact value.

    Args:
        output: (B, H, T, D); only the last queries of the first and last heads are compared.
        tensors: Those of `random_inputs`.
        form: The score form; None for rotary scores.
    """
    error = largest = 0.0
    heads, rows = output.shape[1], min(CHECKED_QUERIES, output.shape[-2])
    for head in {0, heads - 1}:
        kv_head = head * tensors["value"].shape[1] // heads
        # Where all pairs are free, the key itself has the place of the coefficients.
        key = tensors["key" if form is None else "key_coefficients"]
        query = tensors["query"][:1, head : head + 1, -rows:]
        key, value = (x[:1, kv_head : kv_head + 1] for x in (key, tensors["value"]))
        exact = coca_attention(
            *(x.cpu().double() for x in (query, key, value)), form=form or "strict"
        )
        ours = output[:1, head : head + 1, -rows:].cpu().double()
        error = max(error, (ours - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    return error / largest


def operator_variants(
    length: int,
    settings: BenchSettings,
    make_run: Callable[[Callable[..., Tensor], dict[str, Tensor]], Callable[[], None]],
) -> list[Variant]:
    """A variant per operator, with its error.

    Args:
        length: Tokens.
        settings: Sizes.
        make_run: From the operator's function and its tensors to what is timed.
    """
    tensors = random_inputs(length, settings)
    variants = []
    for name, (function, form) in operators(length, settings).items():
        with torch.inference_mode():
            error = relative_error(function(**tensors), tensors, form)
        variants.append(Variant(name, make_run(function, tensors), error))
    return variants


def forward_run(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """One call without gradients."""

    @torch.inference_mode()
    def run() -> None:
        function(**tensors)

    return run


def backward_run(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """One forward and backward pass."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def run() -> None:
        output = function(**leaves)
        gradient = torch.ones_like(output)
        # An operator reads either the keys or the key coefficients: the others have no gradient.
        torch.autograd.grad(output, list(leaves.values()), gradient, allow_unused=True)

    return run


def single_forward(name: str, length: int, settings: BenchSettings) -> Callable[[], None]:
    """One operator for the process that measures its memory, after a short run to warm up."""
    operators(64, settings)[name].function(**random_inputs(64, settings))
    return forward_run(operators(length, settings)[name].function, random_inputs(length, settings))


def memory_variants(length: int, settings: BenchSettings) -> list[Variant]:
    """A variant per operator."""
    return [
        Variant(
            name,
            partial(peak_megabytes, single_forward, name, length, settings, device=settings.device),
        )
        for name in operators(length, settings)
    ]


def one_query_variants(length: int, settings: BenchSettings) -> list[Variant]:
    """SDPA, every form, and a copy of as many bytes as keys and values have.

    No kernel that reads keys and values can be faster than the copy. On CUDA, each of PyTorch's
    kernels that supports these shapes is a variant as well.
    """
    tensors = {name: x.contiguous() for name, x in random_inputs(length, settings).items()}
    value, width = tensors["value"], settings.head_width
    cos, sin = ops.Rotation(width).tables(torch.arange(length, device=value.device))
    key = ops.apply_rotary(tensors["key"], cos, sin)
    query = ops.apply_rotary(tensors["query"], cos, sin)[..., -1:, :].contiguous()
    variants = []

    def add(name: str, run: Callable[[], Tensor], keys: Tensor, form: str | None) -> None:
        with torch.inference_mode():
            error = relative_error(run(), tensors, form)
        read = (keys.numel() + value.numel()) * value.element_size() / 1e6
        timed = torch.inference_mode()(run)
        variants.append(Variant(name, timed, error, {"cache_megabytes": read}))

    add(ROTARY, partial(sdpa, query, key, value), key, None)
    for name, backend in CUDA_BACKENDS.items() if settings.device == "cuda" else ():
        run = partial(sdpa, query, key, value, backend)
        try:
            run()
        except RuntimeError:
            continue  # the kernel does not support these shapes
        add(f"{ROTARY}, {name}", run, key, None)
    for form in ops.FORMS:
        run = half_attention(tensors["query"], tensors["key_coefficients"], value, cos, sin, form)
        add(f"half keys, CoCA {form}", run, tensors["key_coefficients"], form)
    target = torch.empty_like(value)
    copied = {"cache_megabytes": 2 * value.numel() * value.element_size() / 1e6}
    variants.append(Variant(COPY, lambda: target.copy_(value), None, copied))
    return variants


def sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """`scaled_dot_product_attention` with the given kernel, or with PyTorch's choice."""
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, enable_gqa=key.shape[1] != query.shape[1]
        )


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
    scale = width**-0.5 / divisor
    mapped = ops.query_map(
        query[..., -1:, :], cos[-1:], sin[-1:], form=form, scale=scale
    ).contiguous()
    return partial(ops.attend_half, mapped, t, value, frames, scale=divisor)


def make_model(
    settings: BenchSettings, form: str | None = None, kv_cache: str = "full", **fields: Any
) -> PreTrainedModel:
    """A Llama of the settings' sizes, vanilla or with a CoCA form, always with the same weights.

    Further fields are those of its `CoCALlamaConfig`.
    """
    heads = settings.hidden_size // settings.head_width
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 4 * settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.kv_heads or heads,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    config = (
        LlamaConfig(**sizes)
        if form is None
        else CoCALlamaConfig(**sizes, coca_form=form, kv_cache=kv_cache, **fields)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model.to(settings.device, getattr(torch, settings.dtype)).eval()


def decoding_error(model: PreTrainedModel) -> float:
    """Largest difference between logits decoded with a cache and those of a single pass."""
    window = getattr(model.config, "sliding_window", None) or 0
    ids = some_tokens(model, length=24 + 4 * window)
    return difference(decoded_logits(model, ids), logits(model, ids))


def random_tokens(length: int, settings: BenchSettings) -> Tensor:
    """Random token ids (batch, length)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 1024, (settings.batch, length), generator=generator)
    return ids.to(settings.device)


def random_cache(model: PreTrainedModel, length: int, settings: BenchSettings) -> DynamicCache:
    """A cache of random keys (or key coefficients) and values for so many tokens."""
    half = getattr(model.config, "kv_cache", "full") == "half"
    kv_heads, width = model.config.num_key_value_heads, settings.head_width
    cache = DynamicCache()
    generator = torch.Generator().manual_seed(2)
    for layer in range(settings.layers):
        shape = (settings.batch, kv_heads, length)
        keys = torch.randn(*shape, width // 2 if half else width, generator=generator)
        values = torch.randn(*shape, width, generator=generator)
        keys, values = (x.to(model.device, model.dtype) for x in (keys, values))
        cache.update(keys, values, layer)
    return cache


def cache_facts(cache: Cache) -> dict[str, float]:
    """Size of a cache's keys and values in MB (10^6 bytes)."""
    layers: Any = cache.layers
    tensors = [x for layer in layers for x in (layer.keys, layer.values)]
    return {"cache_megabytes": sum(x.numel() * x.element_size() for x in tensors) / 1e6}


def model_variants(
    settings: BenchSettings, make_run: Callable[[PreTrainedModel], Callable[[], Any]]
) -> list[Variant]:
    """The vanilla model and one per form, each compared with itself decoding token by token.

    With roles, the forms are those of the local layers, and rotary attention is one of them.
    """
    models = {LLAMA: make_model(settings)}
    if settings.roles is None:
        models |= {f"CoCA {form}": make_model(settings, form) for form in FORMS}
    else:
        for form in ("rotary", *FORMS):
            models[f"{settings.roles}, local {form}"] = make_model_with_roles(settings, form)
    return [Variant(name, make_run(x), decoding_error(x)) for name, x in models.items()]


def make_model_with_roles(settings: BenchSettings, local: str) -> PreTrainedModel:
    """A model with the recommended roles, whose local layers apply a form or ``rotary``."""
    assert settings.window is not None  # checked with roles
    fields = Roles(settings.roles or "llg", settings.window).fields(
        "rope" if local == "rotary" else local,
        num_layers=settings.layers,
        head_width=settings.head_width,
        length=8 * settings.window,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return make_model(settings, fields.pop("coca_form"), **fields)


def decoder_variants(
    make: Callable[[str, str | None, str, int, BenchSettings], Variant],
    length: int,
    settings: BenchSettings,
) -> list[Variant]:
    """The vanilla model, and the paper's forms with full and half cache.

    Other forms differ in the query map of one token alone.

    Args:
        make: Module-level function from a name, score form (None: vanilla), kind of cache, length
            and settings to a variant. On a CPU it is called in a process of its own.
        length: Tokens in the cache.
        settings: Sizes.
    """
    isolate = make if settings.device == "cuda" else partial(IsolatedVariant, make)
    return [isolate(LLAMA, None, "full", length, settings)] + [
        isolate(f"CoCA {form}, {kind} cache", form, kind, length, settings)
        for form in ("slack", "strict")
        for kind in ("full", "half")
    ]


def decoder(
    name: str, form: str | None, kv_cache: str, length: int, settings: BenchSettings
) -> Variant:
    """Every run decodes the same token and removes it from the cache."""
    model = make_model(settings, form, kv_cache)
    cache = random_cache(model, length, settings)
    token = random_tokens(1, settings)

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=token, past_key_values=cache)
        cache.crop(-1)

    return Variant(name, run, decoding_error(model), cache_facts(cache))


def compiled_variants(length: int, settings: BenchSettings) -> list[Variant]:
    """Each decoder, compiled."""
    torch._dynamo.reset()  # after another length, the compiler would assume dynamic shapes
    return decoder_variants(compiled_decoder, length, settings)


def compiled_decoder(
    name: str, form: str | None, kv_cache: str, length: int, settings: BenchSettings
) -> Variant:
    """A compiled model, compared with itself without compilation."""
    model = make_model(settings, form, kv_cache)
    filled = random_cache(model, length, settings)
    cache = StaticCache(config=model.config, max_cache_len=length + settings.rounds + 8)
    layers: Any = filled.layers
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
    token = random_tokens(1, settings)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def run() -> Tensor:
        return step(input_ids=token, past_key_values=cache).logits

    with torch.no_grad():
        exact = model(input_ids=token, past_key_values=filled).logits
    error = max(difference(run(), exact), decoding_error(model))
    run()
    return Variant(name, run, error, cache_facts(cache))


def prefill_variants(length: int, settings: BenchSettings) -> list[Variant]:
    """One pass of each model over a prompt, with the logits of its last token."""
    ids = random_tokens(length, settings)

    def prefill(model: PreTrainedModel) -> Callable[[], None]:
        @torch.inference_mode()
        def run() -> None:
            model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1)

        return run

    return model_variants(settings, prefill)


def training_variants(length: int, settings: BenchSettings) -> list[Variant]:
    """Forward pass, backward pass and AdamW step of each model."""
    ids = random_tokens(length, settings)

    def training_step(model: PreTrainedModel) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

        def run() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    return model_variants(settings, training_step)


MODEL_SIZES = ("kv_heads", "head_width", "hidden_size", "layers")
ROLES = ("roles", "window")
CASES = {
    "decode": Case(
        "One token decoded, by the length of the cache",
        partial(decoder_variants, decoder),
        sizes=MODEL_SIZES,
    ),
    "decode-compiled": Case(
        "One token decoded with torch.compile, static caches", compiled_variants, sizes=MODEL_SIZES
    ),
    "memory": Case(
        "Memory of the operator, forward",
        memory_variants,
        "Linear or quadratic in the length, as in the paper's Table 6.",
        measure="memory",
    ),
    "operator": Case(
        "Operator, forward",
        partial(operator_variants, make_run=forward_run),
        "As in the paper's Figure 6.",
    ),
    "operator-decode": Case("One query over a cache, attention alone", one_query_variants),
    "operator-training": Case(
        "Operator, forward and backward", partial(operator_variants, make_run=backward_run)
    ),
    "prefill": Case("Prefill of a model", prefill_variants, sizes=(*MODEL_SIZES, *ROLES)),
    "training": Case("Training step of a model", training_variants, sizes=(*MODEL_SIZES, *ROLES)),
}
"""Cases by their names for ``--cases`` and in result files."""


def check_settings(settings: BenchSettings) -> None:
    """Raise UserError unless all cases are known and all numbers in range."""
    unknown = [name for name in settings.cases if name not in CASES]
    if unknown or not settings.cases:
        hint = f"; choose from {', '.join(CASES)}"
        raise UserError(f"unknown cases {unknown}{did_you_mean((*unknown, '')[0], CASES, hint)}")
    if not settings.lengths or min(settings.lengths) < CHECKED_QUERIES:
        raise UserError(f"lengths must be at least {CHECKED_QUERIES}, got {settings.lengths}")
    if settings.head_width % 2 or settings.hidden_size % settings.head_width:
        raise UserError(
            f"head_width must be even and divide hidden_size, got {settings.head_width} and "
            f"{settings.hidden_size}"
        )
    if settings.roles and (set(settings.roles) - {"l", "g"} or settings.window is None):
        raise UserError(
            "roles must consist of the letters l and g, and requires a window; got roles "
            f"{settings.roles!r} and window {settings.window}"
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")


def run_benchmarks(
    settings: BenchSettings, *, progress: Callable[[str, int, int], Any] | None = None
) -> list[dict[str, Any]]:
    """Measure every case at every length.

    Args:
        settings: What is measured.
        progress: Called with a label, the number of finished measurements, and their total.

    Returns:
        One cell per case and length, with the title, text and measure of its case. For each
        variant, ``ratio`` cells hold times in ms, ratios to the first variant, the error and, where
        a cache is read, its size in MB; ``memory`` cells hold the peak memory in MB.

    Raises:
        UserError: If a setting is out of range, or a variant differs from the exact result.
    """
    check_settings(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    jobs = [(name, length) for name in settings.cases for length in settings.lengths]
    cells = []
    for number, (name, length) in enumerate(jobs):
        case = CASES[name]
        if progress is not None:
            progress(f"{name} {length}", number, len(jobs))
        cells.append(
            {
                "task": "bench",
                "case": name,
                "title": case.title,
                "text": case.text,
                "measure": case.measure,
                "length": length,
                "dtype": settings.dtype,
                "device": settings.device,
                "batch": settings.batch,
                "sizes": {size: getattr(settings, size) for size in case.sizes},
                "variants": _measure(name, length, settings),
            }
        )
    if progress is not None:
        progress("done", len(jobs), len(jobs))
    return cells


def _measure(name: str, length: int, settings: BenchSettings) -> dict[str, Any]:
    case = CASES[name]
    variants = case.make(length, settings)
    try:
        for variant in variants:
            if variant.error is not None and not variant.error <= TOLERANCES[settings.dtype]:
                raise UserError(
                    f"{name} at {length} tokens: {variant.name} is off by "
                    f"{variant.error:.2g}, relative to the largest exact value (allowed: "
                    f"{TOLERANCES[settings.dtype]:g}); wrong results are not timed"
                )
        if case.measure == "memory":
            return {variant.name: {"peak_megabytes": variant.run()} for variant in variants}
        device = torch.device(settings.device)
        times = interleaved(variants, device, rounds=settings.rounds, seconds=settings.seconds)
        return {v.name: times[v.name] | {"error": v.error, **v.facts} for v in variants}
    finally:
        for variant in variants:
            variant.close()
