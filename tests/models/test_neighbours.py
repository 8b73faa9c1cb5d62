"""Models used with other features: precision, PEFT, pipelines, decoding strategies."""

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    TextStreamer,
    pipeline,
)

from coca_attention.models import set_rotary_scaling
from coca_attention.models.attention import eager_attention
from coca_attention.ops import attend_half
from coca_attention.testing import difference, logits, some_tokens
from families import FAMILIES, collinear

FORMS = ["slack", "strict", "magnitude"]
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def greedy(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_float16_survives_queries_of_ten_thousand(form, backend):
    """With |q| of 1e4 and scores of 1e7, attention weights are finite and match float64."""
    exact = collinear("Llama", form).double()
    with torch.no_grad():
        for layer in exact.model.layers:
            # Queries in the direction of one hidden state, to know their length.
            layer.self_attn.q_proj.weight.mul_(1e4)
    ids = some_tokens(exact)
    sizes = []
    for layer in exact.model.layers:
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, out: sizes.append(out.unflatten(-1, (-1, 8)).norm(dim=-1).max().item())
        )
    expected = logits(exact, ids)
    scale = 1e4 / max(sizes)
    with torch.no_grad():
        for layer in exact.model.layers:
            layer.self_attn.q_proj.weight.mul_(scale)
    sizes.clear()
    expected = logits(exact, ids)
    assert 9_900 < max(sizes) < 10_100
    model = collinear("Llama", form)
    model.load_state_dict(exact.state_dict())
    model.half().set_attn_implementation(backend)
    found = logits(model, ids)
    assert found.isfinite().all()
    # Softmax is nearly one-hot here, and float16 queries may pick a neighbour: most rows agree.
    close = (found - expected).abs().amax(-1) < 0.05 * expected.abs().max()
    assert close.float().mean() > 0.8
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    mask = (padded != 0).long()
    assert logits(model, padded, attention_mask=mask)[:, 3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_within_its_rounding(form, dtype):
    exact = collinear("Llama", form).double()
    with torch.no_grad():
        for weight in exact.parameters():
            if weight.dim() == 2:
                weight.div_(4)
    ids = some_tokens(exact)
    rough = collinear("Llama", form)
    rough.load_state_dict(exact.state_dict())
    rough.to(dtype)
    # About forty roundings in a row between the embedding and the logits.
    assert difference(logits(rough, ids), logits(exact, ids)) < 40 * torch.finfo(dtype).eps
    for kind in ("full", "half"):
        rough.config.kv_cache = kind
        cached = greedy(rough, ids)
        assert cached.shape == (2, 36)


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


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("form", "kind"), [(f, k) for f in FORMS for k in ("full", "half")])
def test_packed_documents_are_independent(form, kind, static):
    model = collinear("Llama", form).double()
    model.config.kv_cache = kind
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


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["full", "half"])
@pytest.mark.parametrize("form", FORMS)
def test_padding_in_the_middle_of_a_cache(form, kind, static):
    """Right-padded prompts, then more text: the keys' positions must not count the padding."""
    model = collinear("Llama", form).double()
    model.config.kv_cache = kind
    ids = some_tokens(model)
    cache = (
        StaticCache(config=model.config, max_cache_len=40)
        if static
        else DynamicCache(config=model.config)
    )
    prompt = torch.cat((ids[:, :8], torch.zeros(2, 3, dtype=torch.long)), 1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[:, 8:] = 0
    with torch.no_grad():
        model(prompt, attention_mask=mask, past_key_values=cache, use_cache=True)
        rest = []
        for start, stop in ((8, 13), (13, 14), (14, 24)):
            # The last piece ends in padding too.
            pads = 2 if stop == 24 else 0
            piece = torch.cat((ids[:, start:stop], torch.zeros(2, pads, dtype=torch.long)), 1)
            added = (torch.arange(piece.shape[1]) < stop - start).long().expand(2, -1)
            mask = torch.cat((mask, added), 1)
            out = model(piece, attention_mask=mask, past_key_values=cache).logits
            rest.append(out[:, : stop - start])
    assert difference(torch.cat(rest, 1), logits(model, ids)[:, 8:]) < 1e-12


def test_an_unknown_kind_of_cache_is_refused_at_run_time():
    model = collinear("Llama")
    model.config.kv_cache = "Half"
    with pytest.raises(ValueError, match="kv_cache must be one of full, half; got 'Half'"):
        model(some_tokens(model))


@pytest.mark.parametrize("family", ["Mistral", "Gemma 3", "Llama"])
def test_attention_kernels_receive_the_window(family, monkeypatch):
    """FlashAttention needs the window as an argument, not as a mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, told = collinear(family), []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def listening(*args, **kwargs):
        told.append(kwargs.get("sliding_window"))
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", listening)
    model(some_tokens(model))
    expected = {"Mistral": [8, 8], "Gemma 3": [8, None], "Llama": [None, None]}
    assert told == expected[family]


@pytest.mark.parametrize("kind", ["full", "half"])
@pytest.mark.parametrize("form", FORMS)
def test_custom_positions_with_a_cache(form, kind):
    model = collinear("Llama", form).double()
    model.config.kv_cache = kind
    ids = some_tokens(model)
    positions = torch.arange(1000, 1024).expand(2, 24)
    whole = logits(model, ids, position_ids=positions)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [
            model(ids[:, a:b], position_ids=positions[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 9), (9, 10), (10, 24))
        ]
    assert difference(torch.cat(pieces, 1), whole) < 1e-12
    moved = difference(whole, logits(model, ids))
    assert moved > 1e-2 if form == "slack" else moved < 1e-9


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma 3", "GPT-NeoX", "GLM-4"])
@pytest.mark.parametrize("form", FORMS)
def test_half_caches_are_decoded_without_forming_keys(family, form, monkeypatch):
    """Also with left padding; the logits match those of a single pass."""
    model = collinear(family, form).double()
    model.config.kv_cache = "half"
    calls = []

    def counted(*arguments, **options):
        calls.append(options["attention_mask"])
        return attend_half(*arguments, **options)

    monkeypatch.setattr("coca_attention.models.layer_pass.attend_half", counted)
    ids = some_tokens(model)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for given in (None, mask):
        calls.clear()
        whole = logits(model, ids, attention_mask=given)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = [
                model(
                    ids[:, a:b],
                    attention_mask=None if given is None else given[:, :b],
                    past_key_values=cache,
                ).logits
                for a, b in ((0, 20), (20, 21), (21, 22), (22, 24))
            ]
        seen = slice(5 if given is not None else 0, None)
        assert difference(torch.cat(pieces, 1)[:, seen], whole[:, seen]) < 1e-11
        assert len(calls) == 2 * len(model.base_model.layers)
        # A window smaller than the text is a mask too.
        assert given is None or any(call is not None for call in calls)


def test_half_caches_with_gaps_are_decoded_with_keys(monkeypatch):
    """With padding in the middle, positions are not consecutive."""
    model = collinear("Llama").double()
    model.config.kv_cache = "half"
    monkeypatch.setattr("coca_attention.models.layer_pass.attend_half", None)
    ids = some_tokens(model)
    mask = torch.ones_like(ids)
    mask[:, 7:9] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        last = model(ids[:, 20:21], attention_mask=mask[:, :21], past_key_values=cache).logits
    whole = logits(model, ids[:, :21], attention_mask=mask[:, :21])
    assert difference(last, whole[:, -1:]) < 1e-11


@pytest.mark.parametrize("family", FAMILIES)
def test_all_forms_but_slack_are_invariant_to_shifts(family):
    ids = some_tokens(collinear(family))
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    moved = {}
    for form in FORMS:
        model = collinear(family, form).double()
        shifted = logits(model, ids, position_ids=positions + 1000)
        moved[form] = difference(shifted, logits(model, ids, position_ids=positions))
    assert max(moved["strict"], moved["magnitude"]) < 1e-9  # the angles' round-off at position 1000
    assert moved["slack"] > 1e-3


@pytest.mark.parametrize("kind", ["full", "half"])
def test_assisted_decoding_and_prompt_lookup(kind):
    model, helper = collinear("Llama").double(), collinear("Llama", num_hidden_layers=1).double()
    model.config.kv_cache = helper.config.kv_cache = kind
    ids = some_tokens(model, batch=1)
    plain = greedy(model, ids, use_cache=False)
    assert torch.equal(greedy(model, ids, assistant_model=helper), plain)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=3), plain)


@pytest.mark.parametrize("kind", ["full", "half"])
def test_chunked_prefill(kind):
    model = collinear("Llama").double()
    model.config.kv_cache = kind
    ids = some_tokens(model)
    plain = greedy(model, ids, use_cache=False)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=7), plain)


def test_pipeline_and_streaming(tokenizer, capsys):
    model = collinear("Llama", vocab_size=len(tokenizer)).float()
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    text = generate("alpha1 beta2", generation_config=settings, return_full_text=False)
    ids = tokenizer("alpha1 beta2", return_tensors="pt").input_ids
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings,
                         streamer=streamer)  # fmt: skip
    expected = tokenizer.decode(out[0, ids.shape[1] :])
    assert text[0]["generated_text"] == expected
    assert expected.strip() in capsys.readouterr().out


def test_device_map(tmp_path):
    model = collinear("Llama", "strict")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    ids = some_tokens(model)
    assert torch.equal(logits(loaded.eval(), ids), logits(model, ids))
    automatic = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert torch.equal(logits(automatic.eval(), ids), logits(model, ids))


def test_prefix_tuning_requires_a_full_cache():
    model = collinear("Llama")
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(model, settings)
    ids = some_tokens(model)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert adapted.prompt_encoder.default.embedding.weight.grad.abs().max() > 0
    model.config.kv_cache = "half"
    with pytest.raises(ValueError, match=r'width 8.*width 4.*kv_cache = "full" for prefix tuning'):
        adapted(input_ids=ids)


def test_continuous_batching_works_with_a_full_cache():
    model = collinear("Llama").float()
    ids = some_tokens(model, batch=2)
    prompts = [ids[0].tolist(), ids[1, :9].tolist()]
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    results = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=small,
        progress_bar=False,
    )
    for prompt, result in zip(prompts, results.values(), strict=True):
        row = torch.tensor([prompt])
        alone = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=8,
                               min_new_tokens=8, do_sample=False, eos_token_id=None)  # fmt: skip
        assert result.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "scaling", "message"),
    [
        ("half", "none", r'continuous batching.*kv_cache = "full"'),
        ("full", "dynamic", "does not support dynamic scaling"),
    ],
)
def test_continuous_batching_is_refused(kind, scaling, message):
    model = collinear("Llama").float()
    model.config.kv_cache = kind
    set_rotary_scaling(model, scaling, factor=2.0)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3, 4, 5]], generation_config=settings, progress_bar=False)


def test_switching_the_kind_of_cache_is_refused():
    model = collinear("Llama")
    ids, cache = some_tokens(model), DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    model.config.kv_cache = "half"
    with pytest.raises(ValueError, match="keys of width 8 but this model adds keys of width 4"):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "half"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_generation(form, kind):
    """torch.compile with the default backend, one graph, a static cache, as generate() uses it."""
    torch._dynamo.reset()  # it compiles one function a few times only, and all models share theirs
    model = collinear("Llama", form).float()
    model.config.kv_cache = kind
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


@pytest.mark.parametrize("kind", ["full", "half"])
def test_exported_programs_contain_only_pytorch_operations(kind):
    """So that they can be loaded without this package."""
    model = collinear("Llama").float()
    model.config.kv_cache = kind
    ids = some_tokens(model)
    cache = StaticCache(config=model.config, max_cache_len=32)

    class OneToken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
            for index, layer in enumerate(cache.layers):
                self.register_buffer(f"keys{index}", layer.keys)
                self.register_buffer(f"values{index}", layer.values)

        def forward(self, ids):
            return self.model(input_ids=ids, past_key_values=cache).logits

    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        program = torch.export.export(OneToken().eval(), (ids[:, 10:11],), strict=False)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("scaled_dot_product" in target for target in targets)
    assert not any("coca" in target for target in targets)


def test_compiled_decoding_over_a_half_cache_forms_no_keys():
    """Neither keys nor cos and sin per layer: two tables are written for all layers."""
    torch._dynamo.reset()
    model = collinear("Llama").float()
    model.config.kv_cache = "half"
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
