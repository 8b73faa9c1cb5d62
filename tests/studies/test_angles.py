"""Angles, borders, bounds and shifts: what is captured, and vectors whose answer is known."""

import cmath
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.ops import Rotation
from conftest import tiny_model
from covering import mostly_slow
from families import FAMILIES, VARIED, collinear, vanilla
from studies.angles import bounds, figure3, figure7, shifts
from studies.angles.bounds import collinear_bound, rotary_bound, rotary_scores, steps, violations
from studies.angles.figure3 import anomalous_share
from studies.angles.figure7 import borders_crossed
from studies.angles.layers import (
    TURN,
    initial_angles,
    pairs_at,
    pairs_of_text,
    read_layers,
    rotary_as_free_pairs,
    score_coefficients,
    score_rows,
)

LENGTH = 24
FORMS = ["vanilla", "slack", "strict", "magnitude"]
# Every family's projections, and those of its CoCA models in one of the forms.
PAIRS = [(family, "vanilla") for family in FAMILIES]
PAIRS += [(family, FORMS[1 + i % 3]) for i, family in enumerate(FAMILIES)]


def some_ids(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


def layers_of(model, length: int = LENGTH):
    return read_layers(rotary_as_free_pairs(model), some_ids(length))[0]


# What is captured


@pytest.mark.parametrize(
    ("family", "form"),
    mostly_slow(PAIRS, [pair for pair in PAIRS if pair[0] in VARIED]),
)
def test_captured_scores_are_those_of_attention(family, form, monkeypatch):
    """And the coefficients of pairs that rotate give them, too."""
    model = (vanilla(family) if form == "vanilla" else collinear(family, form)).double()
    sdpa, computed = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def spy(module, query, key, value, mask, scaling=None, **kwargs):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        computed.append((query @ keys.transpose(-2, -1) * scaling)[0])
        return sdpa(module, query, key, value, mask, scaling=scaling, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    with torch.no_grad():
        logits = model(some_ids()[None]).logits[0]
    monkeypatch.undo()
    layers, found = read_layers(rotary_as_free_pairs(model), some_ids())
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert [layer.index for layer in layers] == [0, 1] and len(computed) == 2
    queries, keys = torch.tensor([5, 9, 23, 23]), torch.tensor([4, 0, 1, 20])
    for layer, scores in zip(layers, computed, strict=True):
        assert layer.form == ("rope" if form == "vanilla" else form)
        rows = score_rows(layer, torch.arange(LENGTH))
        # Transformers' own cos and sin are of float32.
        torch.testing.assert_close(rows, scores, rtol=1e-4, atol=1e-4 * scores.abs().max().item())
        coefficients, magnitudes = score_coefficients(layer, queries, keys)
        rotated = rotary_scores(coefficients, queries - keys, layer.theta)
        # What is not rotated scores the same at any position: leave it out on the other side.
        blind = replace(layer, query=layer.query.clone())
        blind.query[..., layer.rotation.width :] = 0
        expected = score_rows(blind, queries)[:, torch.arange(4), keys] / layer.scale
        torch.testing.assert_close(rotated, expected)
        angles = initial_angles(coefficients)[coefficients.abs() > 0]
        if form in ("strict", "magnitude"):
            assert not angles.any()
            torch.testing.assert_close(coefficients.abs(), magnitudes)
        else:
            assert angles.max() > 1


def test_windows_layers_with_roles_and_temperatures_are_captured():
    for family, windows in (("Gemma 3", [8, None]), ("Mistral", [8] * 2), ("Llama", [None] * 2)):
        assert [layer.window for layer in layers_of(vanilla(family))] == windows
    model = vanilla("GPT-NeoX", layer_types=["sliding_attention", "full_attention"])
    model.config.sliding_window = 6
    model.config.rope_parameters |= {"turning_pairs": 0, "temperature": 16, "decay": 1.5}
    free = {"sliding_attention": 0, "full_attention": 4}
    model = convert(model, "strict", free_pairs=free).double().eval()
    (layer,) = layers_of(model)  # the other has no pairs that turn
    assert (layer.index, layer.window, layer.form) == (0, 6, "strict")
    rows, keys = torch.tensor([4, 11, 23]), torch.arange(LENGTH)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(some_ids()[None], output_attentions=True).attentions[0][0]
    distance = rows[:, None] - keys
    hidden = (distance < 0) | (distance > layer.farthest(LENGTH))
    found = score_rows(layer, rows).masked_fill(hidden, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, weights[:, rows].double(), rtol=1e-4, atol=1e-6)
    # A temperature, and a decay by distance.
    whole = layers_of(vanilla("Llama").double())[0]
    hot = replace(whole, rotation=replace(whole.rotation, temperature=7, decay=1.5))
    factor = ((rows + 1).clamp(max=LENGTH).double() + 1).log() / math.log(8)
    changed = score_rows(hot, rows) - hot.rotation.bias(rows, keys, torch.float64)
    torch.testing.assert_close(changed, score_rows(whole, rows) * factor[:, None])


def test_what_has_no_angles_by_distance_is_refused():
    with pytest.raises(UserError, match=r"Alibi\w+ is not supported"):
        layers_of(tiny_model("alibi"))
    damaged = vanilla("Llama")
    with torch.no_grad():
        damaged.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="layer 1: queries or keys are not finite"):
        layers_of(damaged)
    assert not any(module._forward_pre_hooks for module in damaged.modules())
    limited = convert(vanilla("Llama"), "rope", near=20)
    assert len(layers_of(limited, 20)) == 2
    with pytest.raises(UserError, match=r"distances of 20 tokens and more count as others"):
        layers_of(limited, 21)
    nothing = vanilla("Llama")
    nothing.config.rope_parameters["turning_pairs"] = 0
    with pytest.raises(UserError, match="no layer has pairs that turn"):
        layers_of(convert(nothing, "strict"))


def test_pairs_are_drawn_uniformly_inside_the_window():
    generator = np.random.default_rng(0)
    layer = layers_of(vanilla("Llama"), 6)[0]
    for window in (None, 3):
        queries, keys = pairs_of_text(replace(layer, window=window), 20_000, generator)
        every = [(m, n) for m in range(6) for n in range(m) if m - n < (window or 6)]
        counts = dict.fromkeys(every, 0)
        for pair in zip(queries.tolist(), keys.tolist(), strict=True):
            counts[pair] += 1
        expected = 20_000 / len(every)
        # Five standard deviations.
        assert all(abs(n - expected) < 5 * expected**0.5 for n in counts.values()), counts
    assert len(pairs_of_text(replace(layer, window=1), 10, generator)[0]) == 0
    queries, keys = pairs_at(np.repeat([1, 2, 64], 3), 100, generator)
    assert (queries - keys).tolist() == [1] * 3 + [2] * 3 + [64] * 3
    assert keys.min() >= 0 and queries.max() < 100


# Figures 3 and 7


@pytest.mark.parametrize("window", [None, 2, 7, 100])
@pytest.mark.parametrize("length", [2, 3, 12, 40])
def test_anomalous_pairs_match_a_count(length, window):
    farthest = min(length, window or length) - 1
    theta = torch.tensor([0.05, 0.31, 2.0, 0.0], dtype=torch.float64)
    for angle in (0.0, 3.0, 3.2, 4.5, 6.2, TURN - 1e-6):
        angles = torch.full((4,), angle, dtype=torch.float64)
        found = anomalous_share(angles, theta, length, farthest).tolist()
        distances = [m - n for m in range(length) for n in range(m) if m - n <= farthest]
        for share, turn in zip(found, theta.tolist(), strict=True):
            tau = (TURN - angle) / turn if turn and angle > math.pi else 0.0
            assert share == pytest.approx(sum(d < tau for d in distances) / len(distances))


@given(
    angle=st.floats(0.01, 6.27).filter(lambda x: abs(x - math.pi) > 0.01),
    theta=st.sampled_from([1.0, 0.31, 0.07, 0.004]),
    distance=st.integers(0, 300),
)
def test_borders_are_the_reversals_of_the_score(angle, theta, distance):
    angles = torch.tensor([angle], dtype=torch.float64)
    peaks, troughs, returns = borders_crossed(
        angles, torch.tensor([theta], dtype=torch.float64), distance
    )
    turned = angle + torch.linspace(0, distance, 40_001, dtype=torch.float64) * theta
    rising = -turned.sin() > 0
    changes = rising[1:] != rising[:-1]
    # At the very end the grid and the formula may differ by round-off.
    if (turned[-1].remainder(math.pi) - math.pi / 2).abs() > math.pi / 2 - 1e-6:
        return
    assert peaks.item() == (changes & rising[:-1]).sum()
    assert troughs.item() == (changes & ~rising[:-1]).sum()
    assert returns.item() == math.floor(distance * theta / TURN)


def test_round_off_does_not_make_a_collinear_key_a_full_turn():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(10_000, generator=generator, dtype=torch.complex128)
    key = query * torch.rand(10_000, generator=generator, dtype=torch.float64)
    product = query * key.conj()
    assert (product.angle() < 0).any()  # round-off there is
    assert not initial_angles(product).any()
    almost = torch.polar(*torch.tensor([1.0, TURN - 1e-6], dtype=torch.float64))
    assert initial_angles(almost).item() == pytest.approx(TURN - 1e-6, abs=1e-12)


def planted(angle: float):
    """A Llama whose first layer has this angle between every query and key of equal tokens."""
    model = vanilla("Llama", num_key_value_heads=4).double()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        q = attention.q_proj.weight.view(4, 2, 4, 32)  # heads, members of a pair, pairs, hidden
        cos, sin = math.cos(-angle), math.sin(-angle)
        k = torch.stack((q[:, 0] * cos - q[:, 1] * sin, q[:, 0] * sin + q[:, 1] * cos), dim=1)
        attention.k_proj.weight.copy_(k.view(32, 32))
    return model


@pytest.mark.parametrize("angle", [0.7, 2.9, 3.4, 5.9])
def test_a_planted_angle_is_measured(angle):
    model = rotary_as_free_pairs(planted(angle))
    layer = read_layers(model, torch.full((60,), 7))[0][0]
    queries, keys = pairs_of_text(layer, 50, np.random.default_rng(0))
    found = initial_angles(score_coefficients(layer, queries, keys)[0])
    torch.testing.assert_close(found, torch.full_like(found, angle))


# Bounds


FLOATS = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def coefficients(draw):
    """h_j of some pairs of tokens, (N, P), and their distances (N,)."""
    pairs, rows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    values = draw(st.lists(FLOATS, min_size=2 * rows * pairs, max_size=2 * rows * pairs))
    real, imaginary = torch.tensor(values).double().view(2, rows, pairs)
    distances = draw(st.lists(st.integers(1, 100_000), min_size=rows, max_size=rows))
    return torch.complex(real, imaginary), torch.tensor(distances)


def printed(h: list[complex], distance: int, theta: list[float], collinear: bool) -> float:
    """Right side of Eq. 19 (or 20) as a loop, with h zero after the last pair."""
    step = max(abs(b - a) for a, b in zip(h, [*h[1:], 0], strict=True))
    total = 0.0
    for j in range(len(h)):
        turned = sum(cmath.exp(1j * distance * theta[k]) for k in range(j + 1))
        total += abs(turned.real if collinear else turned)
    return step * total


@given(coefficients())
def test_the_inequalities_hold_and_the_bounds_match_the_printed_ones(drawn):
    h, distances = drawn
    theta = Rotation(2 * h.shape[-1]).frequencies()
    size = h.abs().sum(-1)
    rotary = rotary_bound(h, distances, theta)
    collinear = collinear_bound(h.abs(), distances, theta)
    assert (collinear <= rotary * (1 + 1e-9) + 1e-9).all()  # never looser
    assert not violations(rotary_scores(h, distances, theta).abs(), rotary, size)
    assert not violations(rotary_scores(h.abs(), distances, theta).abs(), collinear, size)
    assert not violations(steps(h.abs()), steps(h), size.unsqueeze(-1))
    for row, distance in enumerate(distances.tolist()):
        values, angles = h[row].tolist(), theta.tolist()
        expected = printed(values, distance, angles, collinear=False)
        assert rotary[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        expected = printed([abs(x) for x in values], distance, angles, collinear=True)
        assert collinear[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_violations_are_counted_beyond_round_off():
    left = torch.tensor([1.0, 2.0, 3.0 + 1e-12, 0.0]).double()
    right = torch.tensor([2.0, 1.0, 3.0, 0.0]).double()
    assert violations(left, right, torch.ones(1)) == 1


# Shifts


def test_a_shift_ignores_what_softmax_ignores():
    before = torch.tensor([[[0.0, 2.0, 50.0]]], dtype=torch.float64)
    visible = torch.tensor([[True, True, False]])
    # The same added to all that a query sees, and anything to what it does not see.
    changed, _, moved = shifts.changes(before, before + torch.tensor([7.0, 7.0, -90.0]), visible)
    assert changed == moved == 0
    # Exchanged: the change has twice the spread, the attention moves by a difference of weights.
    changed, spread, moved = shifts.changes(before, before[..., [1, 0, 2]], visible)
    weight = 1 / (1 + math.exp(-2.0))
    assert (changed / spread).sqrt().item() == pytest.approx(2.0)
    assert moved.item() == pytest.approx(2 * weight - 1)


# The commands


def table(text: str) -> list[list[float]]:
    """The rows of numbers in what a command prints."""
    lines = [
        re.findall(r"-?\d[\d.e+,-]*", line) for line in text.splitlines() if line[:1].isdigit()
    ]
    return [[float(x.replace(",", "")) for x in line] for line in lines]


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer, text_folder):
    """The words that all commands take, with a slack model and with a rotary one."""
    words = ["--source", str(text_folder), "--documents=2", "--pairs=64"]
    made = {}
    for kind in ("slack", "rope", "strict"):
        folder = tmp_path_factory.mktemp(kind)
        tiny_model(kind).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made[kind] = [str(folder), *words]
    return made


def run(module, words, monkeypatch, capsys) -> str:
    monkeypatch.setattr("sys.argv", [module.__name__, *words])
    module.main()
    return capsys.readouterr().out


def test_figure_3_says_how_many_angles_exceed_a_half_turn(small, monkeypatch, capsys, tmp_path):
    chart = tmp_path / "chart.svg"
    for kind, most in (("rope", 0.8), ("slack", 0.6), ("strict", 0.0)):
        words = [*small[kind], "--lengths", "32", "--chart", str(chart)]
        for _, above, anomalous, _ in table(run(figure3, words, monkeypatch, capsys)):
            assert anomalous <= above <= 100 * most and (above > 5) == (kind != "strict")
        assert "density (1: uniform)" in chart.read_text()


def test_figure_7_has_the_borders_of_collinear_keys_beside_them(small, monkeypatch, capsys):
    lines = run(figure7, [*small["strict"], "--lengths", "32", "64"], monkeypatch, capsys)
    found = [line.split()[-5:] for line in lines.splitlines() if line.split()[-1].isdigit()]
    assert len(found) == 4  # two layers at two lengths
    for peaks, troughs, returns, both, _ in found:
        assert float(peaks) + float(troughs) == pytest.approx(float(both), abs=0.02)
        assert float(returns) <= float(peaks)


def test_the_bounds_hold_in_models(small, monkeypatch, capsys, tmp_path):
    for kind in small:
        words = [*small[kind], "--chart", str(tmp_path / "chart.svg")]
        found = table(run(bounds, words, monkeypatch, capsys))
        for _, scores, *wrong, other in found[:2]:
            assert scores > 0 and wrong == [0, 0, 0] and (kind != "strict" or other == 0)
        distances = [row[0] for row in found[2:]]
        assert distances == [2**i for i in range(len(distances))] and len(distances) > 3
        assert all(0 < score <= 1 and score <= any_angle for _, score, any_angle, _ in found[2:])


def test_only_slack_depends_on_where_a_text_begins(small, monkeypatch, capsys):
    for kind in small:
        text = run(shifts, [*small[kind], "--shifts", "1", "100"], monkeypatch, capsys)
        shares, changes, nats = re.split(r"\n(?=.*score change|moved by\n)", text)
        for _, share in table(shares):
            assert 0.1 < share < 0.9 if kind == "slack" else share == 0
        figures = [[float(x) for x in line.split()[-2:]] for line in changes.splitlines()[2:]]
        assert len(figures) == 4
        for change, moved in figures:
            assert (change > 0.05 and moved > 0.001) if kind == "slack" else change < 1e-12
        same, *others = (row[1] for row in table(nats))
        assert all((abs(other - same) > 1e-3) == (kind == "slack") for other in others)
