"""Tiny models of every family, and ways to read them."""

from dataclasses import asdict
from itertools import pairwise

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import oracle
from coca_attention import convert
from coca_attention.models import Roles
from coca_attention.models.configuration import rope_parameters, rotation
from coca_attention.models.rotary import CoCARotary
from coca_attention.ops import DistanceMap
from coca_attention.ops.positions import join_pairs
from coca_attention.testing import assert_consistent, difference, logits, some_tokens

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}  # of `intermediate_size`
MANY_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
# Name in the table: model_type, settings that differ from SIZES.
FAMILIES = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 8}),
    "Mixtral": ("mixtral", EXPERTS),
    "Qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": WINDOWED}),
    "Qwen2 MoE": ("qwen2_moe", MANY_EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": WINDOWED}),
    "Qwen3 MoE": ("qwen3_moe", MANY_EXPERTS),
    "Gemma": ("gemma", {}),
    "Gemma 3": (
        "gemma3_text",
        {"sliding_window": 8, "layer_types": WINDOWED, "query_pre_attn_scalar": 8},
    ),
    "Phi": ("phi", {"partial_rotary_factor": 0.5}),
    "Phi-3": (
        "phi3",
        {"partial_rotary_factor": 0.5, "sliding_window": 8, "original_max_position_embeddings": 64},
    ),
    "Granite": ("granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.25}),
    "Granite MoE": ("granitemoe", EXPERTS | {"attention_multiplier": 0.25}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": 8, "layer_types": WINDOWED}),
    "OLMoE": ("olmoe", {"num_experts_per_tok": 2, "num_experts": 4}),  # of `intermediate_size`
    "GPT-NeoX": ("gpt_neox", {"rotary_pct": 0.5, "num_key_value_heads": None, "head_dim": None}),
    "Cohere": ("cohere", {"use_qk_norm": True}),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "Helium": ("helium", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "Arcee": ("arcee", {}),
    "Seed-OSS": ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "StarCoder 2": (
        "starcoder2",
        {"sliding_window": 8, "residual_dropout": 0.0, "initializer_range": 0.03},
    ),
}
ENCODERS = {
    "ModernBERT": (
        "modernbert",
        {
            "num_key_value_heads": 4, "num_hidden_layers": 4, "local_attention": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "cls_token_id": 1, "sep_token_id": 2, "classifier_pooling": "mean",
        },
    )
}  # fmt: skip
# Without and with layer types; pairs (2j, 2j + 1), partial rotary; a fused projection.
VARIED = ["Llama", "Qwen2", "GLM-4", "GPT-NeoX"]


def configuration(family: str, **changes):
    """Transformers' own configuration of a tiny model."""
    model_type, differences = (FAMILIES | ENCODERS)[family]
    settings = {**SIZES, **differences, **changes}
    return AutoConfig.for_model(model_type, **{n: x for n, x in settings.items() if x is not None})


def vanilla(family: str, seed: int = 0, *, auto=AutoModelForCausalLM, **changes):
    """A small random model whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = auto.from_config(configuration(family, **changes)).eval()
    if "experts" in str(model):
        model.set_experts_implementation("batched_mm")  # others know no float64
    return far_from_uniform(model)


def far_from_uniform(model):
    """A model that was just made, with larger random weights."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Weights of norms differ from 1 too, so that swapped norms are detected.
            if weight.dim() == 2 and "norm" not in name:
                weight.mul_(8.0)
            else:
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def collinear(family: str, form: str = "slack", seed: int = 0, **changes):
    return convert(vanilla(family, seed, **changes), form)


# Models whose layers differ from the family's: family, form, settings of `convert`.
MODELS = {
    "strict": ("Llama", "strict", {}),
    "roles": ("GPT-NeoX", "rope", {"roles": Roles("lg", window=6)}),
    "roles with CoCA": ("Llama", "slack", {"roles": Roles("lg", window=6, decay=1.0)}),
    "roles with a decay": ("GPT-NeoX", "rope", {"roles": Roles("lg", window=6, decay=1.0)}),
    "limited": ("Llama", "rope", {"near": 11}),
    "limited strict": ("Mistral", "strict", {"near": 5}),
    "leaky": ("Llama", "strict", {"near": 11}),
    "shifted": ("Llama", "strict", {"near": 11}),
    "grouped": ("Llama", "strict", {"near": 11}),
    "limited in some layers": ("Gemma 3", "rope", {"near": 11}),
}


MAPS = {
    "leaky": DistanceMap.leaky(11, 0.3),
    "shifted": DistanceMap.shifted(11, 4, after=14),
    "grouped": DistanceMap.grouped(11, 3),
}


def set_map(model, distance_map):
    """Give the layers of a model that see the whole text a distance map."""
    rope_parameters(model.config)["distance_map"] = asdict(distance_map)
    return model


def made(name: str):
    """One of `MODELS`."""
    family, form, changes = MODELS[name]
    model = convert(vanilla(family), form, **changes).eval()
    if name in MAPS:
        set_map(model, MAPS[name])
    return model


class ExactRotary(CoCARotary):
    """A family's tables of cos and sin, of angles in float64; Transformers' are in float32."""

    def __init__(self, config, interleaved):
        super().__init__(config)
        self.interleaved = interleaved  # whether both values of a pair are adjacent

    def forward(self, hidden_states, position_ids, layer_type=None):
        angles = super().forward(hidden_states, position_ids, layer_type)
        tables = (join_pairs(x, x, self.interleaved) for x in (angles.cos, angles.sin))
        return tuple(x.to(hidden_states.dtype) for x in tables)


def with_exact_angles(model):
    """A vanilla model whose angles are in float64."""
    adjacent = model.config.model_type == "cohere"
    for name, module in list(model.named_modules()):
        if hasattr(module, "compute_default_rope_parameters"):
            model.set_submodule(name, ExactRotary(model.config, adjacent))
    return model


def reloaded(model, folder, auto=AutoModelForCausalLM):
    """The model, saved and loaded again."""
    model.save_pretrained(folder)
    kept = {"experts_implementation": model.config._experts_implementation}  # is not saved
    return auto.from_pretrained(folder, **kept).to(model.dtype).eval()


def assert_reloads(model, folder):
    """Saved and loaded again, it has the same class, configuration and logits; returns it."""
    loaded, ids = reloaded(model, folder), some_tokens(model)
    assert type(loaded) is type(model)
    ours, theirs = (m.config.to_dict() | {"_name_or_path": ""} for m in (model, loaded))
    assert ours == theirs and torch.equal(logits(loaded, ids), logits(model, ids))
    return loaded


def losses(model, steps, **inputs):
    """Losses of training steps on the same batch."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@torch.no_grad()
def read_in_pieces(model, ids, edges, mask=None, cache=None, positions=None):
    """Logits of a text that is read from edge to edge with a cache."""
    cache, pieces = DynamicCache(config=model.config) if cache is None else cache, []
    for a, b in pairwise((0, *edges)):
        options = {} if positions is None else {"position_ids": positions[:, a:b]}
        seen = None if mask is None else mask[:, :b]
        out = model(ids[:, a:b], attention_mask=seen, past_key_values=cache, **options)
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


def left_padded(ids, pads):
    """A batch with padding on the left, and its mask."""
    zeros = torch.zeros(len(ids), pads, dtype=torch.long)
    return torch.cat((zeros, ids), 1), torch.cat((zeros, torch.ones_like(ids)), 1)


def greedy(model, ids, **options):
    """Twelve tokens that follow a prompt."""
    options = {"attention_mask": torch.ones_like(ids), "min_new_tokens": 12} | options
    return model.generate(ids, max_new_tokens=12, do_sample=False, **options)[:, ids.shape[1] :]


def attentions(model):
    """The attention modules of a CoCA model in the order of its layers."""
    return model.base_model.attention_class.layout.modules(model.base_model)


@torch.no_grad()
def attended(model, ids):
    """Logits under eager attention, and of every layer: module, q, t per query head, weights."""
    model.set_attn_implementation("eager")
    inputs = {}

    def remember(module, args, kwargs):
        inputs[module] = args[0] if args else kwargs["hidden_states"]

    hooks = [m.register_forward_pre_hook(remember, with_kwargs=True) for m in attentions(model)]
    output, rows = model(ids, output_attentions=True), []
    for hook in hooks:
        hook.remove()
    for attention, weights in zip(attentions(model), output.attentions, strict=True):
        q, t, _ = attention.project(inputs[attention])
        rows.append((attention, q, t.repeat_interleave(q.shape[1] // t.shape[1], 1), weights))
    return output.logits, rows


def oracle_scores(form, attention, q, t):
    """Scores (B, H, T, T) of a layer by the printed equations."""
    turning = rotation(attention.config, getattr(attention, "layer_type", None))
    pairs = oracle.pairs_of(q, attention.layout.interleaved, turning.width)
    positions = torch.arange(q.shape[2])
    return oracle.scores(form, pairs, t, positions, positions, turning.frequencies())


def assert_reads_the_same(model, ids):
    """The same logits in one pass and with caches, and the same text generated."""
    assert_consistent(model, ids)
    ways = ({"use_cache": False}, {}, {"cache_implementation": "static"})
    outputs = [greedy(model, ids, **options) for options in ways]
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


def assert_compiles_and_trains(model):
    """One graph without breaks, and gradients for every projection."""
    ids = some_tokens(model, length=20)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, use_cache=False).logits
    assert difference(found, logits(model, ids)) < 1e-4
    model.train().gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(w.grad.abs().max() > 0 for n, w in model.named_parameters() if "proj" in n)
