"""Reading longer texts without training: what a method changes, and what others load."""

import subprocess
import sys
from itertools import cycle, product

import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_attention import extend_context
from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_attention.models.configuration import rope_parameters, rotation
from coca_attention.models.extension import extended
from coca_attention.models.folding import fold_temperature
from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from coca_lab.evaluation.task import RotaryScaling
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
from transformers import AutoModelForCausalLM
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
    assert type(again) is type(vanilla(family))
    ids = some_tokens(model, length=160)
    assert difference(logits(again, ids), logits(model, ids)) < 1e-5
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
    assert training_length(model.config) == 160
    model = extend_context(vanilla("Llama"), "ntk")  # 4 L by default; heads of 8
    assert rotation(model.config).base == pytest.approx(1e4 * 4 ** (8 / 6))
    assert rotation(extend_context(vanilla("Llama"), "dynamic").config).rule.factor == 4
    shorter = extend_context(vanilla("Llama"), "yarn", length=32).config
    assert rope_parameters(shorter)["original_max_position_embeddings"] == 32
    assert shorter.max_position_embeddings == 128


def test_limited_distances_change_nothing_up_to_their_limit_and_say_what_they_read():
    model, ids = vanilla("Llama").double(), some_tokens(vanilla("Llama"), length=40)
    before = logits(model, ids)
    assert extend_context(model, near=40) is model
    with pytest.raises(UserError, match="start from the model that it was made"):
        extend_context(model)
    assert difference(logits(model, ids), before) < 1e-6
    assert model.config.max_position_embeddings == 256 and training_length(model.config) == 64
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


def test_rules_that_follow_the_number_of_positions_keep_it():
    model = vanilla("Llama", rope_parameters=DYNAMIC)
    ids = some_tokens(model, length=60)
    before = logits(model, ids)
    assert difference(logits(extend_context(model), ids), before) < 1e-6
    assert model.config.max_position_embeddings == 64


@pytest.mark.parametrize("method", STOCK)
def test_a_model_is_extended_for_a_while(method):
    model = vanilla("Gemma 3")
    ids, before = some_tokens(model, length=100), model.config.to_dict()
    expected = logits(model, ids)
    with extended(model, method, length=64, to=256):
        within = logits(model, ids)
    assert difference(within, expected) > 1e-4
    assert torch.equal(logits(model, ids), expected) and model.config.to_dict() == before
    extend_context(model, method)
    assert torch.equal(logits(model, ids), within)


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("Llama", {}, {"method": "yarm"}, "method must be one of limited, .* did you mean yarn"),
        (
            "Llama",
            {},
            {"method": "yarn", "near": 8},
            "for method limited: leave it out with yarn",
        ),
        ("Llama", {}, {"to": 64}, "the tokens to read, must be a whole number from 65"),
        ("Llama", {"rope_parameters": YARN}, {"method": "ntk"}, "replace the yarn scaling"),
        ("Phi-3", {}, {"method": "yarn"}, "phi3 cannot be saved with yarn"),
        ("Llama", {}, {"near": 65}, "at most the training length of 64"),
        ("Llama", {"rope_parameters": LONGER}, {"method": "leaky"}, "dynamic scaling: choose lim"),
    ],
)
def test_what_cannot_be_extended_stays_as_it_is(family, changes, settings, message):
    model = vanilla(family, **changes)
    ids = some_tokens(model, length=60)
    expected = logits(model, ids)
    with pytest.raises(UserError, match=message):
        extend_context(model, **settings)
    assert difference(logits(model, ids), expected) < 1e-6


def test_a_temperature_is_folded_by_an_evaluation_which_restores_every_bit():
    """What it does to the scores is tested where models are exported."""
    model, folded = cohere(), cohere()
    fold_temperature(folded, 256)
    ids = some_tokens(model, length=80)
    before = logits(model, ids)
    with RotaryScaling("fold", 4.0).applied(model, 80):
        assert difference(logits(model, ids), logits(folded, ids)) < 1e-6
        assert not torch.equal(logits(model, ids), before)
    assert torch.equal(logits(model, ids), before)
    with pytest.raises(UserError, match="beside local ones"):
        fold_temperature(vanilla("Llama"), 256)
    with pytest.raises(UserError, match="at least the training length, 64"):
        fold_temperature(folded, 32)
