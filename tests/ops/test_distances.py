"""Attention under a map of distances: far keys are scored as if at other distances."""

import math

import pytest
import torch

import oracle
from coca_attention.ops import (
    DistanceMap,
    Rotation,
    attention,
    coca_attention,
    distances,
    key_map,
    query_map,
)
from coca_attention.ops.distances import attend_by_distance, far_query_map
from coca_attention.ops.parts import document_parts
from coca_attention.ops.rules import UNSCALED
from covering import covering
from operands import assert_same_with_gradients, normal, operands, stock

WIDTH, NEAR = 16, 7
LIMITED = DistanceMap.limited(NEAR)
WAYS = ["parts", "whole masks", "masks of 5 queries"]


@pytest.fixture
def take(monkeypatch):
    """Selects one of `WAYS` to compute the same."""

    def selected(way: str) -> None:
        if way != "parts":
            monkeypatch.setattr(distances, "can_attend_parts", lambda *tensors: False)
            monkeypatch.setattr(attention, "QUERY_BLOCK", 5 if "5" in way else 1000)

    return selected


def map_of(kind: str, near: int) -> DistanceMap:
    """A map of every kind."""
    slopes = tuple(index / 7 for index in range(8))
    return {
        "limited": DistanceMap.limited(near),
        "leaky": DistanceMap.leaky(near, 0.3),
        "shifted": DistanceMap.shifted(near, 2),
        "shifted later": DistanceMap.shifted(near, 2, after=12),
        "by pair": DistanceMap(near, slopes, tuple((1 - slope) * near for slope in slopes)),
        "grouped": DistanceMap.grouped(near, 3),
    }[kind]


def inputs(free: int, queries: int = 23) -> list[torch.Tensor]:
    return operands(queries=queries, width=WIDTH, value_width=12, free=free)


@pytest.mark.parametrize(
    ("way", "form_and_free", "interleaved", "queries", "near", "rule", "kind"),
    covering(
        WAYS,
        [("strict", 0), ("magnitude", 3), ("slack", 8)],
        [False, True],
        [29, 23, 1],
        [1, 7, 28],
        [UNSCALED, stock("yarn", 16, factor=4.0)],  # whose magnitude is not 1
        ["limited", "leaky", "shifted", "shifted later", "by pair", "grouped"],
    ),
)
def test_agrees_with_the_oracle(take, way, form_and_free, interleaved, queries, near, rule, kind):
    take(way)
    form, free = form_and_free
    q, t, v = inputs(free, queries)
    options = {"form": form, "interleaved": interleaved}

    def mapped(distance_map: DistanceMap | None) -> torch.Tensor:
        rotation = Rotation(WIDTH, rule=rule, distance_map=distance_map)
        return coca_attention(q, t, v, rotation=rotation, **options)

    distance_map = map_of(kind, near)
    with torch.no_grad():  # so that one query is attended to alone
        ours = mapped(distance_map)
    scaling = {"theta": rule.frequencies(WIDTH, 10000.0), "scale": rule.magnitude**2 / 4}
    expected = oracle.coca_attention(q, t, v, distance_map=distance_map, **scaling, **options)
    assert (ours - expected).abs().max() <= 1e-12
    changed = (ours - mapped(None)).abs().max()
    # 28 is the largest distance, which only shifted distances change.
    is_shifted = kind.startswith("shifted")
    assert changed <= 1e-12 if near == 28 and not is_shifted else changed > 1e-3
    assert torch.equal(mapped(map_of(kind, 29)), mapped(None))


def pairs_of(parts, queries: int, keys: int) -> torch.Tensor:
    """How often near and far scores of every query and key are in some parts, (2, T, S)."""
    found = torch.zeros(2, queries, keys, dtype=torch.long)
    for part in parts:
        seen = torch.ones(queries, keys, dtype=torch.long)[part.rows, part.columns]
        height, width = seen.shape
        if part.shape == "lower":
            seen = seen.tril(width - height)
        if part.shape == "upper":
            seen = seen.triu()
        if part.window is not None:
            seen = seen.triu(width - height - part.window + 1)
        found[int(part.far), part.rows, part.columns] += seen
    return found


@pytest.mark.parametrize("banded", [False, True], ids=["squares", "windows"])
def test_parts_have_every_pair_once(banded):
    """Also those of a kernel with windows, as on a GPU."""
    for queries, lengths, limit in [
        (23, [23], 7), (9, [23], 7), (2, [23], 7), (23, [23], 1), (17, [40], 39),
        (30, [9, 24, 3], 8),
    ]:  # fmt: skip
        keys, documents = sum(lengths), torch.arange(len(lengths))
        documents = documents.repeat_interleave(torch.tensor(lengths))
        distance = (torch.arange(keys)[:, None] - torch.arange(keys))[-queries:]
        visible = (distance >= 0) & (documents[-queries:, None] == documents)
        expected = torch.stack((visible & (distance < limit), visible & (distance >= limit)))
        parts = document_parts(lengths, queries, limit, banded)
        assert torch.equal(pairs_of(parts, queries, keys), expected.long())


SHAPES = [
    (37, 37, 8), (5, 37, 8), (2, 37, 8), (40, 40, 1), (17, 40, 39), (17, 40, 40), (33, 40, 11),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "shape", "widths", "hidden"),
    covering(WAYS[::2], SHAPES, [(16, 12, 16), (16, 8, 24)], ["nothing", "documents", "window"]),
)
def test_output_and_gradients_agree_with_scores_at_positions(take, way, shape, widths, hidden):
    """Written out: near and far scores, chosen by the distance."""
    take(way)
    (queries, keys, near), (width, far_width, value_width) = shape, widths
    shapes = [
        (2, 4, queries, width), (2, 2, keys, width), (2, 4, queries, far_width),
        (2, 2, keys, far_width), (2, 2, keys, value_width),
    ]  # fmt: skip
    leaves = [normal(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    places = torch.arange(keys - queries, keys), torch.arange(keys)
    distance = places[0][:, None] - places[1]
    segments, window = None, 11 if hidden == "window" else None
    visible = (distance >= 0) & (distance < (window or keys))
    if hidden == "documents":
        segments = torch.stack((places[1] // 13, places[1] // 40))
        rows = segments[:, keys - queries :]
        visible = visible & (rows[:, :, None] == segments[:, None]).unsqueeze(1)
    options = {"near": near, "window": window, "scale": 0.3}
    ours = attend_by_distance(*leaves, *places, segments=segments, **options)
    query, key, far_query, far_key, value = (
        x.repeat_interleave(4 // x.shape[1], 1) for x in leaves
    )
    scores = torch.where(distance < near, query @ key.mT, far_query @ far_key.mT)
    scores = (0.3 * scores).masked_fill(~visible, -torch.inf)
    expected = scores.softmax(-1) @ value
    assert_same_with_gradients(ours, expected, leaves)


def test_masks_apply():
    q, t, v = inputs(8)
    visible = torch.rand(23, 29, generator=torch.Generator().manual_seed(1)) > 0.4
    visible[:, 0] = True
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    rotation = Rotation(WIDTH, distance_map=LIMITED)
    expected = oracle.coca_attention(q, t, v, distance_map=LIMITED, bias=bias)
    for mask in (visible, bias):
        ours = coca_attention(q, t, v, rotation=rotation, attention_mask=mask)
        assert (ours - expected).abs().max() <= 1e-12
    visible[4] = False
    q.requires_grad_()
    ours = coca_attention(q, t, v, rotation=rotation, attention_mask=visible)
    assert ours[:, :, 4].abs().max() == 0
    ours.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("gradients", [True, False])
def test_positions_decide_and_not_the_order_of_keys(gradients):
    q, t, v = inputs(0)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    options = {"form": "strict", "rotation": Rotation(WIDTH, distance_map=LIMITED)}
    last = q[:, :, -1:]
    with torch.set_grad_enabled(gradients):
        ours = coca_attention(
            last, t[:, :, order], v[:, :, order],
            query_positions=torch.tensor([28]), key_positions=order,
            attention_mask=torch.ones(1, 29, dtype=torch.bool), **options,
        )  # fmt: skip
    assert (ours - coca_attention(last, t, v, **options)).abs().max() <= 1e-12


def test_masks_of_float16_hide_however_large_the_scores_are():
    q, t, v = (x.half() for x in inputs(0, queries=29))
    places = torch.arange(29)
    tables = Rotation(WIDTH).tables(places, torch.float32)
    hidden = torch.ones(29, 29, dtype=torch.bool).triu(1)
    additive = torch.zeros(29, 29).half().masked_fill(hidden, torch.finfo(torch.float16).min)

    def attended(t: torch.Tensor) -> torch.Tensor:
        query = query_map(30 * q, *tables, form="strict")
        key, far = key_map(t, *tables), far_query_map(query, 0)
        options = {"near": NEAR, "is_causal": False}
        return attend_by_distance(
            query, key, far, t, v, places, places, attention_mask=additive, **options
        )

    changed = t.clone()
    changed[..., -1, :] += 90  # scores beyond the range of float16
    before, after = attended(t), attended(changed)
    assert torch.equal(after[:, :, :-1], before[:, :, :-1])
    assert not torch.equal(after[:, :, -1], before[:, :, -1])


@pytest.mark.parametrize("distance_map", [None, LIMITED])
@pytest.mark.parametrize(("batch", "queries"), [(2, 0), (0, 29)])
def test_nothing_to_attend_from(batch, queries, distance_map):
    q, t, v = (x[:batch] for x in inputs(0, queries=queries))
    rotation = Rotation(WIDTH, distance_map=distance_map)
    found = coca_attention(q, t, v, rotation=rotation, form="strict")
    assert found.shape == (batch, 4, queries, 12)


def test_errors():
    q, t, v = inputs(0)
    rotation = Rotation(WIDTH, distance_map=LIMITED)
    with pytest.raises(ValueError, match=r"those of form slack depend on both positions: use"):
        coca_attention(q, t, v, rotation=rotation)
    for options in ({"window": 5}, {"is_causal": False}):
        with pytest.raises(ValueError, match="a distance map requires causal attention"):
            coca_attention(q, t, v, rotation=rotation, form="strict", **options)
    with pytest.raises(ValueError, match=r"remove decay from rope_parameters in its config\.json"):
        Rotation(WIDTH, distance_map=LIMITED, decay=0.5)
    for wrong, expected in [
        (
            lambda: DistanceMap.limited(0),
            "near of a distance map, .* whole number of at least 1, got 0",
        ),
        (lambda: DistanceMap.leaky(7, 1.5), r"slope .* from 0 to 1, got 1\.5"),
        (lambda: DistanceMap(7, (0.0, 2.0), 7), r"slope .* from 0 to 1, got 2\.0"),
        (lambda: DistanceMap(7, 0.0, "7"), "start .* must be a finite number"),
        (lambda: DistanceMap(7, 1.0, 0, group=0), "group of .* whole number of at least 1, got 0"),
        (lambda: Rotation(WIDTH, distance_map=7), r"such as DistanceMap\.limited\(4096\), got 7"),
        (
            lambda: Rotation(WIDTH, distance_map=DistanceMap(7, (0.5,), 1)),
            "one per rotary pair, here 8",
        ),
        (
            lambda: Rotation(
                WIDTH, distance_map=DistanceMap.shifted(7, 1), rule=stock("dynamic", 16, factor=2.0)
            ),
            "slope is not 0 needs frequencies of one length; got dynamic scaling",
        ),
    ]:
        with pytest.raises(ValueError, match=expected):
            wrong()


@pytest.mark.parametrize("form", ["strict", "magnitude", "slack"])
@pytest.mark.parametrize(
    "kind", [None, "limited", "leaky", "shifted", "shifted later", "by pair", "grouped"]
)
def test_a_rotation_may_have_everything_at_once(form, kind):
    """Magnitude of a rule, partial rotary, pairs that do not turn, temperature, decay or a map."""
    q, t, v = operands(queries=29, keys=29, width=24)
    distance_map = None if kind is None else map_of(kind, NEAR)
    rotation = Rotation(
        WIDTH,
        rule=stock("yarn", 16, factor=4.0),
        temperature=5,
        turning=7,
        decay=0.7 if kind is None else None,
        distance_map=distance_map,
    )
    if form == "slack" and kind is not None:
        with pytest.raises(ValueError, match="a distance map needs scores that depend only on"):
            coca_attention(q, t, v, form=form, rotation=rotation)
        return
    ours = coca_attention(q, t, v, form=form, rotation=rotation)
    # Scores grow with the coefficients and, but for magnitude, with the square of the query.
    t[..., : WIDTH // 2] *= rotation.rule.magnitude**2
    factor = torch.arange(2, 31).double().log() / math.log(6)
    factor = factor if kind is None else factor.clamp(min=1)
    q = q * factor.unsqueeze(-1) ** (1 if form == "magnitude" else 0.5)
    distance = (torch.arange(29)[:, None] - torch.arange(29)).clamp(min=0).double()
    expected = oracle.coca_attention(
        q,
        t,
        v,
        form=form,
        theta=rotation.frequencies(),
        rotary_width=WIDTH,
        bias=None if kind else -0.7 * (1 + distance / rotation.decay_length).log(),
        distance_map=distance_map,
    )
    assert (ours - expected).abs().max() <= 1e-12


def test_a_temperature_is_for_causal_attention():
    """It counts the keys before a query."""
    q, t, v = inputs(0)
    with pytest.raises(ValueError, match="a temperature counts the keys before a query"):
        coca_attention(q, t, v, rotation=Rotation(WIDTH, temperature=8), is_causal=False)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(take, way, dtype):
    take(way)
    q, t, v = inputs(0)
    options = {"rotation": Rotation(WIDTH, distance_map=LIMITED), "form": "strict"}
    exact = coca_attention(q, t, v, **options)
    ours = coca_attention(*(x.to(dtype) for x in (q, t, v)), **options)
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() < 0.05


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            DistanceMap.shifted(6208, 128, after=8192),
            "distances d from 6,208 tokens on count as d − 6,080, for queries from position 8,192 "
            "on",
        ),
        (DistanceMap.shifted(6208, 128), "distances d from 6,208 tokens on count as d − 6,080"),
        (
            DistanceMap.grouped(4096, 4),
            "distances d from 4,096 tokens on count as d // 4 + 3,072",
        ),
        (DistanceMap.limited(8192), "distances d from 8,192 tokens on count as 8,192"),
        (
            DistanceMap.leaky(4096, 0.25),
            "distances d from 4,096 tokens on count as 0.25 d + 3,072",
        ),
        (
            DistanceMap(8, (0.5, 1.0), (4.0, 0.0)),
            "DistanceMap(near=8, slope=(0.5, 1.0), start=(4.0, 0.0), group=1, after=0)",
        ),
    ],
)
def test_a_map_says_what_distances_count_as(found, said):
    """As errors name it; with a slope for every pair by its fields."""
    assert str(found) == said
