"""Models used with other features: precision, PEFT, pipelines, decoding strategies."""

from unittest.mock import Mock

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StaticCache,
    TextStreamer,
    pipeline,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention.models import set_rotary_scaling
from coca_attention.models.attention import eager_attention
from coca_attention.ops import attend_half
from coca_attention.testing import difference, logits, some_tokens
from covering import covering
from families import (
    attended,
    attentions,
    collinear,
    greedy,
    left_padded,
    made,
    read_in_pieces,
)

FORMS = ["slack", "strict", "magnitude"]
COVERING = covering(FORMS, ["full", "half"], [False, True])  # the last: a cache with room


def model_of(form="slack", kind="full", **changes):
    model = collinear("Llama", form, **changes).double()
    model.config.kv_cache = kind
    return model


def test_eager_attention_in_float16_hides_what_is_masked_from_huge_scores():
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    query = torch.full((1, 1, 2, 4), 300.0, dtype=torch.float16)
    key = torch.full((1, 1, 2, 4), 300.0, dtype=torch.float16)
    value = torch.tensor([[1.0], [2.0]], dtype=torch.float16).view(1, 1, 2, 1)
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.float16)
    mask[..., 0, 1] = torch.finfo(torch.float16).min
    output, weights = eager_attention(module, query, key, value, mask, scaling=1024.0)
    assert weights[0, 0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert output.flatten().tolist() == [1.0, 1.5]


@pytest.mark.parametrize(("form", "kind", "static"), COVERING)
def test_packed_documents_are_independent(form, kind, static):
    model = model_of(form, kind)
    ids, options = some_tokens(model), {}
    positions = torch.cat((torch.arange(10), torch.arange(14))).unsqueeze(0)
    packed = torch.cat((ids[:1, :10], ids[1:, :14]), 1)
    if static:  # a mask keeps them apart
        document = (torch.arange(24) >= 10).long()
        mask = torch.zeros(1, 1, 24, 40, dtype=torch.bool)
        apart = document.unsqueeze(-1) == document
        mask[0, 0, :, :24] = apart & torch.ones(24, 24, dtype=torch.bool).tril()
        cache = StaticCache(config=model.config, max_cache_len=40)
        options = {"attention_mask": mask, "past_key_values": cache}
    found = logits(model, packed, position_ids=positions, **options)
    assert difference(found[0, :10], logits(model, ids[:1, :10])[0]) < 1e-12
    assert difference(found[0, 10:], logits(model, ids[1:, :14])[0]) < 1e-12


@pytest.mark.parametrize("kind", ["full", "half"])
@pytest.mark.parametrize("form", FORMS)
def test_custom_positions_with_a_cache(form, kind):
    model = model_of(form, kind)
    ids, positions = some_tokens(model), torch.arange(1000, 1024).expand(2, 24)
    whole = logits(model, ids, position_ids=positions)
    pieces = read_in_pieces(model, ids, (9, 10, 24), positions=positions)
    assert difference(pieces, whole) < 1e-12


@pytest.mark.parametrize(("form", "kind", "static"), [*COVERING, ("limited", "full", False)])
def test_padding_in_the_middle_of_a_cache(form, kind, static):
    """Right-padded prompts, then more text: positions and distances must not count the padding."""
    model = made(form).double() if form == "limited" else model_of(form, kind)
    ids = some_tokens(model)
    pads = torch.zeros(2, 3, dtype=torch.long)
    padded = torch.cat((ids[:, :8], pads, ids[:, 8:], pads[:, :2]), 1)  # the last piece ends in it
    mask, expected = (padded != 0).long(), logits(model, ids)[:, 8:]
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)  # as those of `generate`
    for given in (None, places):
        cache = StaticCache(config=model.config, max_cache_len=40) if static else None
        found = read_in_pieces(model, padded, (11, 16, 17, 29), mask, cache, given)
        assert difference(found[:, 11:27], expected) < 1e-12
    if form == "limited":
        found = logits(model, padded, attention_mask=mask)[:, 11:27]
        assert difference(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("family", "windows"), [("Mistral", [8, 8]), ("Gemma 3", [8, None]), ("Llama", [None, None])]
)
def test_attention_kernels_receive_the_window(family, windows, monkeypatch):
    """FlashAttention needs the window as an argument, not as a mask."""
    model, sdpa = collinear(family), Mock(wraps=ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sdpa)
    model(some_tokens(model))
    assert [call.kwargs.get("sliding_window") for call in sdpa.call_args_list] == windows


@pytest.mark.parametrize(
    ("family", "form"),
    [(f, FORMS[i % 3]) for i, f in enumerate(("Llama", "Mistral", "Gemma 3", "GPT-NeoX", "GLM-4"))],
)
def test_half_caches_are_decoded_without_forming_keys(family, form, monkeypatch):
    """Also with left padding; the logits match those of a single pass."""
    model, half = collinear(family, form).double(), Mock(wraps=attend_half)
    model.config.kv_cache = "half"
    monkeypatch.setattr("coca_attention.models.layer_pass.attend_half", half)
    ids = some_tokens(model)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for seen, given in ((slice(None), None), (slice(5, None), mask)):
        half.reset_mock()
        whole = logits(model, ids, attention_mask=given)
        pieces = read_in_pieces(model, ids, (20, 21, 22, 24), given)
        assert difference(pieces[:, seen], whole[:, seen]) < 1e-11
        assert half.call_count == 2 * len(model.base_model.layers)
        # A window smaller than the text is a mask too.
        masks = [call.kwargs["attention_mask"] for call in half.call_args_list]
        window = getattr(model.config, "sliding_window", None)
        assert any(mask is not None for mask in masks) is (given is not None or bool(window))


@pytest.mark.parametrize("kind", ["full", "half"])
def test_assisted_decoding_prompt_lookup_and_chunked_prefill(kind):
    model, helper = model_of(kind=kind), model_of(kind=kind, num_hidden_layers=1)
    ids = some_tokens(model, batch=1)
    plain = greedy(model, ids, use_cache=False)
    for way in (
        {"assistant_model": helper},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 7},
    ):
        assert torch.equal(greedy(model, ids, **way), plain), way.keys()


def test_pipeline_and_streaming(tokenizer, capsys):
    model = collinear("Llama", vocab_size=len(tokenizer)).float()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    options = {"generation_config": settings, "streamer": TextStreamer(tokenizer)}
    ids = tokenizer("alpha1 beta2", return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    expected = tokenizer.decode(output[0])
    assert generate("alpha1 beta2", **options)[0]["generated_text"] == expected
    assert expected.strip() in capsys.readouterr().out


def test_device_map(tmp_path):
    model = collinear("Llama", "strict")
    ids = some_tokens(model)
    model.save_pretrained(tmp_path)
    for where in ({"": "cpu"}, "auto"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where).eval()
        assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_prefix_tuning_requires_a_full_cache():
    model = collinear("Llama")
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(model, settings)
    ids = some_tokens(model)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert adapted.prompt_encoder.default.embedding.weight.grad.abs().max() > 0
    model.config.kv_cache = "half"
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 2"):
        adapted(input_ids=ids)


@pytest.mark.parametrize("name", ["strict", "roles"])
def test_continuous_batching_gives_the_answers_of_single_prompts(name):
    model = made(name)
    model.set_attn_implementation("sdpa" if name == "strict" else "eager")
    lengths = (3, 40, 9, 25, 14, 31, 6, 20)  # more than a batch holds
    prompts = [some_tokens(model, batch=1, length=n)[0].tolist() for n in lengths]
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=96)
    options = {"generation_config": settings, "progress_bar": False}
    results = model.generate_batch(prompts, continuous_batching_config=small, **options)
    for prompt, result in zip(prompts, results.values(), strict=True):
        row = torch.tensor([prompt])
        alone = greedy(model, row, eos_token_id=None)[0, :8]
        assert result.generated_tokens == alone.tolist()


@pytest.mark.parametrize(
    ("kind", "scaling", "message"),
    [
        ("half", "none", r'continuous batching.*kv_cache = "full"'),
        ("full", "dynamic", "does not support dynamic scaling"),
    ],
)
def test_continuous_batching_is_refused(kind, scaling, message, monkeypatch):
    model = model_of(kind=kind).float()
    set_rotary_scaling(model, scaling, factor=2.0)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3, 4, 5]], generation_config=settings, progress_bar=False)
    for name in ("limited", "roles with a decay"):
        with pytest.raises(ValueError, match=r"a decay or a distance map: use generate\(\)"):
            made(name).init_continuous_batching()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "half"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_generation(form, kind):
    """torch.compile with the default backend, one graph, a static cache, as generate() uses it."""
    torch._dynamo.reset()  # it compiles one function a few times only, and all models share theirs
    model = model_of(form, kind).float()
    ids = some_tokens(model)
    whole = logits(model, ids)
    compiled = torch.compile(model.forward, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=32)
    pieces = []
    with torch.no_grad():
        for a, b in ((0, 20), *((i, i + 1) for i in range(20, 24))):
            positions = torch.arange(a, b).unsqueeze(0)
            out = compiled(ids[:, a:b], position_ids=positions, past_key_values=cache)
            pieces.append(out.logits.clone())
    assert difference(torch.cat(pieces, 1), whole) < 1e-4


def test_compiled_decoding_over_a_half_cache_forms_no_keys():
    """Neither keys nor cos and sin per layer: two tables are written for all layers."""
    torch._dynamo.reset()
    model = model_of(kind="half").float()
    ids, targets = some_tokens(model), []
    cache = StaticCache(config=model.config, max_cache_len=32)

    def collect(graph, _):
        targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    compiled = torch.compile(model.forward, fullgraph=True, backend=collect)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        compiled(ids[:, 10:11], past_key_values=cache)
    assert model.config.num_hidden_layers > 1
    assert sum("materialized" in target for target in targets) == 2
    assert not any("scaled_dot_product" in target for target in targets)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_float16_survives_queries_of_ten_thousand(form, backend):
    """With |q| of 1e4 and scores of 1e7, attention weights are finite and match float64."""
    exact, scale = model_of(form), 1e4
    ids = some_tokens(exact)
    for _ in range(2):  # first with weights near one-hot, so that only the lengths change then
        for attention in attentions(exact):
            attention.q_proj.weight.data.mul_(scale)
        expected, layers = attended(exact, ids)
        largest = max(q.norm(dim=-1).max().item() for _, q, _, _ in layers)
        scale = 1e4 / largest
    assert 9_900 < largest < 10_100
    model = collinear("Llama", form)
    model.load_state_dict(exact.state_dict())
    model.half().set_attn_implementation(backend)
    found = logits(model, ids)
    assert found.isfinite().all()
    # Softmax is nearly one-hot here, and float16 queries may pick a neighbour: most rows agree.
    close = (found - expected).abs().amax(-1) < 0.05 * expected.abs().max()
    assert close.float().mean() > 0.8
    padded, mask = left_padded(ids, 3)
    assert logits(model, padded, attention_mask=mask)[:, 3:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_within_its_rounding(form, dtype):
    exact, rough = model_of(form), collinear("Llama", form)
    for weight in exact.parameters():
        if weight.dim() == 2:
            weight.data.div_(4)
    ids = some_tokens(exact)
    rough.load_state_dict(exact.state_dict())
    rough.to(dtype)
    # About forty roundings in a row between the embedding and the logits.
    assert difference(logits(rough, ids), logits(exact, ids)) < 40 * torch.finfo(dtype).eps
    for rough.config.kv_cache in ("full", "half"):
        assert greedy(rough, ids).shape == (2, 12)
