"""The table of cases: what is computed in several ways, which are measured side by side.

B batch, T length, H query heads, G key/value heads, D head width.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.timing import Variant, isolated, peak_megabytes
from coca_attention import ops
from coca_attention.models import CoCALlamaConfig
from coca_attention.models.attention import CACHE
from coca_attention.models.configuration import LETTERS, LOCAL, role_fields
from coca_attention.models.fused import use_fused_attention
from coca_attention.ops import FORMS, DistanceMap, Rotation, coca_attention
from coca_attention.roles import Roles
from coca_attention.testing import decoded_logits, difference, logits, some_tokens

Run = Callable[[], Any]
Tensors = dict[str, Tensor]
VOCABULARY = 1024
LLAMA, COPY, GRANITE = "Llama", "copy of as many bytes", "GraniteSWA"
ROTARY, CONTRACTION = "RoPE + SDPA", "paper's contraction"
CHECKED = 4
"""Number of queries compared with float64: the last ones, which see the whole text."""


class Case(NamedTuple):
    """Something that can be computed in several ways: a table of its own."""

    title: str
    make: Callable[[int, Namespace], Sequence[Variant]]
    """The variants for a length in tokens, the baseline first; those of ``memory`` run once."""
    sizes: tuple[str, ...]
    """Settings to report with the results."""
    text: str = ""


class Operator(NamedTuple):
    """A function of `random_inputs`, and the options of `coca_attention` that compute the same."""

    run: Callable[..., Tensor]
    options: dict[str, Any]


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


def coca(query: Tensor, value: Tensor, *, form: str, rotation: Any = None, **keys: Tensor):
    """`coca_attention` as users call it; of the form rope, with keys whose pairs are all free."""
    key = keys["key" if form == "rope" else "key_coefficients"]
    form = "strict" if form == "rope" else form  # which does not matter without collinear pairs
    return coca_attention(query, key, value, form=form, rotation=rotation)


def contraction(query: Tensor, key_coefficients: Tensor, value: Tensor, **_: Tensor) -> Tensor:
    """Slack scores contracted into a matrix (paper, Eq. 18), mask, softmax, times V."""
    # The order is the one opt_einsum chooses: q with its own rotation first, then with the keys.
    length, width = query.shape[-2:]
    positions = torch.arange(length, device=query.device)
    cos, sin = Rotation(width).tables(positions, query.dtype)
    cos, sin = (torch.cat((x, x), dim=-1)[None] for x in (cos, sin))
    key = torch.cat((key_coefficients, key_coefficients), dim=-1)
    rotated, key = apply_rotary_pos_emb(query, key, cos, sin)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.einsum("bhqd,bhqd,bhkd->bhqk", query, rotated, key) / width**0.5
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


def operators(length: int, settings: Namespace) -> dict[str, Operator]:
    """Rotary attention, every form, and the paper's contraction where it fits into memory."""
    compared = {ROTARY: Operator(rotary_attention, {"form": "rope"})}
    compared |= {f"CoCA {x}": Operator(partial(coca, form=x), {"form": x}) for x in FORMS}
    if length <= settings.longest_contraction:
        compared[CONTRACTION] = Operator(contraction, {"form": "slack"})
    return compared


def limits(length: int, settings: Namespace) -> dict[str, Operator]:
    """Rotary attention, and with maps of distances from two thirds and a quarter of the text on."""
    compared = {ROTARY: Operator(rotary_attention, {"form": "rope"})}
    for name, near in (("2/3", 2 * length // 3), ("1/4", length // 4)):
        for kind, distance_map in maps_from(near).items():
            rotation = Rotation(settings.head_width, distance_map=distance_map)
            options = {"form": "rope", "rotation": rotation}
            title = f"{kind}, near = {name} of the text"
            compared[title] = Operator(partial(coca, **options), options)
    return compared


def maps_from(near: int) -> dict[str, DistanceMap]:
    """Limited, leaky and shifted distances for keys from so many tokens back on."""
    return {
        "limited": DistanceMap.limited(near),
        "leaky": DistanceMap.leaky(near, 0.25),
        "shifted": DistanceMap.shifted(near, near // 8),
    }


def random_inputs(length: int, settings: Namespace) -> Tensors:
    """q, k, t and V (B, H or G, T, D or D/2), with the strides that projections give them."""
    generator = torch.Generator(settings.device).manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        shape = (settings.batch, length, heads, width)
        drawn = torch.randn(shape, generator=generator, device=settings.device)
        return drawn.to(getattr(torch, settings.dtype)).transpose(1, 2)

    kv_heads, width = settings.kv_heads or settings.heads, settings.head_width
    return {
        "query": draw(settings.heads, width),
        "key": draw(kv_heads, width),
        "key_coefficients": draw(kv_heads, width // 2).relu(),
        "value": draw(kv_heads, width),
    }


def error_of(output: Tensor, tensors: Tensors, form: str, rotation: Any = None) -> float:
    """Largest error against the operator in float64, relative to the largest exact value.

    Of ``output`` (B, H, T, D), the last queries of the last key head's query heads are compared.
    """
    group, rows = output.shape[1] // tensors["value"].shape[1], min(CHECKED, output.shape[-2])
    key, value = tensors["key" if form == "rope" else "key_coefficients"], tensors["value"]
    compared = tensors["query"][-1:, -group:, -rows:], key[-1:, -1:], value[-1:, -1:]
    form = "strict" if form == "rope" else form
    exact = coca_attention(*(x.cpu().double() for x in compared), form=form, rotation=rotation)
    return difference(output[-1:, -group:, -rows:].cpu().double(), exact)


def operator_variants(
    make: Callable[[int, Namespace], dict[str, Operator]],
    make_run: Callable[[Callable[..., Tensor], Tensors], Run],
    length: int,
    settings: Namespace,
) -> list[Variant]:
    """A variant per operator; ``make_run`` turns its function and tensors into what is timed."""
    tensors, variants = random_inputs(length, settings), []
    for name, (function, options) in make(length, settings).items():
        with torch.inference_mode():
            error = error_of(function(**tensors), tensors, **options)
        variants.append(Variant(name, make_run(function, tensors), error))
    return variants


def forward_run(function: Callable[..., Tensor], tensors: Tensors) -> Run:
    """One call without gradients."""
    return torch.inference_mode()(partial(function, **tensors))


def backward_run(function: Callable[..., Tensor], tensors: Tensors) -> Run:
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
    names = operators(length, settings)
    return [Variant(name, partial(peak, name, length, settings)) for name in names]


def single_forward(name: str, length: int, settings: Namespace) -> Run:
    """One operator for the process that measures its memory, after a short run to warm up."""
    function = operators(length, settings)[name].run
    function(**random_inputs(64, settings))
    return forward_run(function, random_inputs(length, settings))


def one_query_variants(length: int, settings: Namespace) -> list[Variant]:
    """SDPA, every form, and a copy of as many bytes, than which none of them can be faster."""
    tensors = {name: x.contiguous() for name, x in random_inputs(length, settings).items()}
    value, t = tensors["value"], tensors["key_coefficients"]
    cos, sin = Rotation(settings.head_width).tables(torch.arange(length, device=value.device))
    key = ops.apply_rotary(tensors["key"], cos, sin)
    query = ops.apply_rotary(tensors["query"], cos, sin)[..., -1:, :].contiguous()
    grouped = query.shape[1] != key.shape[1]
    sdpa = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=grouped)
    half = partial(half_attention, tensors["query"], t, value, cos, sin)
    target, variants = torch.empty_like(value), []
    compared = [(ROTARY, sdpa, key, "rope")]
    compared += [(f"half keys, CoCA {form}", half(form), t, form) for form in FORMS]
    for name, run, keys, form in [*compared, (COPY, partial(target.copy_, value), value, COPY)]:
        run = torch.inference_mode()(run)
        error = None if form == COPY else error_of(run(), tensors, form=form)
        read = (keys.numel() + value.numel()) * value.element_size() / 1e6
        variants.append(Variant(name, run, error, {"cache_megabytes": read}))
    return variants


def half_attention(
    query: Tensor, t: Tensor, value: Tensor, cos: Tensor, sin: Tensor, form: Any
) -> Callable[[], Tensor]:
    """Attention of the last query over key coefficients, without forming keys."""
    width, divisor = query.shape[-1], ops.score_scale(query.dtype)
    first = torch.zeros(1, dtype=torch.long, device=query.device)
    tile = ops.tile_length(t, query.shape[1])
    frames = ops.key_frames(first, t.shape[-2], Rotation(width), tile=tile, pairs=width // 2)
    scale, last = width**-0.5 / divisor, query[..., -1:, :]
    mapped = ops.query_map(last, cos[-1:], sin[-1:], form=form, scale=scale).contiguous()
    return partial(ops.attend_half, mapped, t, value, frames, scale=divisor)


def make_model(
    settings: Namespace,
    form: str | None = None,
    kv_cache: str = "full",
    distance_map: DistanceMap | None = None,
) -> PreTrainedModel:
    """A Llama: vanilla or of a form (with roles, of local layers); or the GraniteSWA of roles."""
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
    if form == GRANITE:
        kinds = [LETTERS[x] for x in (settings.roles * settings.layers)[: settings.layers]]
        fields |= {
            "head_dim": settings.head_width,
            "attention_multiplier": settings.head_width**-0.5,
            "sliding_window": settings.window,
            "layer_types": kinds,
            "layer_rope_theta": [1e4 if kind == LOCAL else 0 for kind in kinds],
        }
    elif form is not None and settings.roles:
        roles = Roles(settings.roles, settings.window, decay=settings.decay)
        fields |= role_fields(roles, form, LlamaConfig(**fields), 8 * settings.window)
    elif form is not None:
        fields |= {"coca_form": form, "kv_cache": kv_cache}
        if distance_map is not None:
            fields["rope_parameters"] = {
                "rope_type": "default", "rope_theta": 1e4, "distance_map": asdict(distance_map)
            }  # fmt: skip
    config: Any = LlamaConfig if form is None else CoCALlamaConfig
    if form == GRANITE:
        config = partial(AutoConfig.for_model, "granite_swa")
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config(**fields))
    return use_fused_attention(model).to(settings.device, getattr(torch, settings.dtype)).eval()


def decoding_error(model: PreTrainedModel) -> float:
    """Largest difference between logits decoded with a cache and those of a single pass."""
    window = getattr(model.config, "sliding_window", None) or 0
    ids = some_tokens(model, length=24 + window)
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
    generator = torch.Generator(model.device).manual_seed(2)
    options: Any = {"generator": generator, "dtype": model.dtype, "device": model.device}
    for layer in range(settings.layers):
        cache.update(*(torch.randn(*shape, width, **options) for width in widths), layer)
    return cache


def decoder_variants(compiled: bool, length: int, settings: Namespace) -> list[Variant]:
    """The vanilla model, and the paper's forms (others map one query alone) with both caches."""
    kinds = {LLAMA: (None, "full")} | {
        f"CoCA {form}, {kind} cache": (form, kind)
        for form in ("slack", "strict")
        for kind in ("full", "half")
    }
    make = partial(isolated, decoder) if settings.device == "cpu" else decoder
    return [make(name, *kind, length, settings, compiled) for name, kind in kinds.items()]


def limited_decoder_variants(length: int, settings: Namespace) -> list[Variant]:
    """The vanilla model, and with maps of distances from a quarter of the text on."""
    make = partial(isolated, decoder) if settings.device == "cpu" else decoder
    variants = [make(LLAMA, None, "full", length, settings, False)]
    for name, distance_map in maps_from(length // 4).items():
        variants.append(make(name, "rope", "full", length, settings, False, distance_map))
    return variants


def decoder(
    name: str,
    form: str | None,
    kind: str,
    length: int,
    settings: Namespace,
    compiled: bool,
    distance_map: DistanceMap | None = None,
) -> Variant:
    """A model that decodes the same token in every run, and removes it from the cache."""
    # A compiled model, which is compared with itself without compilation, has a static cache, which
    # grows by a token in every run.
    model = make_model(settings, form, kind, distance_map)
    token = random_tokens(1, settings)
    cache = random_cache(DynamicCache(), model, length, settings)
    step = model.forward

    @torch.no_grad()
    def run() -> Tensor:
        output = step(input_ids=token, **{CACHE: cache}).logits
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
    if distance_map is not None:  # also where some of the few keys of the check are far
        short = make_model(settings, form, kind, replace(distance_map, near=8))
        error = max(error, decoding_error(short))
    layers = cache.layers[: model.config.num_hidden_layers]  # positions may come after them
    tensors = [x for layer in layers for x in (layer.keys, layer.values)]
    size = sum(x.numel() * x.element_size() for x in tensors) / 1e6
    return Variant(name, run, error, {"cache_megabytes": size})


def model_variants(
    make_run: Callable[[PreTrainedModel, Tensor], Run], length: int, settings: Namespace
) -> list[Variant]:
    """The vanilla model and one per form, of roles for local layers, checked by decoding."""
    label, forms = "CoCA", {form: form for form in FORMS}
    if settings.roles:
        label = f"{settings.roles}, local"
        forms = {"rotary": "rope"} | forms
    models = {LLAMA: make_model(settings)}
    models |= {f"{label} {name}": make_model(settings, form) for name, form in forms.items()}
    if settings.roles:
        models[f"{settings.roles}, {GRANITE}"] = make_model(settings, GRANITE)
    ids = random_tokens(length, settings)
    variants = [Variant(name, make_run(x, ids), decoding_error(x)) for name, x in models.items()]
    if not settings.flex:
        return variants
    # FlexAttention is compiled for every kind of layer, model and mode.
    torch._dynamo.config.recompile_limit = 64
    for form in ("rope", GRANITE):
        model = make_model(settings, form)
        exact = logits(model, ids)
        model.set_attn_implementation("flex_attention")
        error = difference(logits(model, ids), exact)
        name = f"{label} rotary" if form == "rope" else f"{settings.roles}, {form}"
        variants.append(Variant(f"{name}, FlexAttention", make_run(model, ids), error))
    return variants


def prefill(model: PreTrainedModel, ids: Tensor) -> Run:
    """One pass over a prompt, with the logits of its last token."""
    return torch.inference_mode()(
        lambda: model(input_ids=ids, logits_to_keep=1, **{CACHE: DynamicCache()})
    )


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
_operators = partial(partial, operator_variants)
CASES = {
    "operator": Case("Operator, forward", _operators(operators, forward_run), HEADS, FIGURE),
    "operator-training": Case(
        "Operator, forward and backward", _operators(operators, backward_run), HEADS
    ),
    "limits": Case("Limited distances, forward", _operators(limits, forward_run), HEADS),
    "limits-training": Case(
        "Limited distances, forward and backward", _operators(limits, backward_run), HEADS
    ),
    "limits-decode": Case(
        "One token decoded with limited distances", limited_decoder_variants, MODEL
    ),
    "operator-decode": Case("One query over a cache, attention alone", one_query_variants, HEADS),
    "memory": Case("Memory of the operator, forward", memory_variants, HEADS, TABLE),
    "prefill": Case("Prefill of a model", partial(model_variants, prefill), ROLES),
    "training": Case("Training step of a model", partial(model_variants, training_step), ROLES),
    "decode": Case("One token decoded, by cache length", partial(decoder_variants, False), MODEL),
    "decode-compiled": Case(
        "One token decoded with torch.compile, static caches",
        partial(decoder_variants, True),
        MODEL,
    ),
}
"""Cases by their names for ``--cases`` and in result files."""
