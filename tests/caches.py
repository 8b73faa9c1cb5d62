"""The pieces of attention, and the caches that each is tested with."""

from transformers import DynamicCache, QuantizedCache, StaticCache

from coca_attention import convert
from coca_attention.models.configuration import GLOBAL, LOCAL
from families import vanilla

# Name in the table: form, settings of `convert`, additions to the rotary parameters.
PIECES = {
    "slack": ("slack", {}, {}),
    "strict": ("strict", {}, {}),
    "magnitude": ("magnitude", {}, {}),
    "free pairs": ("slack", {"free_pairs": 2}, {}),
    "all pairs free": ("strict", {"free_pairs": 4}, {}),
    "pairs that do not turn": ("strict", {}, {"turning_pairs": 1}),
    "temperature": ("slack", {}, {"temperature": 16}),
    "decay": ("strict", {}, {"decay": 1.5, "decay_length": 4.0}),
    "max_distance": ("strict", {"max_distance": 11}, {}),
    "roles": (
        "slack",
        {"free_pairs": {LOCAL: 0, GLOBAL: 4}},
        {"turning_pairs": 0, "temperature": 16, "decay": 1.5, "decay_length": 4.0},
    ),
}
CACHES = ["growing", "sliding", "static", "offloaded", "quantised"]
KINDS = ["full", "half"]
CELLS = [(piece, cache, kind) for piece in PIECES for cache in CACHES for kind in KINDS]


def refusal(piece: str, cache: str, kind: str) -> str | None:
    """A part of the error where a combination does not work."""
    if cache == "quantised" and piece == "roles":
        return "only full attention layers"
    return None


def model_with(piece: str, cache: str, kind: str):
    """A model of two layers, in float64: a local and a global one where the cache allows it."""
    form, settings, rotary = PIECES[piece]
    local = cache != "quantised" or piece == "roles"
    model = vanilla("Qwen2", **({} if local else {"layer_types": None, "use_sliding_window": None}))
    model.config.rope_parameters |= rotary
    return convert(model, form, kv_cache=kind, **settings).double().eval()


def make_cache(name: str, model, length: int):
    """An empty cache for a text of so many tokens."""
    config = model.config
    if name == "growing":
        return DynamicCache()
    if name == "sliding":
        return DynamicCache(config=config)
    if name == "static":
        return StaticCache(config=config, max_cache_len=length + 3)
    if name == "offloaded":
        return DynamicCache(config=config, offloading=True)
    return QuantizedCache("fp8", config)
