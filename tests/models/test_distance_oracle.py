"""Random cases of distance maps beside dense attention in float64, written out from the formulas.

A case draws a map of distances, a family, masks, positions that skip or repeat some, and a way to
read: in one pass, or in pieces with a cache. Legend: B batch, T tokens, H query heads, P pairs.
"""

import random
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from coca_attention import convert
from coca_attention.models.configuration import GLOBAL, LOCAL, layer_types, rope_parameters
from coca_attention.ops import DistanceMap, Rotation, coca_attention
from coca_attention.testing import some_tokens
from families import attentions, vanilla
from operands import operands

ROUND_OFF = 1e-11  # relative to the largest logit
BATCH, BASE, WINDOW = 2, 100.0, 8
MAPS = ["none", "limited", "leaky", "shifted", "shifted later", "by pair", "grouped"]
DECAY = {"decay": 1.5, "decay_length": 4.0}


def random_map(draw: random.Random, kind: str, pairs: int) -> DistanceMap | None:
    """A map of a kind, for heads with so many rotary pairs."""
    near = draw.choice([1, 2, 5, 9, 14])
    if kind == "limited":
        return DistanceMap.limited(near)
    if kind == "leaky":
        return DistanceMap.leaky(near, draw.choice([0.125, 0.3, 0.9]))
    if kind == "shifted":
        return DistanceMap.shifted(near, draw.randint(1, near))
    if kind == "shifted later":
        return DistanceMap.shifted(near, draw.randint(1, near), after=draw.choice([1, 6, 17]))
    if kind == "grouped":
        return DistanceMap.grouped(near, draw.choice([2, 3, 7]))
    if kind == "by pair":
        slopes = tuple(draw.choice([0.0, 0.25, 1.0]) for _ in range(pairs))
        starts = tuple((1 - slope) * near for slope in slopes)
        return DistanceMap(near, slopes, starts, group=draw.choice([1, 1, 4]))
    return None


@dataclass
class Scores:
    """What the scores of a layer are made of."""

    form: str
    width: int  # rotary width
    interleaved: bool
    distance_map: DistanceMap | None
    temperature: int | None
    window: int | None  # of the temperature
    scale: float
    decays: bool = False

    def __call__(self, q: Tensor, t: Tensor, m: Tensor, n: Tensor) -> Tensor:
        """(B, H, T, S) of q (B, H, T, D) and coefficients (B, H, S, P + F) at m and n (B, T)."""
        half = self.width // 2
        rotated, others = q[..., : self.width], q[..., self.width :]
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        q0 = torch.cat((first, others[..., : others.shape[-1] // 2]), -1)
        q1 = torch.cat((second, others[..., others.shape[-1] // 2 :]), -1)
        pairs, q0, q1 = q0.shape[-1], q0.unsqueeze(-2), q1.unsqueeze(-2)  # (B, H, T, 1, P)
        theta = torch.zeros(pairs, dtype=torch.float64)
        theta[:half] = BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        distance = (m[:, :, None] - n[:, None, :]).double()[:, None, :, :, None]
        found = self.distance_map
        if found is not None:
            slope, start = torch.zeros(2, pairs, dtype=torch.float64)
            slope[:half] = torch.tensor(found.slope, dtype=torch.float64)
            start[:half] = torch.tensor(found.start, dtype=torch.float64)
            m_groups, n_groups = m // found.group, n // found.group
            groups = (m_groups[:, :, None] - n_groups[:, None, :]).double()[:, None, :, :, None]
            is_near = (distance < found.near) | (m < found.after)[:, None, :, None, None]
            distance = torch.where(is_near, distance, slope * groups + start)
        free = t.shape[-1] - pairs
        t, k1 = t[..., :pairs].unsqueeze(-3), t[..., pairs:].unsqueeze(-3)  # (B, H, 1, S, P)
        cos, sin = (distance * theta).cos(), (distance * theta).sin()
        square = q0**2 + q1**2
        if self.form == "slack":
            c, s = (f(m[:, None, :, None, None] * theta) for f in (torch.cos, torch.sin))
            d, e = (f(n[:, None, None, :, None] * theta) for f in (torch.cos, torch.sin))
            each = t * (square * c * d + (q1**2 - q0**2) * c * e + 2 * q0 * q1 * s * e)
        else:
            each = t * (square.sqrt() if self.form == "magnitude" else square) * cos
        if free:
            a, b, k0 = q0[..., -free:], q1[..., -free:], t[..., -free:]
            along, across = a * k0 + b * k1, b * k0 - a * k1
            rotary = along * cos[..., -free:] - across * sin[..., -free:]
            each = torch.cat((each[..., : pairs - free], rotary), -1)
        scores = each.sum(-1) * self.scale
        if self.temperature is not None:
            seen = (m.double() + 1).clamp(max=self.window or float("inf"))
            factor = (seen + 1).log() / torch.tensor(self.temperature + 1.0).double().log()
            if found is not None:
                factor = factor.clamp(min=1)
            scores = scores * factor[:, None, :, None]
        if self.decays:
            away = (m[:, :, None] - n[:, None, :]).clamp(min=0).double().unsqueeze(1)
            scores = scores - DECAY["decay"] * (1 + away / DECAY["decay_length"]).log()
        return scores


def attended(scores: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Of scores (B, H, T, S) and values (B, H, S, D): zeros where nothing is visible."""
    weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
    return weights.nan_to_num() @ value


# The operator


def operator_error(seed: int) -> float:
    """The largest error of `coca_attention` in a random case."""
    draw = random.Random(seed)
    form, free = draw.choice([("strict", 0), ("magnitude", 3), ("strict", 2), ("slack", 8)])
    width, keys = draw.choice([16, 16, 10]), draw.choice([1, 7, 29, 40])
    kind = draw.choice(MAPS[1:] if width == 16 or form != "slack" else ["none"])
    queries = draw.choice([keys, keys, max(1, keys // 2), 1])
    distance_map = random_map(draw, kind, width // 2)
    q, t, v = operands(
        batch=BATCH, queries=queries, keys=keys, value_width=12, free=free, seed=seed
    )
    interleaved = draw.random() < 0.5
    rotation = Rotation(width, BASE, temperature=draw.choice([None, 6]), distance_map=distance_map)
    where = draw.choice(["default", "consecutive", "gaps", "repeats", "by row"])
    options, n = {}, torch.arange(keys).expand(BATCH, -1)
    if where != "default":
        n = positions_of(draw, where, keys)
        options = {"query_positions": n[:, keys - queries :], "key_positions": n}
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(BATCH, -1, -1)
    if draw.random() < 0.4:
        mask = torch.rand(BATCH, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.7
        visible, options["attention_mask"] = visible & mask, mask.unsqueeze(1)
    with torch.set_grad_enabled(draw.random() < 0.3):
        ours = coca_attention(
            q, t, v, form=form, rotation=rotation, interleaved=interleaved, **options
        )
    t, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (t, v))
    scores = Scores(form, width, interleaved, distance_map, rotation.temperature, None, 0.25)
    expected = attended(scores(q, t, n[:, keys - queries :], n), v, visible)
    return ((ours - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


# Models


def positions_of(draw: random.Random, kind: str, length: int) -> Tensor:
    """Positions (B, T) that skip some, repeat some, or grow by one from somewhere on."""
    if kind == "consecutive":
        return (torch.arange(length) + draw.randint(0, 50)).expand(BATCH, -1)
    if kind == "gaps":
        steps = [draw.choice([1, 1, 1, 1, 2, 30]) for _ in range(length)]
        return (torch.tensor(steps).cumsum(0) - steps[0]).expand(BATCH, -1)
    if kind == "by row":
        steps = [[draw.choice([1, 1, 1, 17]) for _ in range(length)] for _ in range(BATCH)]
        return torch.tensor(steps).cumsum(-1) - 1
    shared = draw.randint(1, max(1, length - 2))  # then branches, which begin at one position
    branch = max(1, (length - shared + 1) // 2)
    places = [i if i < shared else shared + (i - shared) % branch for i in range(length)]
    return torch.tensor(places).expand(BATCH, -1)


@dataclass
class Case:
    """A text as it is read: arguments of the model, and what is to be seen."""

    ids: Tensor
    positions: Tensor | None  # as given
    places: Tensor  # as they are, (B, T)
    mask: Tensor | None  # (B, T), (B, 1, T, T), or None
    visible: Tensor  # (B, T, T)
    real: Tensor  # (B, T): whose logits mean something


def random_case(draw: random.Random, ids: Tensor, piecewise: bool) -> Case:
    """Masks and positions that belong together."""
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    real = torch.ones_like(ids)
    kinds = ["plain", "gaps", "by row", "consecutive", "branches", "documents", "left", "right"]
    kinds += ["left with gaps", "middle"] + ([] if piecewise else ["packed", "right with gaps"])
    kind = draw.choice(kinds)
    plain = torch.arange(length).expand(BATCH, -1)
    if kind == "plain":
        return Case(ids, None, plain, None, causal, real.bool())
    if kind in ("gaps", "by row", "consecutive"):
        places = positions_of(draw, kind, length)
        return Case(ids, places, places, real, causal, real.bool())
    if kind == "branches":
        places = positions_of(draw, "repeats", length)
        jumps = (places[0].diff() != 1).nonzero()
        shared = int(jumps[0]) + 1 if len(jumps) else 0
        begins = int(places[0, shared]) if shared else length
        branch = torch.tensor([0 if i < begins else 1 + (i >= shared) for i in range(length)])
        together = (branch[:, None] == branch) | (branch[None, :] == 0)
        visible = causal & together
        return Case(ids, places, places, visible.unsqueeze(1), visible, real.bool())
    if kind in ("documents", "packed"):
        size = draw.randint(3, length)
        places, document = plain % size, plain // size
        visible = causal & (document[:, :, None] == document[:, None, :])
        mask = None if kind == "packed" else visible.unsqueeze(1)
        return Case(ids, places, places, mask, visible, real.bool())
    pads = draw.randint(1, length // 2)
    if kind.startswith("left"):
        real[0, :pads] = 0
    elif kind.startswith("right"):
        real[0, length - pads :] = 0
    else:
        real[0, 3 : 3 + pads] = 0
    places = (real.cumsum(-1) - 1).clamp(min=0)
    given = None
    if "gaps" in kind:
        far = positions_of(draw, "gaps", length)
        given = places = far.gather(1, places)
    visible = causal & real.bool()[:, None, :]
    return Case(ids, given, places, real, visible, real.bool())


def expected_logits(model, case: Case, distance_map: DistanceMap | None) -> Tensor:
    """Those of the model with dense attention in place of its own."""
    config = model.config
    kinds, form = layer_types(config), config.coca_form

    def dense(module, kind, hidden_states, **_):
        query, coefficients, value = module.project(hidden_states)
        heads = query.shape[1] // value.shape[1]
        coefficients, value = (x.repeat_interleave(heads, 1) for x in (coefficients, value))
        own = layer_types_differ and kind == LOCAL
        rope = rope_parameters(config, kind)
        window = config.sliding_window if kind == LOCAL else None
        scores = Scores(
            form,
            int(module.head_dim * rope.get("partial_rotary_factor", 1.0)),
            module.layout.interleaved,
            None if own else distance_map,
            None if own else rope.get("temperature"),
            window,
            module.scaling,
            not own and "decay" in rope,
        )
        visible = case.visible
        if window is not None and (case.mask is None or case.mask.dim() == 2):
            length = visible.shape[-1]
            visible = visible & torch.ones(length, length, dtype=torch.bool).triu(1 - window)
        output = attended(scores(query, coefficients, case.places, case.places), value, visible)
        output = output.transpose(1, 2).flatten(2)
        return module.get_submodule(module.layout.output_name)(output), None

    layer_types_differ = len(set(kinds)) > 1
    modules = attentions(model)
    try:
        for module, kind in zip(modules, kinds, strict=True):
            module.forward = partial(dense, module, kind)
        return model(case.ids, position_ids=case.positions, use_cache=False).logits
    finally:
        for module in modules:
            del module.forward


def read(model, case: Case, edges: list[int], cache) -> Tensor:
    """Logits, read from edge to edge with a cache; in one pass without one."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    if cache is None:
        options = {"attention_mask": case.mask, "position_ids": case.positions}
        return model(case.ids, use_cache=False, **options).logits
    slots = case.ids.shape[1] + 3 if isinstance(cache, StaticCache) else None
    pieces = []
    for a, b in pairwise([0, *edges]):
        mask = case.mask
        if mask is not None and mask.dim() == 4:
            mask = mask[:, :, a:b, :b]
            mask = torch.nn.functional.pad(mask, (0, (slots or b) - b))
        elif mask is not None:
            mask = mask[:, :b]
        positions = None if case.positions is None else case.positions[:, a:b]
        options = {"attention_mask": mask, "position_ids": positions, name: cache}
        pieces.append(model(case.ids[:, a:b], use_cache=True, **options).logits)
    return torch.cat(pieces, 1)


FAMILIES = ["Llama", "Mistral", "Qwen2", "GLM-4", "GPT-NeoX", "Gemma 3"]


@torch.no_grad()
def model_error(seed: int) -> float:
    """The largest error of logits in a random case, relative to the largest logit."""
    draw = random.Random(seed)
    family, kind = draw.choice(FAMILIES), draw.choice([*MAPS, "decay"])
    form, free = draw.choice(["rope", "rope", "strict", "magnitude", "slack"]), draw.choice([0, 2])
    if kind not in ("none", "decay") and form == "slack":
        form = "strict"
    kv_cache = draw.choice(["full", "half"]) if kind != "none" else "half"
    own = {"Gemma 3": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": BASE} for kind in (GLOBAL, LOCAL)
    }}}  # fmt: skip
    part = {"GLM-4": 0.5, "GPT-NeoX": 0.5}.get(family, 1.0)
    rope = {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": part}
    changes = own.get(family, {"rope_parameters": rope})
    model = vanilla(family, seed, num_hidden_layers=2, **changes)
    options = {"free_pairs": free} if form != "rope" else {}
    if kind in MAPS[1:]:
        options["near"] = 5
    model = convert(model, form, kv_cache=kv_cache, **options).double().eval()
    pairs = int(8 * part) // 2
    distance_map, rope = random_map(draw, kind, pairs), rope_parameters(model.config, GLOBAL)
    rope.pop("distance_map", None)
    rope.pop("temperature", None)
    if kind == "decay":
        rope |= DECAY
    if distance_map is not None:
        rope["distance_map"] = asdict(distance_map)
        if draw.random() < 0.4:
            rope["temperature"] = 12
    model.set_attn_implementation(draw.choice(["sdpa", "sdpa", "sdpa", "eager"]))
    length = draw.choice([12, 23, 30])
    made = draw.choice(["none", "growing", "growing", "sliding", "static"])
    case = random_case(draw, some_tokens(model, BATCH, length, seed), made != "none")
    windowed = LOCAL in layer_types(model.config) and made in ("sliding", "static")
    if windowed and case.mask is not None and case.mask.dim() == 4:
        made = "growing"  # Transformers applies no window to a mask of its caller
    edges = sorted({draw.randint(1, length) for _ in range(draw.choice([1, 3, 6]))} | {length})
    if draw.random() < 0.4:
        edges = [*range(max(1, length // 2), length + 1)]
    cache = {
        "none": lambda: None,
        "growing": DynamicCache,
        "sliding": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=length + 3),
    }[made]()
    expected = expected_logits(model, case, distance_map)[case.real]
    ours = read(model, case, edges, cache)[case.real]
    return ((ours - expected).abs().max() / expected.abs().max()).item()


DEFAULT, ALL, STEP = 60, 900, 20


def batches(default: int):
    """Seeds, in batches, of which all but the first ones are slow."""
    starts = range(0, ALL, STEP)
    return [x if x < default else pytest.param(x, marks=pytest.mark.slow) for x in starts]


@pytest.mark.parametrize("first", batches(DEFAULT))
def test_models(first):
    errors = {seed: model_error(seed) for seed in range(first, first + STEP)}
    assert max(errors.values()) < ROUND_OFF, {s: e for s, e in errors.items() if e >= ROUND_OFF}


@pytest.mark.parametrize("first", batches(DEFAULT))
def test_the_operator(first):
    errors = {seed: operator_error(seed) for seed in range(first, first + STEP)}
    assert max(errors.values()) < ROUND_OFF, {s: e for s, e in errors.items() if e >= ROUND_OFF}
