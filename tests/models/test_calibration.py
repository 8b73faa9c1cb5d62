"""T projections fitted to a model's own scores: sums, regression, errors."""

import copy

import pytest
import torch

from coca_attention import convert
from coca_attention.models import calibration
from coca_attention.ops.positions import split_pairs
from coca_attention.testing import logits
from coca_lab.analysis.capture import collect_layers
from families import vanilla
from processes import in_processes

# Models without a norm on keys: grouped heads, biases, partial rotary, pairs (2j, 2j + 1).
PLAIN = {
    "Llama": {},
    "Qwen2": {},
    "Phi-3": {},
    "GPT-NeoX": {},
    "GLM-4": {},
    "Cohere": {"use_qk_norm": False},
}
IDS = torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(2))


def targets(layer, form, text):
    """Σ_m a s u and Σ_m a u² of a layer, (T, G, P), written out over all m, n, pairs and heads."""
    query, key = layer.query[text].double(), layer.key[text].double()
    heads, length, _ = query.shape
    span = layer.rotary_width
    q, k = (torch.complex(*split_pairs(x, layer.interleaved, span)) for x in (query, key))
    theta = torch.zeros(q.shape[-1], dtype=torch.float64)
    theta[: len(layer.theta)] = layer.theta
    k = k.repeat_interleave(heads // len(key), dim=0)
    turn = torch.polar(
        torch.ones(length, len(theta)).double(), torch.outer(torch.arange(length), theta)
    )
    rotated, rotated_key = q * turn, k * turn
    scores = torch.einsum("hmp,hnp->hmnp", rotated, rotated_key.conj()).real
    if form == "strict":
        unit = torch.einsum("hmp,np->hmnp", q.abs() ** 2 * turn, turn.conj()).real
    else:
        effective = torch.complex(q.real * rotated.real, q.imag * rotated.imag)
        unit = torch.einsum("hmp,np->hmnp", effective, (turn * (1 + 1j)).conj()).real
    past = torch.ones(length, length).tril().bool()
    attention = (scores.sum(-1) * layer.scale).masked_fill(~past, -torch.inf).softmax(-1)
    sums = []
    for product in (scores * unit, unit * unit):
        each = (attention.unsqueeze(-1) * product).sum(1)  # (H, T, P)
        sums.append(each.unflatten(0, (len(key), -1)).sum(1).transpose(0, 1))
    return sums


@pytest.mark.parametrize("form", ["slack", "strict"])
@pytest.mark.parametrize("family", PLAIN)
def test_the_projection_is_the_regression_of_the_nearest_coefficients(family, form):
    model = vanilla(family, **PLAIN[family])
    for weight in model.parameters():
        weight.data.mul_(0.5)  # else every query attends to one key alone
    layers = collect_layers(model, IDS)
    inputs = calibration.attention_inputs(
        model,
        [getattr(x, "self_attn", None) or x.attention for x in model.base_model.layers],
        IDS,
    )
    made = convert(copy.deepcopy(model), form, init="calibrated", calibration=IDS)
    for layer, read, block in zip(layers, inputs, made.base_model.layers, strict=True):
        attention = getattr(block, "self_attn", None) or block.attention
        sums = [targets(layer, form, text) for text in range(len(IDS))]
        products, squares = (torch.cat(x).flatten(1) for x in zip(*sums, strict=True))
        wanted = products / (squares + calibration.FLOOR * squares.mean(0))
        x = read.flatten(0, 1).double()
        if attention.t_proj.bias is not None:
            x = torch.cat((x, torch.ones(len(x), 1).double()), -1)
        ridge = (calibration.RIDGE * len(x) * (x**2).mean()).sqrt()
        rows = torch.linalg.lstsq(
            torch.cat((x, ridge * torch.eye(x.shape[1]).double())),
            torch.cat((wanted, torch.zeros(x.shape[1], wanted.shape[1]).double())),
        ).solution.T
        found = attention.t_proj.weight.double()
        assert torch.allclose(found, rows[:, : found.shape[1]], rtol=1e-3, atol=1e-3 * rows.std())
        if attention.t_proj.bias is not None:
            bias = attention.t_proj.bias.double()
            assert torch.allclose(bias, rows[:, -1], rtol=1e-3, atol=1e-3 * rows.std())


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("Llama", {"init": "calibrated"}, "needs calibration, token ids"),
        ("Llama", {"init": "calibrated", "calibration": IDS[0]}, "got .7,"),
        ("Llama", {"init": "calibrated", "calibration": IDS + 90}, "between 0 and 96"),
        ("Llama", {"calibration": IDS}, "calibration requires init calibrated"),
        ("Qwen3", {"init": "calibrated", "calibration": IDS}, "normalise their keys"),
    ],
)
def test_unsupported_calibration_is_refused_and_changes_nothing(family, arguments, message):
    model = vanilla(family)
    kind, before = type(model), logits(model, IDS)
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments)
    assert type(model) is kind and torch.equal(logits(model, IDS), before)


def test_calibration_leaves_no_hooks_and_keeps_the_mode():
    model = convert(vanilla("Llama").train(), init="calibrated", calibration=IDS)
    assert model.training
    attention = model.base_model.layers[0].self_attn
    assert not attention._forward_pre_hooks and attention.t_proj.weight.requires_grad


@pytest.mark.parametrize(("family", "processes"), [("Llama", 2), ("Qwen2", 2), ("Llama", 4)])
def test_processes_share_the_texts(family, processes, tmp_path):
    """Two have two texts and one of the three; four have too few to share."""
    alone = convert(vanilla(family), "strict", init="calibrated", calibration=IDS)

    def share(group):
        model = vanilla(family)
        read = []
        model.register_forward_pre_hook(lambda *_: read.append(1))
        convert(model, "strict", init="calibrated", calibration=IDS, group=group)
        weights = {n: x for n, x in model.state_dict().items() if "t_proj" in n}
        torch.save((len(read), weights), tmp_path / str(group.rank()))

    in_processes(processes, share)
    found = [torch.load(tmp_path / str(rank)) for rank in range(processes)]
    assert [read for read, _ in found] == ([2, 1] if processes == 2 else [3] * 4)
    assert len(found[0][1]) >= 2
    for name, weight in found[0][1].items():
        assert all(torch.equal(weight, weights[name]) for _, weights in found)
        torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-6, atol=1e-7)
