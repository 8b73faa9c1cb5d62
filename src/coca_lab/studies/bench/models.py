"""Llama models with rotary attention and with CoCA, and what cases that time models share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel

from coca_attention.models import CoCALlamaConfig
from coca_attention.models.roles import Roles
from coca_attention.ops import FORMS
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from coca_lab.studies.bench.settings import BenchSettings
from coca_lab.studies.bench.timing import IsolatedVariant, Variant

VANILLA = "Llama"
# Settings that the results of a model report.
MODEL_SIZES = ("kv_heads", "head_width", "hidden_size", "layers")
ROLES = ("roles", "window")
# A small Llama, for runs on a GPU.
gpu_run = partial(BenchSettings, hidden_size=1024, layers=16, head_width=64)


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
    models = {VANILLA: make_model(settings)}
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
    return [isolate(VANILLA, None, "full", length, settings)] + [
        isolate(f"CoCA {form}, {kind} cache", form, kind, length, settings)
        for form in ("slack", "strict")
        for kind in ("full", "half")
    ]
