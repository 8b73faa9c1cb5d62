"""A Llama body with rotary attention and the same one with CoCA: training, prefill, decoding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from coca_attention.benchmarks.timing import Apart, Variant
from coca_attention.models import CoCALlamaConfig
from coca_attention.ops import FORMS
from coca_attention.testing import decoded_logits, difference, logits, some_tokens

VANILLA = "Llama"


def make_model(settings: Any, form: str | None = None, kv_cache: str = "full") -> Any:
    """A Llama of the settings' sizes, vanilla or with a CoCA form, always the same weights."""
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 4 * settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.hidden_size // settings.head_width,
        "num_key_value_heads": settings.groups or settings.hidden_size // settings.head_width,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    config = (
        LlamaConfig(**sizes)
        if form is None
        else CoCALlamaConfig(**sizes, coca_form=form, kv_cache=kv_cache)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model.to(settings.device, getattr(torch, settings.dtype)).eval()


def variants_of(settings: Any) -> dict[str, Any]:
    """The vanilla model and one of every form."""
    return {VANILLA: make_model(settings)} | {
        f"CoCA {form}": make_model(settings, form) for form in FORMS
    }


def consistency(model: Any) -> float:
    """Largest difference between logits decoded one by one and those of one whole pass."""
    ids = some_tokens(model)
    return difference(decoded_logits(model, ids), logits(model, ids))


def tokens(length: int, settings: Any) -> Tensor:
    """Random token ids (batch, length)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 1024, (settings.batch, length), generator=generator)
    return ids.to(settings.device)


def training(length: int, settings: Any) -> list[Variant]:
    """One optimizer step: forward, backward, AdamW."""
    ids = tokens(length, settings)

    def step(model: Any) -> Callable[[], Any]:
        wrong.append(consistency(model))
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

        def run() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    wrong: list[float] = []
    return [Variant(name, step(model), wrong[-1]) for name, model in variants_of(settings).items()]


def prefill(length: int, settings: Any) -> list[Variant]:
    """Read a prompt into a cache, the last token's logits alone."""
    ids = tokens(length, settings)

    def read(model: Any) -> Callable[[], Any]:
        @torch.inference_mode()
        def run() -> None:
            model(input_ids=ids, past_key_values=DynamicCache(), logits_to_keep=1)

        return run

    return [
        Variant(name, read(model), consistency(model))
        for name, model in variants_of(settings).items()
    ]


DECODED: dict[str, tuple[str | None, str]] = {
    VANILLA: (None, "full"),
    "CoCA slack, full cache": ("slack", "full"),
    "CoCA slack, half cache": ("slack", "half"),
    "CoCA strict, full cache": ("strict", "full"),
    "CoCA strict, half cache": ("strict", "half"),
}


def decode(length: int, settings: Any) -> list[Variant]:
    """One token over a cache of so many: vanilla, and CoCA with whole and with half keys."""
    return _decoded(decoder, length, settings)


def decode_compiled(length: int, settings: Any) -> list[Variant]:
    """Like `decode`, with torch.compile and caches that do not grow (`StaticCache`)."""
    torch._dynamo.reset()  # of another length it would compile sizes that vary
    return _decoded(compiled_decoder, length, settings)


def _decoded(make: Callable[..., Variant], length: int, settings: Any) -> list[Variant]:
    if settings.device == "cuda":
        return [make(name, length, settings) for name in DECODED]
    variants = []
    for name in DECODED:
        apart = Apart(make, name, length, settings)
        variants.append(Variant(name, apart, apart.error, apart.facts, apart.close))
    return variants


def decoder(name: str, length: int, settings: Any) -> Variant:
    """One of `DECODED`."""
    model = make_model(settings, *DECODED[name])
    cache = filled(model, length, settings)
    facts = {"cache_megabytes": cache_megabytes(cache)}
    return Variant(name, _step(model, cache, settings), consistency(model), facts)


def compiled_decoder(name: str, length: int, settings: Any) -> Variant:
    """One of `DECODED`, compiled, with room for all rounds; compared with itself not compiled."""
    model = make_model(settings, *DECODED[name])
    start = filled(model, length, settings)
    cache = StaticCache(config=model.config, max_cache_len=length + settings.rounds + 8)
    layers: Any = start.layers
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
    token, step = tokens(1, settings), torch.compile(model.forward, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def run() -> Tensor:
        return step(input_ids=token, past_key_values=cache).logits

    with torch.no_grad():
        exact = model(input_ids=token, past_key_values=start).logits
    wrong = max(difference(run(), exact), consistency(model))
    run()
    return Variant(name, run, wrong, {"cache_megabytes": cache_megabytes(cache)})


def filled(model: Any, length: int, settings: Any) -> DynamicCache:
    """A cache of random keys (or coefficients) and values, as a text of that length leaves it."""
    half = getattr(model.config, "kv_cache", "full") == "half"
    cache = DynamicCache()
    generator = torch.Generator().manual_seed(2)
    groups, width = model.config.num_key_value_heads, settings.head_width
    for layer in range(settings.layers):
        shape = (settings.batch, groups, length)
        keys = torch.randn(*shape, width // 2 if half else width, generator=generator)
        values = torch.randn(*shape, width, generator=generator)
        keys, values = (x.to(model.device, model.dtype) for x in (keys, values))
        cache.update(keys, values, layer)
    return cache


def cache_megabytes(cache: Any) -> float:
    """Size of a cache's keys and values in MB (10^6 bytes)."""
    held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.numel() * x.element_size() for x in held) / 1e6


def _step(model: Any, cache: Any, settings: Any) -> Callable[[], Any]:
    token = tokens(1, settings)

    @torch.inference_mode()
    def run() -> None:
        model(input_ids=token, past_key_values=cache)
        cache.crop(-1)

    return run
