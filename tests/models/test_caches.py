"""Every piece of attention with every cache, whole and half."""

from dataclasses import asdict
from unittest.mock import MagicMock

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from coca_attention import convert
from coca_attention.models.configuration import GLOBAL, LOCAL
from coca_attention.models.layer_pass import halve_static_keys
from coca_attention.ops import DistanceMap
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from covering import mostly_slow, pairs_slow
from families import VARIED, WINDOWED, assert_reads_the_same, vanilla

ROUND_OFF = 1e-12  # float64, relative to the largest logit
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
    "limited": ("strict", {"near": 11}, {}),
    "leaky": ("strict", {"near": 11}, {"distance_map": asdict(DistanceMap.leaky(11, 0.3))}),
    "shifted": ("strict", {"near": 11}, {"distance_map": asdict(DistanceMap.shifted(11, 4))}),
    "grouped": ("strict", {"near": 11}, {"distance_map": asdict(DistanceMap.grouped(11, 3))}),
    "roles": (
        "slack",
        {"free_pairs": {LOCAL: 0, GLOBAL: 4}},
        {"turning_pairs": 0, "temperature": 16, "decay": 1.5, "decay_length": 4.0},
    ),
}
CACHES = {
    "growing": lambda config, length: DynamicCache(),
    "sliding": lambda config, length: DynamicCache(config=config),
    "static": lambda config, length: StaticCache(config=config, max_cache_len=length + 3),
    "offloaded": lambda config, length: DynamicCache(config=config, offloading=True),
    "quantised": lambda config, length: QuantizedCache("fp8", config),
}
KINDS = ["full", "half"]
# Pieces of layers in every kind of family, the others in one each.
FAMILIES = [(piece, family) for piece in ("limited", "shifted", "roles") for family in VARIED]
ONCE = [(piece, VARIED[i % 4]) for i, piece in enumerate(PIECES)]
FAMILIES += ONCE[:-2]


def model_with(piece: str, cache: str, kind: str, family: str = "Qwen2"):
    """A model of two layers, in float64: a local and a global one where the cache allows it."""
    form, settings, rotary = PIECES[piece]
    changes = {}
    if piece == "roles":
        changes = {"layer_types": WINDOWED, "sliding_window": 8}
    elif cache == "quantised":
        changes = {"layer_types": None, "use_sliding_window": None}
    model = convert(vanilla(family, **changes), form, kv_cache=kind, **settings)
    model.config.rope_parameters |= rotary
    return model.double().eval()


@pytest.mark.parametrize(("piece", "cache", "kind"), pairs_slow(PIECES, CACHES, KINDS))
def test_cell(piece, cache, kind, monkeypatch):
    """Read in pieces, the logits are those of one pass; or an error says what to do."""
    model = model_with(piece, cache, kind)
    ids = some_tokens(model)
    if (piece, cache) == ("roles", "quantised"):
        with pytest.raises(ValueError, match="only full attention layers"):
            CACHES[cache](model.config, ids.shape[1])
        return
    if cache == "offloaded" and not torch.cuda.is_available():
        # Offloading copies layers in a stream of the GPU; here the copies happen at once.
        stream = MagicMock()
        monkeypatch.setattr(torch, "Stream", lambda *_: stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: stream)
    made = CACHES[cache](model.config, ids.shape[1])
    error = difference(decoded_logits(model, ids, made), logits(model, ids))
    if cache == "quantised":
        # Rounding to 8 bits costs what it costs a model without CoCA, about 0.04 of a logit.
        rotary = vanilla("Qwen2", layer_types=None, use_sliding_window=None).double()
        made = CACHES[cache](rotary.config, ids.shape[1])
        cost = difference(decoded_logits(rotary, ids, made), logits(rotary, ids))
        assert 1e-3 < error < 2.5 * cost
        return
    assert error < ROUND_OFF
    if cache in ("growing", "sliding"):
        kept, width = made.layers[0].keys.shape[-2:]
        assert kept == (7 if cache == "sliding" else ids.shape[1])
        assert (width == 8) is (kind == "full" or piece == "all pairs free")


@pytest.mark.parametrize(("piece", "family"), mostly_slow(FAMILIES, ONCE))
def test_every_way_of_reading_gives_the_same(piece, family):
    """One pass, caches, padding and generation, with fused and eager attention; and it matters."""
    kind, form = KINDS[FAMILIES.index((piece, family)) // 2 % 2], PIECES[piece][0]
    model = model_with(piece, "sliding", kind, family)
    ids = some_tokens(model, length=40)
    assert_reads_the_same(model, ids)
    found = logits(model, ids)
    model.set_attn_implementation("eager")
    assert difference(logits(model, ids), found) < 1e-9
    without = model_with(form, "sliding", kind, family)
    changed = difference(logits(without, ids), found)
    assert changed < 1e-9 if piece == form else changed > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "piece"), [("full", "slack"), ("half", "free pairs")])
def test_a_step_is_exported_for_executorch(kind, piece):
    """By Transformers' recipe: a token at a time, with the cache in buffers of the program."""
    model = model_with(piece, "quantised", kind)  # Transformers' recipe knows no windows
    ids = some_tokens(model, batch=1, length=6)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=10)
    if kind == "half":
        module = halve_static_keys(module)
    width = {"full": 8, "half": 6}[kind]
    assert module.key_cache_1.shape == (1, 2, 10, width)
    model.requires_grad_(False)
    example = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
    program = torch.export.export(module, (), example, strict=True)
    targets = {str(node.target) for node in program.graph.nodes}  # that load without this package
    assert any("scaled_dot_product" in x for x in targets) and not any("coca" in x for x in targets)
    step = program.module()
    pieces = [step(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(6)]
    assert difference(torch.cat(pieces, 1), logits(model, ids)) < ROUND_OFF
