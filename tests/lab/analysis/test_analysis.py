"""The analysis of models: planted angles, every family, the CoCA forms, errors."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import set_rotary_scaling
from coca_lab.analysis import AnalysisSettings, analyze, read_token_ids
from coca_lab.analysis.angles import CASES, TURN, anomalous_share, anomalous_tokens
from coca_lab.analysis.capture import visible_keys
from coca_lab.analysis.scores import change_sums, change_values, draw_pairs, pairs_by_distance
from coca_lab.data import SourceSettings
from conftest import VOCABULARY
from covering import mostly_slow
from families import FAMILIES, collinear, vanilla
from operands import Largest

SMALL = AnalysisSettings(
    pairs=64, pairs_per_distance=8, shifts=[1, 100], shift_queries=4, judged=16
)


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


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
def test_a_planted_angle_and_its_consequences_are_measured(angle):
    text = [torch.full((60,), 7)]
    settings = AnalysisSettings(lengths=[40, 400], bins=18, pairs=200, shifts=[])
    layer = analyze(planted(angle), text, settings)["layers"][0]
    found = layer["angles"]
    theta = torch.tensor(layer["frequencies"], dtype=torch.float64)
    for row in found["histogram"]:
        assert row.index(1.0) == int(angle / TURN * 18) and sum(row) == 1
    anomalous = angle > math.pi
    assert found["cases"] == {"a": 0.0, "b": float(not anomalous), "c": 0.0, "d": float(anomalous)}
    assert found["case_d"] == [float(anomalous)] * 4
    assert found["zero_share"] == [0.0] * 4 and found["samples"] == 200 * 4
    tau = (TURN - angle) / theta if anomalous else torch.zeros(4, dtype=torch.float64)
    assert found["tau"] == (pytest.approx(tau.tolist()) if anomalous else [None] * 4)
    for entry, length in zip(found["lengths"], [40, 400], strict=True):
        tokens = anomalous_tokens(tau, length)
        assert entry["length"] == length
        assert entry["anomalous_tokens"] == pytest.approx(tokens.tolist())
        assert entry["anomalous_share"] == pytest.approx(anomalous_share(tokens, length).tolist())
        crossed = [
            math.floor((angle + (length - 1) * x) / math.pi) - math.floor(angle / math.pi)
            for x in theta.tolist()
        ]
        borders = entry["borders"]
        assert [a + b for a, b in zip(borders["peaks"], borders["troughs"], strict=True)] == crossed
        turns = (length - 1) * theta
        assert borders["returns"] == (turns / TURN).floor().tolist()
        assert borders["collinear"] == (turns / math.pi).floor().tolist()


def check_angles(layer, form):
    """Collinear keys have angles of 0; what slack attends to has others (``effective_angles``)."""
    assert (layer["effective_angles"] is None) is (form != "slack")
    angles, effective = layer["angles"], layer["effective_angles"]
    for seen in filter(None, (angles, effective)):
        cases = seen["cases"]
        assert list(cases) == list(CASES) and sum(cases.values()) == pytest.approx(1)
        # A causal model attends only to earlier tokens.
        assert cases["a"] == cases["c"] == 0
        assert seen["samples"] == 2 * 64 * layer["heads"]
        for row in seen["histogram"]:
            assert len(row) == 36 and sum(x or 0 for x in row) == pytest.approx(1)
    if form == "vanilla":
        assert angles["largest"] > 3 and 0.2 < angles["cases"]["d"] < 0.8
        return
    assert angles["largest"] < 1e-12 and not any(angles["case_d"])
    # The ReLU leaves some keys without a direction.
    assert any(0 < share < 1 for share in angles["zero_share"])
    for entry in angles["lengths"]:
        borders = entry["borders"]
        crossed = zip(borders["peaks"], borders["troughs"], strict=True)
        assert [a + b for a, b in crossed] == borders["collinear"]
    if form == "slack":
        assert effective["cases"]["d"] > 0.05


def check_decay(layer):
    decay, last = layer["decay"], min(layer["window"] or 48, 48) - 1
    assert [decay[name]["violations"] for name in ("eq19", "eq20", "eq21")] == [0, 0, 0]
    assert decay["eq19"]["checked"] > 0 and decay["eq21"]["largest_ratio"] <= 1 + 1e-9
    distances = [2**i for i in range(10) if 2**i <= last]
    assert [row["distance"] for row in decay["by_distance"]] == distances
    for row in decay["by_distance"]:
        assert 0 < row["score"] <= 1 and row["score"] <= row["eq19"]


FORMS = ["vanilla", "slack", "strict"]
CELLS = [(family, FORMS[i % 3]) for i, family in enumerate(FAMILIES)]
DIFFERENT = ["Llama", "Mistral", "Gemma", "GPT-NeoX", "GLM-4"]  # every form among them


@pytest.mark.parametrize(
    ("family", "form"),
    mostly_slow(CELLS, [cell for cell in CELLS if cell[0] in DIFFERENT]),
)
def test_every_family(family, form):
    model = vanilla(family) if form == "vanilla" else collinear(family, form)
    result = analyze(model.double(), documents(40, 48), SMALL, name="A model")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    head = {"task": "angles", "model": "A model", "form": form, "training_length": 64}
    assert head.items() <= result.items()
    assert result["rope_parameters"] == model.config.rope_parameters
    assert [layer["layer"] for layer in result["layers"]] == [0, 1]
    assert (result["documents"], result["tokens"], result["longest"]) == (2, 88, 48)
    assert result["settings"]["lengths"] == [64, 256, 1024]
    for layer in result["layers"]:
        check_angles(layer, form)
        check_decay(layer)
        assert len(layer["frequencies"]) == layer["pairs"]
        # About half for queries of random direction.
        share = layer["absolute_share"]
        assert 0.1 < share < 0.9 if form == "slack" else share == 0
        changes = [entry["score_change"] for entry in layer["shifts"]]
        moved = [entry["attention_change"] for entry in layer["shifts"]]
        if form == "slack":
            assert min(changes) > 0.05 and all(0.001 < share < 1 for share in moved)
        else:
            assert max(changes) < 1e-12 and max(moved) < 1e-12
    assert [entry["shift"] for entry in result["shifts"]] == [1, 100]
    nats = [abs(entry["nats_shifted"] - entry["nats"]) for entry in result["shifts"]]
    if form == "slack":
        assert min(nats) > 1e-6
    else:
        # Transformers' own cos and sin are of float32.
        assert max(nats) < (1e-5 if form == "vanilla" else 1e-12)


def test_nats_under_a_shift_match_the_model():
    model, text = collinear("Llama").double(), documents(20)
    settings = AnalysisSettings(shifts=[5], judged=100)
    found = analyze(model, text, settings)["shifts"][0]
    ids = text[0].unsqueeze(0)
    with torch.no_grad():
        plain = model(ids).logits[0, :-1]
        moved = model(ids, position_ids=torch.arange(20).unsqueeze(0) + 5).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy
    assert found["judged"] == 19
    assert found["nats"] == pytest.approx(loss(plain, text[0][1:]).item())
    assert found["nats_shifted"] == pytest.approx(loss(moved, text[0][1:]).item())


def test_a_shift_ignores_what_softmax_ignores():
    before = torch.tensor([[[0.0, 2.0, 50.0]]], dtype=torch.float64)
    visible = visible_keys(torch.tensor([1]), 3)
    assert visible.tolist() == [[True, True, False]]
    assert visible_keys(torch.tensor([3]), 4, 2).tolist() == [[False, False, True, True]]
    # The same added to all that a query sees, and anything to what it does not see.
    after = before + torch.tensor([7.0, 7.0, -90.0])
    assert set(change_values(change_sums(before, after, visible)).values()) == {0}
    # Exchanged: the change has twice the spread, the attention moves by a difference of weights.
    found = change_values(change_sums(before, before[..., [1, 0, 2]], visible))
    weight = 1 / (1 + math.exp(-2.0))
    assert found == pytest.approx({"score_change": 2.0, "attention_change": 2 * weight - 1})


def test_settings_limit_the_text():
    model = vanilla("Llama")
    told = []
    settings = AnalysisSettings(max_documents=2, pairs=8, shifts=[3])
    result = analyze(
        model, documents(100, 20, 50), settings, progress=lambda *args: told.append(args), name="M"
    )
    # Truncated to the training length of 64.
    assert (result["documents"], result["tokens"], result["longest"]) == (2, 84, 64)
    assert [(done, total) for _, done, total in told] == [(0, 168), (128, 168), (168, 168)]
    assert result["settings"]["max_tokens"] == 64
    settings = AnalysisSettings(max_tokens=70, lengths=[30, 10], pairs=8, shifts=[])
    result = analyze(model, [list(range(3, 90))], settings)
    assert result["longest"] == 70 and result["settings"]["lengths"] == [10, 30]
    assert result["shifts"] == [] and result["layers"][0]["shifts"] == []
    assert settings.lengths == [30, 10]  # what the caller gave stays


def test_pairs_are_drawn_uniformly_inside_the_window():
    rng = np.random.default_rng(0)
    for length, window in ((5, None), (6, 3), (4, 100)):
        pairs = draw_pairs(length, 20_000, window, rng)
        every = [(m, n) for m in range(length) for n in range(m) if m - n < (window or length)]
        counts = dict.fromkeys(every, 0)
        for pair in zip(pairs.queries.tolist(), pairs.keys.tolist(), strict=True):
            counts[pair] += 1
        expected = 20_000 / len(every)
        # Five standard deviations.
        assert all(abs(n - expected) < 5 * expected**0.5 for n in counts.values()), counts
    far = pairs_by_distance(100, 3, None, rng)
    assert far.distances.tolist() == [d for d in (1, 2, 4, 8, 16, 32, 64) for _ in range(3)]
    assert far.keys.min() >= 0 and far.queries.max() < 100
    assert pairs_by_distance(100, 3, 5, rng).distances.unique().tolist() == [1, 2, 4]


def test_a_window_of_one_token_and_pairs_that_do_not_turn():
    layer = analyze(vanilla("Mistral", sliding_window=1), documents(20), SMALL)["layers"][0]
    assert layer["angles"]["samples"] == 0 and layer["angles"]["case_d"] == [None] * 4
    assert layer["decay"]["by_distance"] == []
    model = collinear("Llama")
    model.config.rope_parameters["turning_pairs"] = 2
    layer = analyze(model, documents(20), SMALL)["layers"][0]
    assert layer["frequencies"][2:] == [0, 0] and all(layer["frequencies"][:2])
    assert layer["effective_angles"]["lengths"][0]["anomalous_tokens"][2:] == [0, 0]


@pytest.mark.parametrize("make", [vanilla, collinear])
def test_memory_is_linear_in_the_length(make):
    settings = AnalysisSettings(
        max_tokens=2048, pairs=16, pairs_per_distance=2, shifts=[1], shift_queries=2
    )
    with Largest() as largest:
        analyze(make("Llama"), documents(2048), settings)
    assert 2048 * 32 <= largest.elements < 2048 * 2048 / 8


def test_unsupported_texts_and_damaged_predictions_are_refused():
    model = vanilla("Llama")
    with pytest.raises(UserError, match="no documents"):
        analyze(model, [])
    for texts in (documents(5, 1), [torch.zeros(1, 5)]):
        with pytest.raises(UserError, match=r"document \d must be a sequence of at least 2 token"):
            analyze(model, texts, SMALL)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(UserError, match="logits are not finite"):
        analyze(model, documents(10), SMALL)


def test_angles_that_depend_on_the_length_are_refused():
    model = vanilla("Llama")
    set_rotary_scaling(model, "dynamic", factor=2.0)
    settings = AnalysisSettings(max_tokens=100, pairs=8, shifts=[])
    assert analyze(model, documents(100, 100), settings)["layers"]
    assert analyze(model, documents(50, 64), settings)["layers"]
    with pytest.raises(UserError, match="depend on the text length"):
        analyze(model, documents(100, 90), settings)


def test_a_text_and_its_shifts_are_read_as_if_nothing_had_been_read_before():
    """Transformers' own dynamic scaling keeps the frequencies of the longest text or shift."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model = vanilla("Llama", rope_parameters=rope, max_position_embeddings=16)
    settings, texts = AnalysisSettings(pairs=8, shifts=[100, 1], max_tokens=40), documents(40, 40)
    together = analyze(model, texts, settings)["shifts"]
    alone = [analyze(model, texts, replace(settings, shifts=[shift])) for shift in (100, 1)]
    assert together == [shift for each in alone for shift in each["shifts"]]
    moved = [abs(each["nats_shifted"] - each["nats"]) for each in together]
    assert moved[0] > 3 * moved[1]


def test_angles_that_stop_growing_are_followed_up_to_there():
    model = convert(vanilla("Llama"), "rope", near=40)
    short = AnalysisSettings(max_tokens=30, pairs=8, shifts=[], lengths=[40])
    found, expected = (
        analyze(x, documents(30), short)["layers"][0] for x in (model, vanilla("Llama"))
    )
    assert found == expected
    with pytest.raises(
        UserError, match=r"distances of 40 tokens and more count as others .* without the map"
    ):
        analyze(model, documents(30), replace(short, lengths=[41]))
    with pytest.raises(UserError, match="distances of 40 tokens and more"):
        analyze(model, documents(50), replace(short, max_tokens=50))


def test_token_ids_of_a_source(tokenizer, text_folder, tmp_path):
    source = SourceSettings(source=str(text_folder))
    found = read_token_ids(source, tokenizer, AnalysisSettings(max_documents=3))
    assert len(found) == 3 and all(0 <= i < VOCABULARY for ids in found for i in ids)
    assert tokenizer.decode(found[0]) == (text_folder / "00.txt").read_text()
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(UserError, match="no document of at least 2 tokens"):
        read_token_ids(SourceSettings(source=str(tmp_path)), tokenizer, AnalysisSettings())
