"""The perplexity task on models whose answer is known, and on tiny real ones."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config
from transformers.modeling_outputs import CausalLMOutput

from coca_attention.models import set_rotary_scaling
from coca_lab.engine import Engine
from coca_lab.evaluation import Model, RotaryScaling
from coca_lab.evaluation.perplexity import (
    TextSettings,
    WindowSettings,
    check_settings,
    cut,
    distant_repeats,
    load_text,
    measure_windows,
    tokens_needed,
)
from coca_lab.evaluation.task import finish
from coca_lab.evaluation.windows import (
    TokenDocument,
    TokenScores,
    by_tokens_read,
    equal_ranges,
    score_documents,
    sliding_windows,
)
from coca_lab.intervals import perplexity
from conftest import VOCABULARY, some_text, tiny_model


def evaluate_perplexity(model, documents, settings, scaling="none", factor=4.0, engine=None):
    scaled = RotaryScaling(scaling, factor)
    return finish(
        measure_windows(Model(model, None, "m"), documents, settings, scaled), engine or Engine()
    )


class KnownModel(nn.Module):
    """Gives the next token of a counting text the probability ``sure``; records what it reads."""

    def __init__(self, vocabulary: int, sure: float | None):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.vocabulary, self.sure = vocabulary, sure
        self.lengths: list[int] = []
        self.kept: list[int] = []

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        self.lengths.append(input_ids.shape[1])
        self.kept.append(logits_to_keep)
        shape = (*input_ids.shape, self.vocabulary)
        if self.sure is None:
            logits = torch.zeros(shape)
        else:
            others = (1 - self.sure) / (self.vocabulary - 1)
            logits = torch.full(shape, math.log(others) if others else -math.inf)
            following = (input_ids + 1) % self.vocabulary
            logits.scatter_(-1, following.unsqueeze(-1), math.log(self.sure))
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])


def counting(length: int, name: str = "d") -> TokenDocument:
    return TokenDocument(name, torch.arange(length) % 50)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (7, 3), (32, 32), (64, 5)])
@pytest.mark.parametrize(("sure", "expected"), [(None, 50), (0.5, 2)])
def test_a_model_whose_answer_is_known_has_its_perplexity(window, stride, sure, expected):
    scores = score_documents(
        KnownModel(50, sure), [counting(101), counting(64)], window=window, stride=stride
    )
    assert perplexity(scores) == pytest.approx(expected, rel=1e-6)
    assert [score.tokens for score in scores] == [100, 63]


def test_only_the_scored_logits_are_computed():
    model = KnownModel(50, 0.5)
    score_documents(model, [counting(100)], window=32, stride=8, batch_tokens=64)
    assert max(model.kept) == 8
    assert max(model.lengths) == 32


def naive_nats(model, tokens: torch.Tensor, window: int, stride: int, first: int) -> float:
    """One window, one token, one softmax at a time."""
    nats = 0.0
    for w in sliding_windows(len(tokens), window, stride, first):
        logits = model(tokens[None, w.start : w.stop]).logits[0]
        for target in range(w.first_target, w.stop + 1):
            row = logits[target - 1 - w.start].double()
            nats -= F.log_softmax(row, -1)[tokens[target]].item()
    return nats


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
@pytest.mark.parametrize("kind", ["slack", "rope", "alibi"])
def test_batches_agree_with_one_token_at_a_time(kind, batch_tokens):
    model = tiny_model(kind)
    generator = torch.Generator().manual_seed(0)
    documents = [
        TokenDocument(str(n), torch.randint(VOCABULARY, (n,), generator=generator))
        for n in (90, 61, 75)
    ]
    scores = score_documents(
        model, documents, window=24, stride=7, first_target=5, batch_tokens=batch_tokens
    )
    with torch.no_grad():
        for document, score in zip(documents, scores, strict=True):
            assert score.tokens == len(document.tokens) - 5
            expected = naive_nats(model, document.tokens, 24, 7, 5)
            assert score.nats == pytest.approx(expected, rel=1e-5)


def settings(**changes) -> WindowSettings:
    return WindowSettings(**{"windows": [16, 32, 64], "stride": 16, **changes})


def documents_of(model_seed: int = 0, count: int = 3, length: int = 120) -> list[TokenDocument]:
    generator = torch.Generator().manual_seed(model_seed)
    return [
        TokenDocument(str(i), torch.randint(VOCABULARY, (length,), generator=generator))
        for i in range(count)
    ]


def test_infinite_nats_become_plain_json_and_nan_is_refused_by_document():
    model = KnownModel(50, 1.0)  # certain, and wrong where the text does not count on
    model.config = tiny_model("rope").config
    documents = [counting(100), TokenDocument("e", torch.zeros(100, dtype=torch.long))]
    (cell,) = evaluate_perplexity(model, documents, settings(windows=[16]))
    assert cell["perplexity"] is cell["nats"] is cell["ci95"] is None
    assert [d["nats"] for d in cell["documents"]] == [0.0, None]
    json.dumps(cell, allow_nan=False)
    model.sure = float("nan")
    with pytest.raises(ValueError, match=r"NaN for document 'e'"):
        score_documents(model, [counting(1), counting(70, "e")], window=16, stride=16)


@pytest.mark.parametrize(("targets", "scored"), [("shared", 120 - 49), ("all", 119)])
def test_targets_are_the_same_tokens_at_every_window(targets, scored):
    cells = evaluate_perplexity(tiny_model("slack"), documents_of(), settings(targets=targets))
    assert [cell["window"] for cell in cells] == [16, 32, 64]
    assert {cell["tokens"] for cell in cells} == {3 * scored}
    assert len({cell["nats"] for cell in cells}) == 3


def test_scaling_reaches_the_model_and_is_taken_back():
    model = tiny_model("slack")
    plain = evaluate_perplexity(model, documents_of(), settings())
    scaled = evaluate_perplexity(model, documents_of(), settings(), scaling="ntk", factor=4.0)
    assert scaled[1]["nats"] == pytest.approx(plain[1]["nats"])  # 32 is the training length
    assert abs(scaled[2]["nats"] - plain[2]["nats"]) > 0.1
    assert scaled[2]["scaling"] == "ntk" and scaled[2]["factor"] == 4.0
    again = evaluate_perplexity(model, documents_of(), settings())
    assert [cell["nats"] for cell in again] == [cell["nats"] for cell in plain]


def test_attend_last_never_reads_more_and_scores_the_same_tokens():
    model = KnownModel(50, 0.5)
    model.config = tiny_model("rope").config
    documents = [counting(200), counting(150, "e")]
    cells = evaluate_perplexity(model, documents, settings(windows=[64], attend_last=16))
    assert [cell["scaling"] for cell in cells] == ["none", "attend-last"]
    assert cells[0]["tokens"] == cells[1]["tokens"]
    assert (cells[1]["window"], cells[1]["stride"]) == (16, 2)
    assert model.lengths[0] == 64
    switch = model.lengths.index(16)
    assert set(model.lengths[:switch]) == {64} and set(model.lengths[switch:]) == {16}


def test_a_models_own_scaling_is_reported_and_survives(monkeypatch):
    model = tiny_model("slack")
    set_rotary_scaling(model, "ntk", factor=4.0, length=64)
    own = dict(model.config.rope_parameters)
    (plain,) = evaluate_perplexity(model, documents_of(), settings(windows=[64]))
    assert plain["rope_parameters"] == own
    for kind in ("linear", "yarn"):
        (scaled,) = evaluate_perplexity(
            model, documents_of(), settings(windows=[64]), scaling=kind, factor=2.0
        )
        assert scaled["rope_parameters"]["rope_type"] == kind
        assert model.config.rope_parameters == own

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_documents", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate_perplexity(model, documents_of(), settings(), scaling="linear", factor=2.0)
    assert model.config.rope_parameters == own


def test_models_of_other_kinds_are_evaluated_too():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    bloom = AutoModelForCausalLM.from_config(BloomConfig(**sizes)).eval()
    cells = evaluate_perplexity(bloom, documents_of(), settings())
    assert all(math.isfinite(cell["perplexity"]) for cell in cells)
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_embd=16, n_positions=32)).eval()
    assert evaluate_perplexity(gpt2, documents_of(), settings(windows=[16, 32]))
    with pytest.raises(ValueError, match=r"cannot read 64 tokens at once .* 32: use shorter"):
        evaluate_perplexity(gpt2, documents_of(), settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": -5}, "max_tokens must be at least 1"),
        ({"max_documents": 0}, "max_documents must be at least 1"),
        ({"held_out": -1.0}, "held_out must lie between 0 and 1"),
        ({"max_tokens": 10}, "max_tokens cuts documents to 10 tokens"),
    ],
)
def test_bad_text_settings_are_refused(tokenizer, text_folder, changes, message):
    with pytest.raises(ValueError, match=message):
        load_text(TextSettings(source=str(text_folder), **changes), tokenizer, at_least=20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": [-8]}, "window must be at least 1"),
        ({"windows": []}, "at least one window"),
        ({"stride": -1}, "stride must be at least 1"),
        ({"stride": 17}, "must not exceed the window"),
        ({"attend_last": 0}, "attend_last must be at least 1"),
        ({"attend_last": 65}, "at most the largest window"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"positions": 17}, "positions must be at least 1"),
        ({"targets": "one-pass", "stride": 8}, "neither stride nor positions"),
        ({"targets": "one-pass", "stride": None, "positions": 4}, "neither stride nor positions"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_settings(settings(**changes))


def test_short_or_no_documents_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no documents to score"):
        evaluate_perplexity(tiny_model("slack"), [], settings())
    with pytest.raises(ValueError, match="'0' has 40 tokens and the largest window needs 65"):
        evaluate_perplexity(tiny_model("slack"), documents_of(length=40), settings())
    (tmp_path / "long.txt").write_text(some_text(300))
    (tmp_path / "short.txt").write_text(some_text(5))
    text, needed = TextSettings(source=str(tmp_path)), tokens_needed(settings())
    assert needed == 65
    with pytest.raises(ValueError, match=r"short\.txt' has \d+ tokens .* needs 65"):
        load_text(text, tokenizer, at_least=needed)
    text.skip_short = True
    kept = load_text(text, tokenizer, at_least=needed)
    assert [document.id for document in kept] == [str(tmp_path / "long.txt")]
    with pytest.raises(ValueError, match=r"no document of at least 100000 tokens .2 are shorter"):
        load_text(text, tokenizer, at_least=100_000)


def test_text_is_cut_split_and_counted(tokenizer, tmp_path):
    for index in range(30):
        (tmp_path / f"{index:02}.txt").write_text(some_text(100, seed=index))
    whole = load_text(TextSettings(source=str(tmp_path)), tokenizer, at_least=10)
    assert len(whole) == 30
    few = load_text(
        TextSettings(source=str(tmp_path), max_documents=4, max_tokens=50), tokenizer, at_least=10
    )
    assert [len(document.tokens) for document in few] == [50] * 4
    part = load_text(TextSettings(source=str(tmp_path), held_out=0.3), tokenizer, at_least=10)
    assert 0 < len(part) < 30
    assert {d.id for d in part} < {d.id for d in whole}


@pytest.mark.parametrize("batch_tokens", [1, 300])
def test_positions_count_what_was_read_before_each_token(batch_tokens):
    """A model that says how much it has read: token i after n others costs n nats."""

    class Counting(torch.nn.Module):
        config = None

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache=False):
            # Two tokens; the right one, 0, has log-probability -n after n tokens.
            read = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)
            odds = torch.log(torch.expm1(read))
            logits = torch.stack((torch.zeros_like(odds), odds), -1)
            return SimpleNamespace(logits=logits.expand(len(input_ids), -1, -1))

    documents = [TokenDocument(str(n), torch.zeros(n, dtype=torch.long)) for n in (40, 23)]
    scores = [TokenScores(40), TokenScores(23)]
    sums = score_documents(
        Counting(), documents, window=8, stride=8, batch_tokens=batch_tokens, per_token=scores
    )
    for score, total in zip(scores, sums, strict=True):
        scored = score.read > 0
        assert not scored[0] and scored[1:].all() and score.nats[0].isnan()
        assert torch.allclose(score.nats[1:], score.read[1:].float(), rtol=1e-5)
        assert score.nats[1:].sum().item() == pytest.approx(total.nats, rel=1e-5)
    buckets = by_tokens_read(scores, equal_ranges(8, 4))
    assert sum(tokens for _, tokens in buckets) == 39 + 22
    for (nats, tokens), (first, last) in zip(
        buckets, [(1, 2), (3, 4), (5, 6), (7, 8)], strict=True
    ):
        assert first * tokens <= nats + 1e-3 and nats <= last * tokens + 1e-3


def test_cells_hold_positions_where_asked_for():
    documents = [TokenDocument(str(i), torch.randint(1, 300, (90,))) for i in range(2)]
    settings = WindowSettings([16, 32], stride=16, targets="all", positions=4, attend_last=8)
    cells = evaluate_perplexity(tiny_model("slack"), documents, settings)
    for cell in cells[:2]:
        assert [b["last"] for b in cell["by_position"]] == [
            cell["window"] * i // 4 for i in (1, 2, 3, 4)
        ]
        nats = sum(b["nats"] for b in cell["by_position"])
        assert nats == pytest.approx(cell["nats"], rel=1e-5)
    assert "by_position" not in cells[2]


@pytest.mark.parametrize(
    ("tokens", "n", "beyond", "expected"),
    [
        ([1, 2, 3, 9, 9, 1, 2, 3], 3, 4, [7]),
        ([1, 2, 3, 9, 9, 1, 2, 3], 3, 5, []),
        ([1, 2, 3, 9, 9, 1, 2, 3], 2, 4, [6, 7]),
        # The latest of two earlier ones is near.
        ([1, 2, 8, 8, 1, 2, 1, 2], 2, 3, [5]),
        ([5, 5, 5, 5], 1, 1, []),
        ([1, 2], 3, 1, []),
    ],
)
def test_distant_repeats_stand_far_back_only(tokens, n, beyond, expected):
    found = distant_repeats(torch.tensor(tokens), n, beyond)
    assert found.nonzero().flatten().tolist() == expected


def test_repeats_are_scored_by_document():
    """Against sums over the score of every token, with pieces and targets cut anywhere."""
    generator = torch.Generator().manual_seed(0)
    documents = [
        TokenDocument(str(i), torch.randint(0, 5, (90,), generator=generator)) for i in range(3)
    ]
    model = tiny_model("llama-rope")
    settings = WindowSettings([8, 32], stride=4, attend_last=16, repeats=3)
    cells = evaluate_perplexity(model, documents, settings)
    assert [cell["window"] for cell in cells] == [8, 32, 16]
    for cell, stride in zip(cells, (4, 4, 2), strict=True):
        scored = [TokenScores(90) for _ in documents]
        score_documents(
            model, documents, window=cell["window"], stride=stride, first_target=29,
            per_token=scored,
        )  # fmt: skip
        assert (cell["repeats"]["n"], cell["repeats"]["beyond"]) == (3, 16)
        per_document = zip(documents, scored, cell["repeats"]["documents"], strict=True)
        for document, score, found in per_document:
            mask = distant_repeats(document.tokens, 3, 16) & (score.read > 0)
            assert found["tokens"] == mask.sum() > 0
            assert found["nats"] == pytest.approx(score.nats[mask].sum().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["rope", "slack"])
def test_one_pass_scores_the_beginning_by_what_was_read(kind, monkeypatch):
    """Ranges that end at the windows, from one forward pass over every document."""
    model, read = tiny_model(kind), []
    documents = documents_of()
    model.register_forward_pre_hook(lambda _, __, kwargs: read.append(kwargs["input_ids"].shape),
                                    with_kwargs=True)  # fmt: skip
    wanted = WindowSettings([16, 48, 32], targets="one-pass", batch_tokens=1)
    (cell,) = evaluate_perplexity(model, documents, wanted)
    assert read == [(1, 48)] * len(documents)
    assert (cell["window"], cell["targets"]) == (48, "one-pass")
    ranges = cell["by_position"]
    assert [(r["first"], r["last"]) for r in ranges] == [(1, 16), (17, 32), (33, 48)]
    assert [r["tokens"] for r in ranges] == [16 * len(documents)] * 3
    # The same tokens with everything before them, one document at a time.
    nats = torch.zeros(3, dtype=torch.float64)
    for document in documents:
        ids = document.tokens[:49].unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        nats += losses.double().view(3, 16).sum(1)
    assert [r["nats"] for r in ranges] == pytest.approx(nats.tolist(), rel=1e-6)
    assert cell["nats"] == pytest.approx(nats.sum().item(), rel=1e-6)
    # Pieces of any size add up to the same.
    monkeypatch.setattr("coca_lab.evaluation.perplexity.cut", lambda c: cut(c, 48))
    (parts,) = evaluate_perplexity(model, documents, wanted)
    assert {**parts, "seconds": 0} == {**cell, "seconds": 0}
