"""Where the attention of an answer goes: captured weights, prompts, statistics, errors."""

import json
import math

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention import convert
from coca_attention.errors import UserError
from coca_lab.analysis import RetrievalSettings, analyze_retrieval, collect_layers
from coca_lab.analysis.capture import (
    LayerAttention,
    attention_rows,
    visible_keys,
    visit_attention,
)
from coca_lab.analysis.retrieval import (
    Retrieval,
    head_statistics,
    retrieval_cell,
    retrievals,
)
from coca_lab.analysis.scores import score_rows
from coca_lab.data.passkey import encoder, passkey_text
from coca_lab.evaluation.passkey import PasskeySettings, passkey_prompts
from conftest import tiny_model
from families import FAMILIES, collinear, vanilla

ROWS = torch.tensor([4, 11, 23])


def some_ids(length: int = 24) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))


def with_roles(decay=None, max_distance=None, **changes):
    model = vanilla("GPT-NeoX", layer_types=["sliding_attention", "full_attention"])
    model.config.sliding_window = 6
    model.config.rope_parameters |= {"turning_pairs": 0, "temperature": 16, "decay": decay}
    if max_distance is not None:
        model.config.rope_parameters["max_distance"] = max_distance
    free = {"sliding_attention": 0, "full_attention": 4} | changes
    return convert(model, "strict", free_pairs=free)


MODELS = {f"{family} vanilla": lambda f=family: vanilla(f) for family in FAMILIES}
MODELS |= {f"{family} slack": lambda f=family: collinear(f, "slack") for family in FAMILIES}
MODELS |= {
    "alibi": lambda: tiny_model("alibi"),
    "strict with roles": with_roles,
    "rotary with roles": lambda: with_roles(sliding_attention=4),
    "roles with a decay": lambda: with_roles(decay=1.5),
    "limited distances": lambda: convert(vanilla("Llama"), "rope", max_distance=9),
    "limited distances with roles": lambda: with_roles(decay=1.5, max_distance=9),
}


def captured(model, ids=None, rows=ROWS) -> list[LayerAttention]:
    seen: list[LayerAttention] = []
    visit_attention(model, some_ids() if ids is None else ids, rows, seen.append)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_captured_weights_are_those_of_the_model(name):
    model = MODELS[name]().double().eval()
    seen = captured(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(some_ids(), output_attentions=True).attentions
    assert [layer.layer for layer in seen] == list(range(len(expected)))
    for layer, weights in zip(seen, expected, strict=True):
        # Some families' eager softmax is of float32.
        torch.testing.assert_close(
            layer.weights, weights[0][:, ROWS].double(), rtol=1e-4, atol=1e-6
        )
        assert torch.equal(layer.visible[0], (ROWS + 1).clamp(max=layer.window or 24))


def test_a_text_is_read_as_if_it_were_the_first():
    """Transformers' own dynamic scaling keeps the frequencies of the longest text."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model = vanilla("Llama", rope_parameters=rope, max_position_embeddings=16)
    for read in (captured, collect_layers):
        alone = read(model, some_ids())
        read(model, some_ids(90))
        for layer, same in zip(read(model, some_ids()), alone, strict=True):
            name = "weights" if read is captured else "query"
            assert torch.equal(getattr(layer, name), getattr(same, name))


@pytest.mark.parametrize("name", ["Llama slack", "strict with roles", "roles with a decay"])
def test_scores_of_the_angles_are_those_of_the_weights(name):
    model = MODELS[name]().double().eval()
    for heads, seen in zip(collect_layers(model, some_ids()), captured(model), strict=True):
        hidden = ~visible_keys(ROWS, 24, heads.window)
        weights = score_rows(heads, ROWS).masked_fill(hidden, -math.inf).softmax(-1)
        torch.testing.assert_close(weights, seen.weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["Llama slack", "alibi", "roles with a decay"])
def test_it_reads_any_implementation_and_leaves_the_model_as_it_was(name):
    model = MODELS[name]().double().eval()
    expected = captured(model)
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model.set_attn_implementation("eager")
    logits = model(some_ids()).logits
    for layer, same in zip(captured(model), expected, strict=True):
        assert torch.equal(layer.weights, same.weights)

    def fail(layer):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        visit_attention(model, some_ids(), ROWS, fail)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is function
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(some_ids()).logits, logits)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("GPT-NeoX vanilla", ["rotary", "rotary"]),
        ("Llama slack", ["slack", "slack"]),
        ("alibi", ["alibi", "alibi"]),
        ("strict with roles", ["strict", "dot product"]),
        ("rotary with roles", ["rotary", "dot product"]),
        ("roles with a decay", ["strict", "dot product"]),
    ],
)
def test_layers_are_named_by_what_scores(name, kinds):
    seen = captured(MODELS[name]().eval())
    assert [layer.attention for layer in seen] == kinds
    assert [layer.window for layer in seen] == ([6, None] if "roles" in name else [None, None])


def test_masks_and_biases_of_every_kind():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, h, 9, 4, generator=generator).double() for h in (4, 2))
    bias = torch.randn(1, 4, 9, 9, generator=generator).double()
    rows, repeated = torch.tensor([3, 8]), key.repeat_interleave(2, 1)
    scores = (query @ repeated.mT / 2)[0]
    causal = torch.ones(9, 9).tril().bool()
    lowest = torch.finfo(torch.float64).min
    additive = torch.where(causal, bias, lowest)
    plain = scores.masked_fill(~causal, -math.inf).softmax(-1)[:, rows]
    biased = (scores + bias[0]).masked_fill(~causal, -math.inf).softmax(-1)[:, rows]
    cases = [
        (None, None, plain),
        (causal[None, None], 0.5, plain),
        (torch.where(causal, torch.zeros_like(bias), lowest), None, plain),
        (additive, None, biased),
        (None, None, biased, bias[:, :, rows]),
        (None, None, plain, torch.ones(1, 1, 1, 9)),
        (causal[None, None], None, biased, bias[:, :, rows]),
    ]
    for mask, scale, expected, *rest in cases:
        found, visible = attention_rows(query, key, mask, scale, rows, *rest)
        torch.testing.assert_close(found, expected)
        assert visible.tolist() == [[4, 9]] * 4


def test_unreadable_attention_is_refused():
    model = vanilla("Llama")
    with pytest.raises(UserError, match="training mode"):
        captured(model.train())
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="layer 1: attention is not finite"):
        captured(model.eval())
    with pytest.raises(UserError, match="does not use Transformers' attention interface"):
        model.model.layers = nn.ModuleList()
        captured(model)


def test_prompts_are_those_of_the_passkey_task_with_their_answers(tokenizer):
    settings = RetrievalSettings(prompts=3, seed=5)
    asked = passkey_prompts(tokenizer, PasskeySettings(samples=3, seed=5), 260)
    for prompt, same in zip(retrievals(tokenizer, settings, 260), asked, strict=True):
        ids, key = prompt.ids.tolist(), str(prompt.facts["key"])
        assert ids[:260] == same.ids and prompt.facts == same.facts
        assert tokenizer.decode(ids[260:]) == f" The passkey is {key}."
        line = tokenizer.decode(ids[slice(*prompt.fact)])
        assert line == f"The passkey is {key}. Remeber it. {key} is the passkey.\n"
        answer = prompt.ids[prompt.rows + 1]
        assert tokenizer.decode(answer).strip() == key
        assert torch.equal(prompt.ids[prompt.copies], answer.unsqueeze(-1).expand(-1, 2))
        assert prompt.copies.min() >= prompt.fact[0] and prompt.copies.max() < prompt.fact[1]
    assert passkey_text(encoder(tokenizer), 12345, 260, 0.5).facts["distance"] < 260


def test_statistics_of_known_weights():
    weights = torch.zeros(2, 1, 20)
    weights[0, 0, 5], weights[0, 0, 7], weights[0, 0, 3], weights[0, 0, 16] = 0.5, 0.25, 0.2, 0.05
    weights[1, 0, :16] = 1 / 16
    seen = LayerAttention(0, "rotary", None, weights, torch.tensor([[20], [16]]))
    prompt = Retrieval(torch.arange(21), torch.tensor([19]), (4, 9), torch.tensor([[5, 8]]), {})
    found = {n: x[:, 0].tolist() for n, x in head_statistics(seen, prompt, 4, 15).items()}
    assert found["fact"] == pytest.approx([0.75, 5 / 16])
    assert found["digit"] == pytest.approx([0.5, 2 / 16])
    assert found["before_digit"] == pytest.approx([0.25, 2 / 16])
    assert found["near"] == pytest.approx([0.05, 0.0])
    assert found["trained"] == pytest.approx([0.8, 11 / 16])
    shares = [0.5, 0.25, 0.2, 0.05]
    expected = [-sum(x * math.log(x) for x in shares), math.log(16)]
    assert found["entropy"] == pytest.approx(expected)
    assert found["log_keys"] == pytest.approx([math.log(20), math.log(16)])
    assert found["peak"] == pytest.approx([0.2, 1 / 16])
    assert found["peak_distance"] == [16, 19]
    assert "trained" not in head_statistics(seen, prompt, 4, None)


def test_keys_may_have_different_numbers_of_tokens():
    def record(fact, distances):
        statistics = {"fact": [fact], "peak_distance": [distances], "log_keys": [distances]}
        layer = {"layer": 1, "attention": "rotary", "window": None, "statistics": statistics}
        return {"sample": {"digits_right": 1.0}, "layers": [layer]}

    records, settings = [record(0.2, [5.0]), record(0.6, [1.0, 3.0])], RetrievalSettings(prompts=2)
    cell = retrieval_cell(tiny_model("rope"), settings, 99, records, "M")
    (layer,) = cell["layers"]
    assert (layer["layer"], layer["attention"], layer["log_keys"]) == (1, "rotary", 3.0)
    assert layer["heads"][0]["peak_distance"] == 3.0
    # A prompt counts once.
    assert layer["heads"][0]["fact"]["mean"] == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["rope", "alibi", "strict", "llama-slack"])
def test_the_result_is_plain_and_repeatable(kind, tokenizer):
    model, told = tiny_model(kind), []
    settings = RetrievalSettings(passkeys=[300, 220], prompts=3, near=8)
    cells = analyze_retrieval(model, tokenizer, settings, lambda *x: told.append(x), name="M")
    json.dumps(cells, allow_nan=False)
    assert cells == analyze_retrieval(model, tokenizer, settings, name="M")
    assert [x[1:] for x in told] == [(n, 1560) for n in (300, 600, 900, 1120, 1340, 1560)]
    assert [cell["length"] for cell in cells] == [300, 220]
    for cell in cells:
        assert (cell["task"], cell["prompts"], cell["training_length"]) == ("attention", 3, 32)
        assert len(cell["samples"]) == 3 and len(cell["layers"]) == 2
        for layer in cell["layers"]:
            first, last = cell["length"], cell["length"] + 30
            assert math.log(first) < layer["log_keys"] < math.log(last)
            assert len(layer["heads"]) == 4
            for head in layer["heads"]:
                assert 0 < head["entropy"]["mean"] <= layer["log_keys"] + 1e-6
                for name in ("fact", "digit", "before_digit", "near", "trained", "peak"):
                    low, high = head[name]["interval95"]
                    assert 0 <= low <= head[name]["mean"] <= high <= 1 + 1e-6
                assert head["digit"]["mean"] <= head["fact"]["mean"] + 1e-6
                assert 0 <= head["peak_distance"] < last
    one = RetrievalSettings(passkeys=[220], prompts=1)
    values = analyze_retrieval(model, tokenizer, one)[0]["layers"][0]["heads"][0]["fact"]
    assert values["interval95"] is None


def test_only_the_rows_of_the_answer_are_computed(tokenizer):
    from test_analysis import Largest

    settings = RetrievalSettings(passkeys=[2000], prompts=1)
    with Largest() as seen:
        analyze_retrieval(tiny_model("rope"), tokenizer, settings)
    assert 2000 * 32 <= seen.numbers < 2000 * 2000 / 8


def test_lengths_and_tokenizers_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(UserError, match="a text of 20 tokens is too short"):
        retrievals(tokenizer, RetrievalSettings(), 20)

    class Uneven:
        """One token per character, but the first digit after two words is swallowed."""

        def __call__(self, text, **_):
            kept = text.replace(" The passkey is ", " The passkey is 7")
            return {"input_ids": [ord(letter) for letter in kept]}

        def decode(self, token):
            return chr(token)

    with pytest.raises(UserError, match=r"splits the key .* differently"):
        retrievals(Uneven(), RetrievalSettings(), 600)  # pyright: ignore
