"""`CoCAAttention`, the module for any model."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

import oracle
from coca_attention import CoCAAttention
from coca_attention.ops import FORMS, DistanceMap, Linear, Rotation
from covering import covering


def attend_by_oracle(layer: CoCAAttention, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape

    def heads(projected, width):
        return projected.view(batch, length, -1, width).transpose(1, 2)

    pairs, free = layer.head_dim // 2, layer.free_pairs
    t = heads(layer.t_proj(x), pairs + free)
    output = oracle.coca_attention(
        heads(layer.q_proj(x), layer.head_dim),
        torch.cat((t[..., : pairs - free].relu(), t[..., pairs - free :]), dim=-1),
        heads(layer.v_proj(x), layer.head_dim),
        form=layer.form.name,
    )
    return layer.o_proj(output.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize(
    ("form", "sizes", "free"), covering(FORMS, [(32, 4, None), (32, 4, 2), (30, 5, 1)], [0, 2])
)
def test_forward_agrees_with_the_oracle(form, sizes, free):
    torch.manual_seed(0)
    layer = CoCAAttention(*sizes, form=form, bias=True, free_pairs=free).double()
    x = torch.randn(2, 17, sizes[0], dtype=torch.float64) * 5
    assert (layer(x) - attend_by_oracle(layer, x)).abs().max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotation", [None, Rotation(8, decay=1.5, decay_length=3.0)])
def test_layers_share_a_cache_of_transformers_by_their_index(form, rotation):
    torch.manual_seed(0)
    layers = [
        CoCAAttention(32, 4, 2, form=form, rotation=rotation, layer_idx=index).double()
        for index in range(2)
    ]
    x, cache = torch.randn(2, 17, 32, dtype=torch.float64) * 5, DynamicCache()
    whole = layers[1](layers[0](x))
    pieces = [
        layers[1](layers[0](part, cache=cache), cache=cache) for part in x.split([8, 1, 4, 4], 1)
    ]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-12
    layers[1].rotation = Rotation(8)  # as by default
    changed = (layers[1](layers[0](x)) - whole).abs().max()
    assert changed == 0 if rotation is None else changed > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions_than_the_layers_are_refused_outside_of_autocast(dtype):
    layer, states = CoCAAttention(32, 4), torch.randn(1, 5, 32, dtype=dtype)
    with pytest.raises(TypeError, match=f"dtype, torch.float32, got {dtype}: convert either"):
        layer(states)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(states).dtype == torch.bfloat16
    assert layer.to(dtype)(states).dtype == dtype


def test_a_cache_is_asked_for_its_length_once():
    asked = []

    class Cache(DynamicCache):
        def get_seq_length(self, layer_idx=0):
            asked.append(layer_idx)
            return super().get_seq_length(layer_idx)

    CoCAAttention(32, 4, layer_idx=0)(torch.randn(1, 3, 32), cache=Cache())
    assert asked == [0]


def test_positions_and_mask_for_left_padding():
    torch.manual_seed(0)
    layer = CoCAAttention(32, 4).double()
    x = torch.randn(1, 12, 32, dtype=torch.float64) * 5
    padded = torch.cat((torch.randn(1, 3, 32, dtype=torch.float64), x), 1)
    mask = torch.ones(1, 1, 1, 15, dtype=torch.bool)
    mask[..., :3] = False
    positions = (torch.arange(15) - 3).clamp(min=0)
    output = layer(padded, positions=positions, attention_mask=mask)[:, 3:]
    assert (output - layer(x)).abs().max() < 1e-12


def test_a_decay_counts_positions_that_skip_some_also_with_a_cache():
    torch.manual_seed(0)
    rotation = Rotation(8, decay=1.5, decay_length=3.0)
    layer = CoCAAttention(32, 4, rotation=rotation, layer_idx=0).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64) * 5
    positions = torch.tensor([0, 1, 2, 20, 21, 22, 23, 50, 51, 80, 81, 82])
    for places in (positions, positions.expand(2, -1) + torch.tensor([[0], [3]])):
        expected, cache = layer(x, positions=places), DynamicCache()
        for start, stop in ((0, 5), (5, 6), (6, 10), (10, 12)):
            part = layer(x[:, start:stop], positions=places[..., start:stop], cache=cache)
            assert (part - expected[:, start:stop]).abs().max() < 1e-12


def test_a_temperature_is_for_causal_attention():
    layer = CoCAAttention(32, 4, rotation=Rotation(8, temperature=4))
    with pytest.raises(ValueError, match="a temperature counts the tokens before a query"):
        layer(torch.randn(1, 3, 32), is_causal=False)


def test_rotary_scaling_reaches_the_scores():
    torch.manual_seed(0)
    plain = CoCAAttention(32, 4).double()
    scaled = CoCAAttention(32, 4, rotation=Rotation(8, rule=Linear(2.0))).double()
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 20, 32, dtype=torch.float64) * 5
    assert torch.allclose(
        scaled(x, positions=torch.arange(20) * 2), plain(x, positions=torch.arange(20))
    )


def test_the_t_projection_has_half_the_rows_of_a_key_projection():
    torch.manual_seed(0)
    layer = CoCAAttention(64, 4, 2, bias=True)
    assert layer.t_proj.weight.shape == (2 * 16 // 2, 64)
    for name in ("weight", "bias"):
        t, v = getattr(layer.t_proj, name), getattr(layer.v_proj, name)
        assert t.abs().max() <= v.abs().max() * 2**-0.5 * 1.05  # uniform, narrowed by √2
    assert layer.v_proj.weight.shape == (2 * 16, 64)


def test_dropout_applies_only_in_training():
    torch.manual_seed(0)
    layer = CoCAAttention(32, 4, dropout=0.5)
    x = torch.randn(1, 20, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((30, 4), {}, "not a multiple of num_heads"),
        ((12, 4), {}, "must be even"),
        ((32, 0), {}, "num_heads must be a whole number of at least 1, got 0"),
        (
            (32, 4),
            {"rotation": Rotation(8, distance_map=DistanceMap.limited(4))},
            "has no distance map: leave",
        ),
        ((32, 4), {"free_pairs": 5}, "free_pairs must be .* between 0 and 4, got 5"),
        (("32", 4), {}, "hidden_size must be a whole number of at least 1, got '32'"),
        ((32, 4, 2.0), {}, r"num_key_value_heads must be a whole number of at least 1, got 2\.0"),
        *(
            ((32, 4), {"dropout": share}, f"dropout must be .* from 0 to 1, got {share}")
            for share in (-1, 1.5)
        ),
        (
            (32, 4),
            {"window": 0},
            "window, a number of tokens, must be a whole number of at least 1",
        ),
        ((32, 4), {"rotation": Rotation(16)}, "at most the head width 8; got 16"),
        ((32, 4), {"rotation": 1e4}, r"a Rotation, such as Rotation\(8\), got 10000\.0"),
    ],
)
def test_invalid_sizes_are_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        CoCAAttention(*sizes, **options)


@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32)])
def test_nothing_in_nothing_out(shape):
    for rotation in (None, Rotation(8, decay=1.0, temperature=4)):
        assert CoCAAttention(32, 4, 2, rotation=rotation)(torch.zeros(shape)).shape == shape


def test_weights_are_made_on_a_device_in_a_dtype():
    layer = CoCAAttention(16, 2, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    assert CoCAAttention(16, 2, dtype=torch.float64)(x).dtype == torch.float64


HIDDEN, PLACES = r"hidden states of shape \(B, T, 32\), got", r"shape \(3,\) or \(1, 3\), got"
STATIC = StaticCache(
    config=LlamaConfig(num_attention_heads=4, hidden_size=32, num_hidden_layers=1), max_cache_len=16
)


@pytest.mark.parametrize(
    ("shape", "index", "options", "message"),
    [
        *((shape, None, {}, HIDDEN) for shape in ((5, 32), (2, 5, 16), (32,))),
        *(
            ((1, 3, 32), None, {"positions": torch.zeros(shape)}, PLACES)
            for shape in ((2, 3), (4,), (1, 2))
        ),
        (
            (1, 3, 32), None, {"attention_mask": torch.ones(1, 1, 3, 4, dtype=torch.bool)},
            r"here \(1, 4, 3, 3\), got shape \(1, 1, 3, 4\)",
        ),
        ((1, 4, 32), None, {"cache": DynamicCache()}, "a different layer_idx for each"),
        (
            (1, 4, 32), 0, {"cache": STATIC},
            "expected all 4 keys from the cache, got 16; StaticCache",
        ),
    ],
)  # fmt: skip
def test_unsupported_inputs_are_refused(shape, index, options, message):
    with pytest.raises(ValueError, match=message):
        CoCAAttention(32, 4, layer_idx=index)(torch.randn(shape), **options)


def test_the_cache_that_linear_layers_ask_for_is_the_one_they_take():
    torch.manual_seed(0)
    made = {"form": "strict", "linear": True, "dtype": torch.float64}
    layers = [CoCAAttention(32, 4, layer_idx=index, **made) for index in range(2)]
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="for N layers of CoCAAttention") as caught:
        layers[0](x, cache=DynamicCache())
    names = {"DynamicCache": DynamicCache, "LlamaConfig": LlamaConfig, "N": len(layers)}
    cache = eval(str(caught.value).partition("CoCAAttention ")[2], names)
    parts = [layers[1](layers[0](part, cache=cache), cache=cache) for part in x.split(4, 1)]
    assert (torch.cat(parts, 1) - layers[1](layers[0](x))).abs().max() < 1e-12
