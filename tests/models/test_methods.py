"""Reading longer texts without training: what a method changes, and what others load."""

import math
import subprocess
import sys
from contextlib import nullcontext
from doctest import DocTestFinder, DocTestRunner
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention import convert, extend_context, set_rotary_scaling
from coca_attention.errors import UserError
from coca_attention.method_names import MethodName
from coca_attention.models import Roles, made_for, use_fused_attention
from coca_attention.models.configuration import original_length, rope_parameters, rotation
from coca_attention.models.methods import METHODS, UNTRIED, applied, extended_lengths
from coca_attention.ops import DistanceMap
from coca_attention.testing import (
    assert_consistent,
    decoded_logits,
    difference,
    logits,
    measure_consistency,
    some_tokens,
)
from covering import mostly_slow
from families import FAMILIES, VARIED, reloaded, vanilla
from natives import cohere

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGER = DYNAMIC | {"original_max_position_embeddings": 16}
STOCK = ["yarn", "dynamic", "ntk"]
STOCKED = [name for name in FAMILIES if name != "Phi-3"]
READ = """
import sys, torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not any(name.startswith("coca") for name in sys.modules)
ids = torch.load(sys.argv[2])
torch.save(model(ids, use_cache=False).logits, sys.argv[3])
"""


@pytest.mark.parametrize(
    ("family", "method"),
    mostly_slow(product(STOCKED, STOCK), zip(VARIED, cycle(STOCK), strict=False)),
)
def test_what_stock_methods_write_is_read_by_transformers_alike(family, method, tmp_path):
    model = extend_context(vanilla(family), method, to=160)
    config = model.config
    assert config.max_position_embeddings == (64 if method == "dynamic" else 160)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again.config._experts_implementation = model.config._experts_implementation
    assert type(again) is type(vanilla(family))
    ids = some_tokens(model, length=160)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert difference(logits(vanilla(family), ids), logits(model, ids)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", STOCK)
def test_transformers_alone_reads_them(method, tmp_path):
    model = extend_context(vanilla("Llama"), method)
    model.save_pretrained(tmp_path / "model")
    ids = some_tokens(model, length=256)
    torch.save(ids, tmp_path / "ids.pt")
    words = [str(tmp_path / name) for name in ("model", "ids.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", READ, *words], check=True)
    assert difference(torch.load(words[2]).double(), logits(model, ids).double()) < 1e-5


def test_the_rules_are_for_the_length_to_read():
    model = extend_context(vanilla("Llama"), "yarn", to=160)
    rule = rotation(model.config).rule
    assert (rule.kind, rule.factor, rule.training_length) == ("yarn", 2.5, 64)
    assert made_for(model.config) == (64, "from which yarn has extended it")
    linear = extend_context(vanilla("Llama"), "linear").config
    assert made_for(linear)[0] == original_length(linear) == 64
    # A rule of training stays beside a method, and L is still the length with it.
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for method in ("limited", "leaky", "shifted"):
        scaled = extend_context(vanilla("Llama", rope_parameters=rope), method, to=100).config
        assert (made_for(scaled)[0], original_length(scaled)) == (64, 32)
    taken = convert(extend_context(vanilla("Llama"), "yarn"), "rope", roles=Roles("lg", window=8))
    assert rotation(taken.config, "full_attention").temperature == 64
    model = extend_context(vanilla("Llama"), "ntk")  # 1.5 L by default; heads of 8
    assert rotation(model.config).base == pytest.approx(1e4 * 1.5 ** (8 / 6))
    assert rotation(extend_context(vanilla("Llama"), "dynamic").config).rule.factor == 1.5
    shorter = extend_context(vanilla("Llama"), "yarn", length=32).config
    assert rope_parameters(shorter)["original_max_position_embeddings"] == 32
    assert shorter.max_position_embeddings == 48


def test_limited_distances_change_nothing_up_to_their_limit_and_say_what_they_read():
    model, ids = vanilla("Llama").double(), some_tokens(vanilla("Llama"), length=40)
    before = logits(model, ids)
    assert extend_context(model, "limited", near=40) is model
    with pytest.raises(UserError, match="start from the original"):
        extend_context(model)
    assert difference(logits(model, ids), before) < 1e-6
    assert model.config.max_position_embeddings == 96 and made_for(model.config)[0] == 64
    assert rotation(model.config).distance_map.near == 40


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
def test_leaking_distances_stay_below_the_training_length(family, tmp_path):
    model = extend_context(vanilla(family), "leaky", to=160)
    turning = rotation(model.config, "full_attention")
    near, leak = turning.distance_map.near, turning.distance_map.slope
    assert (near, turning.temperature) == (32, None) and near + leak * (160 - near) == 64
    assert model.config.max_position_embeddings == 160
    ids = some_tokens(model, length=160)
    again = reloaded(model, tmp_path)
    assert difference(logits(again, ids), logits(model, ids)) < 1e-6
    changed = difference(logits(vanilla(family), ids), logits(model, ids))
    assert difference(logits(model, ids[:, :32]), logits(vanilla(family), ids[:, :32])) < 1e-6
    assert difference(decoded_logits(model, ids), logits(model, ids)) < 1e-5 < changed


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@pytest.mark.parametrize(("to", "near", "group"), [(96, None, 2), (97, None, 3), (160, 15, 3)])
def test_self_extend_rounds_far_distances(family, to, near, group, tmp_path):
    """One window, decoding by both caches and a folder; a dense oracle is among the operators."""
    options = {} if near is None else {"near": near}
    near = near or 32
    model = extend_context(vanilla(family).double(), "self_extend", to=to, **options)
    found = rotation(model.config, "full_attention").distance_map
    assert found == DistanceMap.grouped(near, group)
    assert (64 - near) * group + near >= to > (64 - near) * (group - 1) + near
    assert (to - 1) // group + near - near // group <= 64  # the largest distance
    assert model.config.max_position_embeddings == to
    ids = some_tokens(model, length=to)
    # Gemma's scale of embeddings is made in float32.
    assert difference(logits(reloaded(model, tmp_path), ids), logits(model, ids)) < 1e-6
    assert difference(decoded_logits(model, ids), logits(model, ids)) < 1e-12
    model.config.kv_cache = "half"
    assert difference(decoded_logits(model, ids), logits(model, ids)) < 1e-12
    short = ids[:, :near]
    # Transformers computes angles in float32.
    assert difference(logits(model, short), logits(vanilla(family).double(), short)) < 1e-6
    leaky = extend_context(vanilla(family).double(), "leaky", to=to)
    assert difference(logits(model, ids), logits(leaky, ids)) > 1e-4


def test_maps_that_were_saved_without_groups_are_read():
    model = extend_context(vanilla("Llama"), "shifted")
    for name in ("group", "after"):
        del model.config.rope_parameters["distance_map"][name]
    assert rotation(model.config).distance_map == DistanceMap.shifted(50, 4)
    model.config.rope_parameters["distance_map"]["size"] = 2
    with pytest.raises(ValueError, match="near, slope, start, and may have group and after; got"):
        rotation(model.config)


def test_whole_positions_are_divided_exactly():
    """Of every group the last position: 49 * (1 / 49) is below 1."""
    for group in (3, 49, 10_007):
        positions = torch.arange(1, 2000, dtype=torch.float64) * group
        found = DistanceMap.grouped(8, group)
        for before, expected in ((0, positions // group), (1, positions // group - 1)):
            assert torch.equal(found.far_keys(positions - before)[:, 0], expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "GPT-NeoX"])
@pytest.mark.parametrize(
    ("method", "to", "near"), [("shifted", None, 50), ("string", 112, 58), ("string", 48, 21)]
)
def test_shifted_distances_are_those_of_training(family, method, to, near, tmp_path):
    """One window, decoding and a folder; a dense oracle of the map is among the operators."""
    options = {"attention_factor": 1.0} if method == "string" else {}
    model = extend_context(vanilla(family), method, to=to, **options)
    found = rotation(model.config, "full_attention").distance_map
    after = 64 if method == "shifted" else 0
    assert found == DistanceMap.shifted(near, 4, after=after)
    reached = 96 if to is None else to
    assert reached - near + 4 <= 64 and model.config.max_position_embeddings == reached
    ids = some_tokens(model, length=reached)
    assert difference(logits(reloaded(model, tmp_path), ids), logits(model, ids)) < 1e-6
    assert difference(decoded_logits(model, ids), logits(model, ids)) < 1e-5
    ours = logits(model, ids)
    before = logits(vanilla(family), ids)
    same = found.unchanged
    assert same == max(near, after)
    assert difference(ours[:, :same], before[:, :same]) < 1e-6
    assert difference(ours[:, same:], before[:, same:]) > 1e-4


def test_up_to_the_training_length_shifted_distances_differ_by_the_rounding_of_angles():
    """Transformers has angles in float32; from exact ones the original has the same logits, here in
    float64."""
    length = 1024
    options = {"max_position_embeddings": length}
    original = vanilla("Llama", **options).double()
    extended = extend_context(vanilla("Llama", **options).double(), "shifted", to=3 * length // 2)
    ids = some_tokens(original, length=length)
    expected = logits(extended, ids)
    # An angle is off by the rounding of its frequency and of its product, at most 2^-24 each.
    largest = 2 * length * 2**-24
    rounded = difference(logits(original, ids), expected)
    assert 0 < rounded < largest
    rotary = original.model.rotary_emb
    width = original.config.head_dim
    theta = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def exact(x, position_ids):
        angles = position_ids[..., None].double() * theta
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = exact
    assert difference(logits(original, ids), expected) < 1e-12


def test_shifted_distances_leave_texts_of_training_to_any_attention_function(monkeypatch):
    """Bit by bit as limited distances do, after a cache, too; a later query needs two scores."""
    model = extend_context(vanilla("Llama"), "shifted", to=100)
    ids = some_tokens(model, length=100)
    limited = extend_context(vanilla("Llama"), "limited", to=100)
    assert torch.equal(logits(model, ids[:, :64]), logits(limited, ids[:, :64]))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "stand-in", sdpa_attention_forward)
    model.config._attn_implementation = "stand-in"
    cached = model(ids[:, :40], use_cache=True)
    model(ids[:, 40:64], past_key_values=cached.past_key_values)
    with pytest.raises(ValueError, match="in texts of more than 64 tokens, which needs the att"):
        model(ids[:, 64:65], past_key_values=cached.past_key_values)
    at = torch.arange(1, 65)[None]  # one token of these is at L
    with pytest.raises(ValueError, match="in texts of more than 64 tokens"):
        model(ids[:, :64], position_ids=at)


def test_string_is_shifted_with_a_factor_on_cos_and_sin(tmp_path):
    model = extend_context(vanilla("Llama").double(), "string", to=100, near=60, first=8)
    without = {"to": 100, "near": 60, "first": 8, "attention_factor": 1.0}
    scaled = extend_context(vanilla("Llama").double(), "string", **without)
    ids = some_tokens(model, length=100)
    for layer in scaled.model.layers:
        layer.self_attn.scaling *= (1 + 0.1 * math.log(2)) ** 2
    assert difference(logits(model, ids), logits(scaled, ids)) < 1e-12
    assert difference(logits(reloaded(model, tmp_path), ids), logits(model, ids)) < 1e-12


@pytest.mark.parametrize("method", ["shifted", "string"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"to": 125},
            "at most 124 tokens here, got 125: choose `to` 124, or for longer texts leaky",
        ),
        (
            {"to": 96, "near": 35},
            "`near`, in tokens from T - L .* between 36 and 64",
        ),
        ({"to": 96, "near": 65}, "between 36 and 64, got 65"),
        ({"first": 64}, "between 0 and 63, got 64"),
    ],
)
def test_shifts_out_of_range_are_refused(method, settings, message):
    model = vanilla("Llama")
    with pytest.raises(UserError, match=message):
        extend_context(model, method, **settings)
    assert rotation(model.config).distance_map is None


def test_rules_that_follow_the_number_of_positions_keep_it():
    model = vanilla("Llama", rope_parameters=DYNAMIC)
    ids = some_tokens(model, length=60)
    before = logits(model, ids)
    assert difference(logits(extend_context(model, "limited"), ids), before) < 1e-6
    assert model.config.max_position_embeddings == 64


@pytest.mark.parametrize("method", STOCK)
def test_a_model_is_extended_for_a_while(method):
    model = vanilla("Gemma 3")
    ids, before = some_tokens(model, length=100), model.config.to_dict()
    expected = logits(model, ids)
    with applied(model, method, length=64, to=256):
        within = logits(model, ids)
    assert difference(within, expected) > 1e-4
    assert torch.equal(logits(model, ids), expected) and model.config.to_dict() == before
    extend_context(model, method, length=64, to=256)
    assert torch.equal(logits(model, ids), within)


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        (
            "Llama",
            {},
            {"method": "yarm"},
            "`method` must be one of shifted, [^']*longrope, got 'yarm'; did you mean yarn",
        ),
        ("Llama", {}, {"method": "non"}, "must be one of shifted, .*, longrope, got 'non'$"),
        (
            "Llama",
            {},
            {"method": "yarn", "near": 8},
            "near is for method shifted and limited and self_extend and string: leave it out",
        ),
        (
            "Llama",
            {},
            {"to": 64},
            "the tokens to read, must be a whole number of at least 65, got 64: L, the training "
            r"length, is 64 \(max_position_embeddings; `length` sets another\)$",
        ),
        ("Llama", {}, {"to": 9, "length": 9}, "L, the training length, is 9$"),
        ("Llama", {"rope_parameters": YARN}, {"method": "ntk"}, "replace the yarn scaling"),
        ("Phi-3", {}, {"method": "yarn"}, "phi3 cannot be saved with yarn"),
        ("Llama", {}, {"method": "limited", "near": 65}, "between 1 and 64, got 65"),
        ("Llama", {"rope_parameters": LONGER}, {"method": "leaky"}, "dynamic scaling: choose lim"),
        ("Llama", {"rope_parameters": YARN}, {"method": "string"}, "replace the yarn scaling"),
    ],
)
def test_what_cannot_be_extended_stays_as_it_is(family, changes, settings, message):
    model = vanilla(family, **changes)
    ids = some_tokens(model, length=60)
    expected = logits(model, ids)
    with pytest.raises(UserError, match=message):
        extend_context(model, **settings)
    assert difference(logits(model, ids), expected) < 1e-6


@pytest.mark.parametrize("given", ["a/folder", Path("a/folder"), None])
def test_what_is_no_loaded_model_is_refused(given):
    def apply(model):
        with applied(model, "none"):
            pass

    takers = [
        lambda model: convert(model, "strict"),
        lambda model: extend_context(model, "yarn"),
        extend_context,
        apply,
        lambda model: set_rotary_scaling(model, "ntk"),
        use_fused_attention,
        assert_consistent,
        measure_consistency,
    ]
    for take in takers:
        with pytest.raises(UserError, match=r"expected a loaded model, got .*: load it first"):
            take(given)
    own = torch.nn.Linear(3, 3)
    own.config = SimpleNamespace(n_embd=3)  # as in nanoGPT
    for other in (torch.nn.Linear(3, 3), torch.nn.Linear, own):
        for take in takers:
            with pytest.raises(UserError, match=r"^expected a Transformers model, got Linear: "):
                take(other)


def test_every_name_has_a_row_and_every_row_a_name():
    assert sorted(METHODS) == sorted(get_args(MethodName))
    for row in METHODS.values():
        assert row.name == "none" or ("20" in row.source and row.engines)


def test_the_example_of_the_docstring_runs():
    (example,) = DocTestFinder().find(extend_context, globs={"extend_context": extend_context})
    assert DocTestRunner().run(example).failed == 0 < len(example.examples)


def test_the_page_has_every_method_with_its_options_and_engines():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    section, _, _ = page.split("## Methods")[1].partition("\n## ")
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = {line.split("`")[1]: [x.strip() for x in line.split("|")[1:-1]] for line in lines}
    assert list(cells) == [name for name in METHODS if name != "none"]
    for name, (_, _, options, within, engines) in cells.items():
        row = METHODS[name]
        assert engines == ", ".join(x for x in row.engines if x not in UNTRIED)
        assert within.startswith("as before" if row.within == "exact" else "change")
        if not options.startswith(("as ", "those of ")):
            assert [option for option in row.options if f"`{option}`" in options] == list(
                row.options
            )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "GPT-NeoX"])
def test_a_method_leaves_a_model_bit_by_bit_as_it_was(family, method):
    """Weights and their objects, configuration, classes, rotary modules, and what it remembers."""
    model = vanilla(family).bfloat16()
    ids = some_tokens(model, length=100)
    expected = logits(model, ids)
    parts = [(module, type(module), list(vars(module))) for module in model.modules()]
    weights = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    config, before = model.config, model.config.to_dict()
    # These need layers without positions, and factors.
    refused = pytest.raises(UserError) if method in ("temperature", "longrope") else nullcontext()
    with refused, applied(model, method, text=100):
        within = logits(model, ids)
        assert method == "none" or not torch.equal(within, expected)
        assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    assert torch.equal(logits(model, ids), expected)
    assert [(module, type(module), list(vars(module))) for module in model.modules()] == parts
    assert model.config is config and config.to_dict() == before
    for name, weight in model.named_parameters():
        assert weight is weights[name][0] and torch.equal(weight, weights[name][1])


@pytest.mark.parametrize("first", [name for name in METHODS if METHODS[name].compared])
@pytest.mark.parametrize("second", ["limited", "yarn"])
def test_an_extended_model_is_not_extended_again(first, second, tmp_path):
    model = extend_context(cohere() if first == "temperature" else vanilla("Llama"), first)
    for each in (model, reloaded(model, tmp_path)):
        ids = some_tokens(each, length=90)
        expected = logits(each, ids)
        with pytest.raises(UserError, match=f"was extended by {first} already.*start from the or"):
            extend_context(each, second)
        assert torch.equal(logits(each, ids), expected)


def test_a_folder_of_limits_that_does_not_say_so_is_not_extended_again():
    model = convert(vanilla("Llama"), "rope", near=64)
    with pytest.raises(UserError, match="extended by limits of distances already"):
        extend_context(model, "dynamic")


@pytest.mark.parametrize("method", ["limited", "yarn", "ntk", "dynamic", "leaky"])
@pytest.mark.parametrize("length", [0, -1, 31.5, True, "32"])
def test_lengths_are_whole_numbers(method, length):
    model = vanilla("Llama")
    with pytest.raises(UserError, match="`length`, the tokens that the model was made for, must"):
        extend_context(model, method, length=length)
    with pytest.raises(UserError, match="`to`, the tokens to read, must be"):
        extend_context(model, method, to=length)


@pytest.mark.parametrize("method", ["limited", "yarn", "ntk", "dynamic", "leaky", "temperature"])
@pytest.mark.parametrize("made", [GPT2Config, GPTJConfig])
def test_models_without_rotary_parameters_are_refused(made, method):
    model = AutoModelForCausalLM.from_config(
        made(vocab_size=32, n_embd=16, n_head=2, n_layer=2, n_positions=64, rotary_dim=4)
    )
    plain = "cannot be extended: all methods are for rotary positions, .* choose a model that has "
    for named in (method, None):
        with pytest.raises(UserError, match=plain):
            extend_context(model, named)


def test_distances_up_to_the_training_length_need_frequencies_of_one_length():
    """Up to twice the original length, W = L / 2 is within it, but L is not."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2,
            "long_factor": [2.0] * 2, "original_max_position_embeddings": 32}  # fmt: skip
    model = vanilla("Phi-3", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(UserError, match="do not depend on the text, and the model has longrope"):
        extend_context(model, "leaky")


def test_the_default_is_the_first_method_that_a_model_takes():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2,
            "long_factor": [2.0] * 2, "original_max_position_embeddings": 32}  # fmt: skip
    phi = vanilla("Phi-3", rope_parameters=rope, max_position_embeddings=64)
    for model, to, method in (
        (vanilla("Llama"), None, "shifted"),
        (vanilla("Llama"), 124, "shifted"),  # 2 L - w
        (vanilla("Llama"), 125, "limited"),
        (phi, None, "limited"),
        (cohere(), None, "temperature"),
    ):
        extended = extend_context(model, length=64, to=to)
        written = {"method": method, "length": 64, "to": 96 if to is None else to}
        assert extended.config.context_extension == written
    with pytest.raises(
        UserError, match=r"no default method is for this model; shifted: .*; limited: .*; temp"
    ):
        extend_context(vanilla("Llama"), near=0)


def test_options_are_those_of_the_method():
    model = vanilla("Llama")
    with pytest.raises(UserError, match="dynamic has no option `beta_fast`: beta_fast is for"):
        extend_context(model, "dynamic", beta_fast=2.0)
    with pytest.raises(UserError, match="yarn has no option `speed`; it takes attention_factor"):
        extend_context(model, "yarn", speed=2)
    with pytest.raises(UserError, match="no option `max_distance`; it is called near here"):
        extend_context(model, "limited", to=256, max_distance=8)
    with pytest.raises(UserError, match="no model is saved with it"):
        extend_context(model, "ntk_text")
    extend_context(model, "yarn", beta_fast=16.0)
    assert model.config.rope_parameters["beta_fast"] == 16.0


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("yarn", "must have method, length and to, .* got 'yarn': extend the original"),
        ({"method": "yarn", "to": 128}, "must have method, length and to"),
        ({"method": "yarn", "length": "64", "to": 128}, "length of .* whole number.*got '64'"),
        ({"method": "yarn", "length": 64, "to": None}, "to of .* whole number.*got None"),
    ],
)
def test_what_an_extension_has_written_is_checked(written, message):
    config = vanilla("Llama").config
    config.context_extension = written
    with pytest.raises(UserError, match=message):
        made_for(config)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("caches", [True, False])
def test_gaps_in_positions_begin_documents_where_they_do_in_the_original(caches, implementation):
    """Without a mask, Transformers looks for documents where no cache is made; so in windows."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    original = vanilla("Qwen2", **windows)
    limited = extend_context(vanilla("Qwen2", **windows), "limited")
    ids = some_tokens(original, length=20)
    positions = torch.tensor([[*range(8), *range(30, 42)]])
    found = []
    for model in (original, limited):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(ids, position_ids=positions, use_cache=caches).logits)
    assert difference(*found) < 1e-5


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        ("yarn", {"truncate": "no"}, "truncate must be true or false, got 'no'"),
        ("yarn", {"beta_fast": True}, "beta_fast must be a finite number above 0, got True"),
        ("llama3", {"low_freq_factor": "x"}, "low_freq_factor must be a finite number"),
        (
            "longrope",
            {"short_factor": 3, "long_factor": [1.0] * 4},
            "one positive divisor .* got 3",
        ),
        ("longrope", {"short_factor": "abcd", "long_factor": [1.0] * 4}, "one positive divisor"),
        ("longrope", {"short_factor": ["x"] * 4, "long_factor": [1.0] * 4}, "got 'x'"),
    ],
)
def test_options_of_a_wrong_type_are_refused_by_name(method, options, problem):
    with pytest.raises(UserError, match=problem):
        extend_context(vanilla("Llama"), method, **options)


def test_linear_llama3_and_longrope_are_those_of_transformers(tmp_path):
    divisors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 8.0]}
    for method, options in (("linear", {}), ("llama3", {}), ("longrope", divisors)):
        model = extend_context(vanilla("Llama"), method, to=256, **options)
        ids = some_tokens(model, length=200)
        model.save_pretrained(tmp_path / method)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / method).eval()
        assert difference(logits(again, ids), logits(model, ids)) < 1e-5
        assert difference(logits(vanilla("Llama"), ids), logits(model, ids)) > 1e-3


def test_a_model_whose_shared_configuration_was_extended_is_refused_in_these_words():
    model = extend_context(vanilla("Llama"), "yarn")
    with pytest.raises(UserError, match="extended by yarn already, or one that shares its conf"):
        extend_context(type(model)(model.config), "yarn")


def test_models_without_rotary_parameters_may_have_a_temperature():
    """Where layers have no positions; methods for rotary positions are refused."""
    config = cohere().config
    config.rope_parameters = None
    assert extended_lengths(config, 128, 64) == (64, 128)
    assert extended_lengths(config, 128, 64, METHODS["temperature"]) == (64, 128)
    with pytest.raises(UserError, match="all methods are for rotary positions"):
        extended_lengths(config, 128, 64, METHODS["yarn"])
