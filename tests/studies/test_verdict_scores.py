"""Each score against its paper's equation, written out pair by pair, in float64."""

import math
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coca_attention.ops import Rotation
from studies.verdict import BaselineConfig, BaselineForCausalLM
from studies.verdict.model import BaselineAttention
from studies.verdict.pope import PoPE

HIDDEN, HEADS, LENGTH, VALUES = 24, 4, 9, 6


def turned(q, k, angle):
    """The real part of a product of complex numbers, turned by an angle."""
    return (complex(*q) * complex(*k).conjugate() * complex(math.cos(angle), math.sin(angle))).real


def frequencies(width):
    return [10000.0 ** (-2 * j / width) for j in range(width // 2)]


def still(width):
    return [0.0] * (width // 2)


def rotary(width, theta=frequencies):
    def score(module, head, q, k, m, n):
        pairs = [(j, j + width // 2) for j in range(width // 2)]
        angles = [(m - n) * x for x in theta(width)]
        return sum(turned(q[[*p]], k[[*p]], x) for p, x in zip(pairs, angles, strict=True))

    return score


def collinear(width, power, signed=False, theta=frequencies, free=0, phase=False):
    def score(module, head, q, t, m, n):
        pairs, total = width // 2, 0.0
        for j, frequency in enumerate(theta(width)):
            angle, query = (m - n) * frequency, q[[j, j + pairs]]
            if j >= pairs - free:
                total += turned(query, t[[j, j - pairs]], angle)
                continue
            coefficient = float(t[j]) if signed else max(float(t[j]), 0.0)
            shift = float(module.score.learned["phase"][head, j]) if phase else 0.0
            total += math.hypot(*query) ** power * coefficient * math.cos(angle + shift)
        return total

    return score


def pope(module, head, q, k, m, n):
    total, width = 0.0, len(q)
    for c in range(width):
        sizes = [math.log1p(math.exp(float(x[c]))) for x in (q, k)]
        delta = min(max(float(module.score.learned["phase"][head, c]), -2 * math.pi), 0.0)
        total += sizes[0] * sizes[1] * math.cos((n - m) * 10000.0 ** (-c / width) + delta)
    return total


def layer(score, width, turning=None, **options):
    rotation = {"width": width} if turning is None else {"width": width, "turning": turning}
    return {"score": score, "rotation": rotation, **options}


SHIFTED = {"form": "shifted", "signed": True, "free_pairs": 2}
# The options of a layer, and its score of one query and one key, times the root of its width.
LAYERS = {
    "rotary": (layer("rotary", 6), rotary(6)),
    "thin": (layer("rotary", 4), rotary(4)),
    "no positions": (layer("rotary", 4, turning=0), rotary(4, still)),
    "strict": (layer("collinear", 6), collinear(6, 2)),
    "strict signed": (layer("collinear", 6, signed=True), collinear(6, 2, signed=True)),
    "magnitude": (layer("collinear", 6, form="magnitude"), collinear(6, 1)),
    "strict without turning": (layer("collinear", 6, turning=0), collinear(6, 2, theta=still)),
    "shifted fast pairs": (
        layer("collinear", 8, **SHIFTED),
        collinear(8, 1, signed=True, free=2, phase=True),
    ),
    "pope": (layer("pope", 10), pope),
}


def attention(options, hidden=HIDDEN, **more):
    """A layer in float64 with large weights and, where there are phases, random ones."""
    torch.manual_seed(0)
    config = BaselineConfig(hidden_size=hidden, num_attention_heads=HEADS)
    module = BaselineAttention(config, **options, **more).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for phases in getattr(module.score, "learned", {}).values():
        torch.nn.init.uniform_(phases, -7.0, 1.0)  # beyond PoPE's limits, too
    return module


def texts(batch=2):
    return torch.randn(batch, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(1))


def written_out(module, score, hidden, *, kv_heads, window=LENGTH, temperature=None, decay=None):
    """The layer, one query at a time."""
    batch, length, _ = hidden.shape
    q = module.q_proj(hidden).view(batch, length, HEADS, -1)
    k = module.k_proj(hidden).view(batch, length, kv_heads, -1)
    v = module.v_proj(hidden).view(batch, length, kv_heads, -1)
    output = torch.zeros(batch, length, HEADS, VALUES, dtype=torch.float64)
    for b, h, m in product(range(batch), range(HEADS), range(length)):
        g, seen = h * kv_heads // HEADS, range(max(0, m - window + 1), m + 1)
        factor = math.log(m + 2) / math.log(temperature + 1) if temperature else 1.0
        query, scale = q[b, m, h], factor / math.sqrt(q.shape[-1])
        scores = [scale * score(module, h, query, k[b, n, g], m, n) for n in seen]
        if decay:
            scores = [x - math.log(1 + (m - n) / decay) for x, n in zip(scores, seen, strict=True)]
        output[b, m, h] = torch.tensor(scores, dtype=torch.float64).softmax(0) @ v[b, seen, g]
    return module.o_proj(output.flatten(2))


@pytest.mark.parametrize("name", LAYERS)
def test_scores_are_their_equations(name):
    options, score = LAYERS[name]
    module, hidden = attention(options, kv_heads=2), texts()
    with torch.no_grad():
        expected = written_out(module, score, hidden, kv_heads=2)
        torch.testing.assert_close(module(hidden)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["thin", "strict without turning"])
def test_windows_temperatures_and_decays_are_theirs(name):
    options, score = LAYERS[name]
    more = {"temperature": 5, "decay": 1.0, "decay_length": 3.0}
    options = options | {"rotation": options["rotation"] | more}
    module, hidden = attention(options, kv_heads=4, window=4), texts()
    parts = {"window": 4, "temperature": 5, "decay": 3.0}
    with torch.no_grad():
        expected = written_out(module, score, hidden, kv_heads=4, **parts)
        torch.testing.assert_close(module(hidden)[0], expected, rtol=1e-10, atol=1e-10)


def test_a_query_of_zeros_has_a_finite_gradient():
    module = attention(LAYERS["shifted fast pairs"][0], kv_heads=2)
    torch.nn.init.zeros_(module.q_proj.weight)
    module(texts())[0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_phases_of_pope_begin_at_zero():
    score = PoPE(HEADS, Rotation(10))
    assert score.learned["phase"].shape == (HEADS, 5) and not score.learned["phase"].any()


SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def same_logits(baseline, other):
    ids = torch.arange(40).view(2, 20) % 50
    asked = {"input_ids": ids, "labels": ids, "use_cache": False}
    with torch.no_grad():
        ours, theirs = (model(**asked) for model in (baseline, other))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss)


def baseline(score, **options):
    layer = {"score": score, "kv_heads": 2, "rotation": {"width": 8}, **options}
    return BaselineForCausalLM(BaselineConfig(**SIZES, scores={"g": layer}))


def test_rotary_is_llama():
    model = baseline("rotary")
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=8))
    llama.load_state_dict(model.state_dict())
    same_logits(model, llama)


def test_models_are_saved_and_found_by_their_type(tmp_path):
    model = baseline("pope", rotation={"width": 16})
    torch.nn.init.uniform_(model.model.layers[0].self_attn.score.learned["phase"], -3, 0)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).scores == model.config.scores
    same_logits(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_padding_is_refused():
    mask = torch.ones(1, 5, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="without padding, packing or cache"):
        baseline("rotary")(input_ids=torch.ones(1, 5, dtype=torch.long), attention_mask=mask)
