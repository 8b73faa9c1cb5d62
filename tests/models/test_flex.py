"""FlexAttention computes CoCA and layers with roles as SDPA does; what it cannot is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from coca_attention.testing import decoded_logits, difference, logits, some_tokens
from families import left_padded, made, read_in_pieces

MODELS = ["strict", "roles"]


def dense(query, key, value, *, score_mod, block_mask, scale, enable_gqa, **_):
    """FlexAttention by its definition, which has gradients on a CPU and is not compiled."""
    sizes = len(query), 1, query.shape[-2], key.shape[-2]
    mask = create_mask(block_mask.mask_mod, *sizes, device=query.device)
    places = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    mask = score_mod(query.new_zeros(sizes), *places).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def uncompiled(*arguments, _compile, **options):
    """Transformers compiles its masks."""
    return create_block_mask(*arguments, **options)


@pytest.fixture(params=MODELS)
def pair(request, monkeypatch):
    """The same model with SDPA and with FlexAttention."""
    name = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    monkeypatch.setattr(name, dense)
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", uncompiled)
    models = [made(request.param).double() for _ in range(2)]
    models[1].set_attn_implementation("flex_attention")
    return models


def test_forward_and_gradients(pair):
    ids, found = some_tokens(pair[0], length=40), []
    for model in pair:
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    assert difference(*(logits(model, ids) for model in pair)) < 1e-12
    for name, gradient in found[0].items():
        # Without rotation a bias of the keys changes nothing: its gradient is rounding alone.
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-15, msg=name)


def test_padding_and_packed_documents(pair):
    ids, mask = left_padded(some_tokens(pair[0], length=30), 4)
    plain, flex = (logits(model, ids, attention_mask=mask)[mask.bool()] for model in pair)
    assert difference(flex, plain) < 1e-12
    places = torch.cat((torch.arange(20), torch.arange(14)))[None]
    packed = [logits(model, ids[1:], position_ids=places) for model in pair]
    assert difference(packed[1], packed[0]) < 1e-12


def test_caches(pair):
    ids = some_tokens(pair[0], length=30)
    whole = logits(pair[0], ids)
    assert difference(read_in_pieces(pair[1], ids, (20, 27, 30)), whole) < 1e-11
    assert difference(decoded_logits(pair[1], ids), whole) < 1e-11


@pytest.mark.parametrize(
    ("kind", "why"), [("roles with a decay", "a decay"), ("shifted", "a model with a distance map")]
)
def test_what_adds_to_scores_or_has_two_of_them_is_refused(kind, why):
    model = made(kind)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match=rf"{why} .* load the model with attn_implementation"):
        logits(model, some_tokens(model, length=40))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_compiled(kind):
    """The kernel itself, which on a CPU has no gradients."""
    torch._dynamo.reset()  # all models share Transformers' compiled function
    model = made(kind)
    ids = some_tokens(model, length=200)
    expected = logits(model, ids)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert difference(model(ids, use_cache=False).logits, expected) < 1e-5
