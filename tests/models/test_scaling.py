"""Rotary scaling of loaded models, CoCA and vanilla."""

import copy
import math
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention import convert
from coca_attention.models import Roles, set_rotary_scaling
from coca_attention.models.configuration import rope_parameters, rotation
from coca_attention.ops import Rule, rules
from coca_attention.testing import assert_consistent, difference, logits, some_tokens
from coca_lab.evaluation import MethodSettings
from conftest import VOCABULARY, tiny_model
from covering import mostly_slow
from families import FAMILIES, VARIED, collinear, reloaded, vanilla

IDS = torch.randint(1, VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(2))


def scaled_by_transformers(model, changes):
    """A vanilla model with the same weights and a rule of Transformers' own."""
    config, rope = model.config.to_dict(), model.config.rope_parameters
    changed = rope_parameters(model.config) | changes
    nested = "full_attention" in rope
    config["rope_parameters"] = rope | {"full_attention": changed} if nested else changed
    scaled = AutoModelForCausalLM.from_config(type(model.config)(**config)).eval()
    scaled.load_state_dict(model.state_dict())
    scaled.config._experts_implementation = model.config._experts_implementation
    return scaled


@pytest.mark.parametrize("kind", ["rope", "llama-rope"])
def test_what_transformers_remembers_of_a_long_text_ends_with_its_scaling(kind):
    """Of two texts beyond the training length, the second keeps the frequencies of the first."""
    theirs = scaled_by_transformers(tiny_model(kind), {"rope_type": "dynamic", "factor": 4.0})
    alone = copy.deepcopy(theirs)(IDS).logits
    with MethodSettings().applied(theirs, 96):
        theirs(IDS.repeat(1, 2))
        assert not torch.allclose(theirs(IDS).logits, alone, atol=1e-2)
    assert torch.equal(theirs(IDS).logits, alone)


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope"])
@pytest.mark.parametrize("form", ["vanilla", "strict"])
def test_frequencies_of_transformers_compile_in_one_graph(form, kind):
    model = vanilla("Llama") if form == "vanilla" else collinear("Llama", form)
    set_rotary_scaling(model, kind, factor=4.0, **rule_for(model, kind))
    ids = some_tokens(model, length=70)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, use_cache=False).logits
    assert difference(found, logits(model, ids)) < 1e-6


def test_unsupported_models_are_refused_and_not_changed():
    alibi = tiny_model("alibi")
    with pytest.raises(ValueError, match="no rotary embedding to scale"):
        set_rotary_scaling(alibi, "ntk", factor=4.0)

    model = vanilla("Llama")
    before = logits(model, some_tokens(model))
    unknown = type("Unknown", (type(model.model.rotary_emb),), {})
    model.model.rotary_emb.__class__ = unknown
    with pytest.raises(ValueError, match="rotary embedding Unknown is not supported"):
        set_rotary_scaling(model, "ntk", factor=4.0)
    assert torch.equal(logits(model, some_tokens(model)), before)
    assert type(model.model.rotary_emb) is unknown
    assert model.config.rope_parameters["rope_type"] == "default"


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 8.0]}
RULES = {"linear": {}, "ntk": {"length": 256}, "yarn": {}, "llama3": LLAMA3, "longrope": LONGROPE}
NATIVE = ["linear", "yarn", "llama3", "longrope", "dynamic"]
# Every rule of Transformers' own, and every family; its Phi-3 refuses every rule but longrope.
COVERING = [("Llama", kind) for kind in NATIVE] + [
    (family, "longrope" if family == "Phi-3" else NATIVE[index % 5])
    for index, family in enumerate(FAMILIES)
    if family != "Llama"
]


def rule_for(model, kind):
    """The rule's parameters, with as many longrope factors as the model has rotary pairs."""
    pairs, rule = rotation(model.config).width // 2, RULES.get(kind, {})
    return {n: v[:pairs] if isinstance(v, list) else v for n, v in rule.items()}


@pytest.mark.parametrize(("index", "kind"), list(enumerate(RULES)))
def test_every_rule_but_dynamic_is_consistent(index, kind):
    """All checks, for texts beyond the training length of 64; forms and caches alternate."""
    model = collinear("Llama", ("slack", "strict")[index % 2]).double()
    model.config.kv_cache = ("half", "full")[index // 2 % 2]
    set_rotary_scaling(model, kind, factor=4.0, **rule_for(model, kind))
    assert_consistent(model, some_tokens(model, length=90), tolerance=1e-11)


@pytest.mark.parametrize(
    ("family", "form"),
    mostly_slow(
        [*product(FAMILIES, ["vanilla"]), *product(VARIED, ["slack"])],
        product(VARIED, ["vanilla", "slack"]),
    ),
)
def test_every_family_is_consistent_when_scaled(family, form):
    """The same call on Transformers' own model and on ours."""
    model = (vanilla(family) if form == "vanilla" else collinear(family, form)).double()
    ids = some_tokens(model, length=70)
    plain = logits(model, ids)
    for kind in ("ntk", "longrope"):  # another base; other frequencies and a magnitude
        set_rotary_scaling(model, kind, factor=4.0, **rule_for(model, kind))
        assert difference(logits(model, ids), plain) > 1e-3
        assert_consistent(model, ids, ("long then short",), tolerance=1e-11)
        if form != "vanilla" or kind != "longrope":  # that of Transformers changes as a text grows
            assert_consistent(model, ids, ("decoding",), tolerance=1e-11)
        # Padding moves positions, and Transformers' tables of them are in float32.
        padded = 1e-5 if form == "vanilla" else 1e-11
        assert_consistent(model, ids, ("left padding",), tolerance=padded)
    set_rotary_scaling(model, "none")
    assert difference(logits(model, ids), plain) < 1e-12


@pytest.mark.parametrize(
    ("family", "kind"), mostly_slow(COVERING, [x for x in COVERING if x[0] in (*VARIED, "Phi-3")])
)
def test_vanilla_families_scale_as_transformers_scales_them(family, kind, tmp_path):
    model = vanilla(family)
    ids = some_tokens(model, length=80)
    extra = rule_for(model, kind)
    native = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    theirs = scaled_by_transformers(model, native | extra)
    expected = logits(theirs, ids)
    set_rotary_scaling(model, kind, factor=4.0, **extra)
    for scaled in (model, reloaded(model, tmp_path)):
        assert torch.equal(logits(scaled, ids), expected)
    assert difference(logits(vanilla(family), ids), expected) > 1e-3
    if kind == "dynamic":
        return
    # A model that is already scaled this way is recognised and not changed by the same call.
    set_rotary_scaling(theirs, kind, factor=4.0)
    assert difference(logits(theirs, ids), expected) < 1e-4


@pytest.mark.parametrize("kind", [*NATIVE, "none", "ntk"])
def test_a_scaled_coca_model_is_saved_with_its_defaults_and_loaded(kind, tmp_path):
    model = collinear("Llama")
    extra = {} if kind == "llama3" else rule_for(model, kind)
    set_rotary_scaling(model, kind, factor=4.0, **extra)
    ids = some_tokens(model, length=80)
    assert difference(logits(reloaded(model, tmp_path), ids), logits(model, ids)) < 1e-4


def test_a_model_cast_after_loading_is_scaled_like_the_others():
    for family in ("Llama", "Gemma 3", "Cohere"):
        cast, plain = vanilla(family).half(), vanilla(family)
        for model in (cast, plain):
            set_rotary_scaling(model, "ntk", factor=4.0, length=256)
        x, positions = torch.zeros(1), torch.arange(100).unsqueeze(0)
        where = ("full_attention",) if family == "Gemma 3" else ()
        ours, theirs = (m.model.rotary_emb(x, positions, *where) for m in (cast, plain))
        assert torch.equal(ours[0], theirs[0])


def test_parameters_of_the_same_rule_and_of_other_layers_are_kept():
    model = collinear("Llama")
    set_rotary_scaling(model, "yarn", factor=4.0, beta_fast=16.0)
    set_rotary_scaling(model, "yarn")
    rope = model.config.rope_parameters
    assert (rope["factor"], rope["beta_fast"]) == (4.0, 16.0)
    set_rotary_scaling(model, "linear")
    assert model.config.rope_parameters["factor"] == 1.0
    gemma = collinear("Gemma 3")  # whose local layers are not scaled
    set_rotary_scaling(gemma, "linear", factor=8.0)
    rope = gemma.config.rope_parameters
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8)
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_published_phi3_keeps_its_attention_factor():
    """longrope without a factor, which is derived from the two lengths, in vanilla and CoCA."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1], "long_factor": [2.0, 4.0],
            "original_max_position_embeddings": 64}  # fmt: skip
    model = vanilla("Phi-3", max_position_embeddings=512, rope_parameters=rope)
    ids = some_tokens(model, length=80)
    expected = logits(model, ids)
    magnitude = (1 + math.log(8) / math.log(64)) ** 0.5
    for length in (None, 512):
        set_rotary_scaling(model, "longrope", length=length)
        assert difference(logits(model, ids), expected) < 1e-4
    convert(model, "slack")
    scaling = rotation(model.config).rule
    assert scaling.magnitude == pytest.approx(magnitude)
    assert (scaling.factor, scaling.training_length) == (8.0, 64)


def test_a_rule_may_be_registered_after_the_import(monkeypatch):
    @dataclass(frozen=True)
    class Late(Rule):
        kind = "late"
        length: int | None = None

        def frequencies(self, width, base):
            return super().frequencies(width, base) / (self.length or 4)

    monkeypatch.setitem(rules.RULES, "late", Late)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "late", None)
    monkeypatch.delitem(ROPE_INIT_FUNCTIONS, "late")
    model, linear = vanilla("Llama"), vanilla("Llama")
    ids = some_tokens(model)
    set_rotary_scaling(linear, "linear", factor=4.0)
    set_rotary_scaling(model, "late")
    assert torch.equal(logits(model, ids), logits(linear, ids))
    # A rule that follows each text cannot be that of Transformers' modules.
    monkeypatch.setattr(Late, "follows_length", property(lambda rule: rule.length is None))
    monkeypatch.setattr(Late, "for_length", lambda rule, length: replace(rule, length=length))
    before = linear.config.rope_parameters
    with pytest.raises(ValueError, match=r"'late' follows the length of each text.*convert"):
        set_rotary_scaling(linear, "late")
    assert linear.config.rope_parameters is before
    ours = collinear("Llama")
    set_rotary_scaling(ours, "late")
    followed = logits(ours, ids[:, :8])
    set_rotary_scaling(ours, "linear", factor=8.0)
    assert torch.equal(logits(ours, ids[:, :8]), followed)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_a_model_whose_weights_are_offloaded_is_scaled(kind):
    model = vanilla("Llama")
    offloaded = cpu_offload(vanilla("Llama"), execution_device="cpu")
    for each in (model, offloaded):
        set_rotary_scaling(each, kind, factor=4.0, **rule_for(each, kind))
    ids = some_tokens(model, length=70)
    assert torch.equal(logits(offloaded, ids), logits(model, ids))


def test_a_scaling_set_in_inference_mode_is_read_outside_of_it():
    model = vanilla("Llama")
    with torch.inference_mode():
        set_rotary_scaling(model, "longrope", factor=4.0, **LONGROPE)
    ids = some_tokens(model, length=70)
    model(input_ids=ids, labels=ids).loss.backward()


def test_other_rotary_embeddings_are_not_changed():
    model = vanilla("Llama")
    model.config.rope_parameters["mrope_section"] = [2, 1, 1]
    with pytest.raises(ValueError, match="its parameters include mrope_section"):
        set_rotary_scaling(model, "none")
    assert "mrope_section" in model.config.rope_parameters
    local = vanilla("Gemma 3", layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="no layer with full attention"):
        set_rotary_scaling(local, "linear", factor=8.0)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Qwen3", "linear"), ("Qwen3", "llama3"), ("Llama", "yarn"), ("Llama", "dynamic")],
)
def test_local_layers_keep_the_rule_they_were_trained_with(family, kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0,
            "original_max_position_embeddings": 16, **RULES.get(kind, {})}  # fmt: skip
    model = vanilla(family, rope_parameters=rope).double().eval()
    ids = some_tokens(model, length=16)
    before = logits(model, ids)
    if family == "Qwen3":  # with a window in its first layer
        convert(model, "rope", near=16)
    else:
        pairs = rotation(model.config).width // 2
        same = Roles("lg", window=16, turning_pairs=pairs, temperature=False)
        convert(model, "rope", roles=same)
    assert difference(logits(model, ids), before) < 1e-6
    # A later rule is for global layers.
    local = rotation(model.config, "sliding_attention")
    set_rotary_scaling(model, "ntk", factor=4.0)
    assert rotation(model.config, "sliding_attention") == local
    assert rotation(model.config, "full_attention").rule.kind == "ntk"
    assert difference(logits(reloaded(model, tmp_path), ids), logits(model, ids)) < 1e-12


LENGTH = "a whole number of at least 32, got"
BAD = [
    ("linear", {"factor": 0.0}, "from 1"),
    ("ntk", {"factor": -1.0}, "from 1"),
    ("ntk", {"factor": "x"}, "could not convert"),
    ("ntk", {"factor": 1e300}, "out of range"),
    ("ntk", {"factor": 2.0, "length": 31}, f"{LENGTH} 31"),
    ("ntk", {"factor": 2.0, "length": 128.5}, f"{LENGTH} 128.5"),
    ("cubic", {}, "unknown rotary scaling"),
    (["ntk"], {}, "unknown rotary scaling"),
    ("linear", {"factor": 2.0, "length": 64}, "'linear' does not take length; it takes factor"),
    ("linear", {"low_freq_factor": 2.0}, "'linear' does not take low_freq_factor"),
    ("yarn", {"partial_rotary_factor": 0.5}, "does not take partial_rotary_factor"),
    ("ntk", {"rope_theta": 5.0}, "does not take rope_theta"),
    ("llama3", {"beta_fast": 2.0}, "it takes factor, high_freq_factor, low_freq_factor"),
    ("llama3", {"high_freq_factor": 0.5}, "high_freq_factor > low_freq_factor"),
    ("yarn", {"attention_factor": float("inf")}, "must be a finite number above 0"),
    ("yarn", {"attention_factor": "much"}, "must be a finite number above 0"),
    ("longrope", {}, "longrope needs short_factor"),
    ("longrope", {name: [float("nan")] * 4 for name in LONGROPE}, "each divisor of short_factor"),
    ("longrope", {name: [1.0] for name in LONGROPE}, "one divisor per rotary pair"),
]


@pytest.mark.parametrize(("kind", "parameters", "message"), BAD)
def test_bad_scalings_are_refused_and_change_nothing(kind, parameters, message):
    model = tiny_model("slack")
    before = dict(model.config.rope_parameters)
    with pytest.raises(ValueError, match=message):
        set_rotary_scaling(model, kind, **parameters)
    assert model.config.rope_parameters == before
