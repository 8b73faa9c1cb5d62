"""Perplexity of one endless text in constant memory."""

import math

import pytest
import torch
import torch.nn.functional as F

from coca_attention.errors import UserError
from coca_lab.engine import Engine, Store
from coca_lab.evaluation import Session, Subject
from coca_lab.evaluation.streaming import (
    StreamingSettings,
    check_settings,
    evaluate_streaming,
    load_stream,
)
from coca_lab.report import printed_tables
from coca_lab.report.perplexity import streaming_sections
from conftest import some_text, tiny_model

KINDS = ["slack", "llama-strict", "rope"]


def some_stream(length: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 60, (length + 1,), generator=generator)


def evaluate(model, tokens, session=None, **settings):
    settings = StreamingSettings(**{"window": 20, "ranges": 3, **settings})
    return evaluate_streaming(Subject(model, None, "m"), tokens, settings, session or Session())


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_within_the_window_has_its_ordinary_perplexity(kind):
    model, tokens = tiny_model(kind), some_stream(24)
    cell = evaluate(model, tokens)
    with torch.no_grad():
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
    nats = F.cross_entropy(logits, tokens[1:], reduction="none").view(3, 8).sum(1)
    assert cell["perplexity"] == pytest.approx(math.exp(nats.sum() / 24), rel=1e-4)
    assert [r["nats"] for r in cell["by_position"]] == pytest.approx(nats.tolist(), rel=1e-4)
    assert [(r["first"], r["last"]) for r in cell["by_position"]] == [(1, 8), (9, 16), (17, 24)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_pass_does_not_matter_and_that_of_the_window_does(kind):
    model, tokens = tiny_model(kind), some_stream()
    one, several, all_at_once = (evaluate(model, tokens, piece=size) for size in (1, 7, 90))
    nats = [r["nats"] for r in one["by_position"]]
    for other in (several, all_at_once):
        assert [r["nats"] for r in other["by_position"]] == pytest.approx(nats, rel=1e-4)
        assert other["cache_megabytes"] == one["cache_megabytes"] > 0
    assert evaluate(model, tokens, window=10)["perplexity"] != pytest.approx(one["perplexity"])
    assert evaluate(model, tokens, sinks=0)["perplexity"] != pytest.approx(one["perplexity"])


def test_the_model_is_as_before_and_the_window_that_of_training():
    model, tokens = tiny_model("slack"), some_stream()
    session = Session(scaling="ntk", factor=4.0)
    cell = evaluate(model, tokens, session, window=None)
    assert (cell["window"], cell["sinks"]) == (28, 4)  # training length 32
    assert cell["rope_parameters"]["length"] == 32
    assert model.config.kv_cache == "full"
    assert model.config.rope_parameters["rope_type"] == "default"


def test_what_is_in_the_store_is_not_read_again(tmp_path):
    session = Session(engine=Engine(Store(tmp_path / "values.sqlite")))
    cell = evaluate(tiny_model("rope"), some_stream(), session)
    model = tiny_model("rope")
    model.forward = None
    assert evaluate(model, some_stream(), session) == cell
    with pytest.raises(UserError, match="TypeError"):  # another text is read
        evaluate(model, some_stream() + 1, session)


def test_documents_follow_one_another(tmp_path, tokenizer):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(some_text(40, seed=index))
    subject = Subject(tiny_model("rope"), tokenizer)
    ids = []
    for index in range(3):
        ids += [*tokenizer(some_text(40, seed=index)).input_ids, tokenizer.eos_token_id]
    wanted = len(ids) - 5
    settings = StreamingSettings(source=str(tmp_path), tokens=wanted - 1)
    assert load_stream(settings, subject).tolist() == ids[:wanted]
    settings.tokens = 10_000
    with pytest.raises(UserError, match="give more text, or read fewer"):
        load_stream(settings, subject)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"sinks": -1}, "sinks must be 0 or more"),
        ({"piece": 0}, "piece must be at least 1"),
        ({"tokens": 10}, "tokens must be at least 11"),
        ({"held_out": 2.0}, "between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_settings(StreamingSettings(**changes))


def test_the_report_shows_perplexity_speed_and_memory_by_position():
    cell = {
        "task": "streaming", "model": "m", "scaling": "none", "factor": None,
        "sinks": 4, "window": 60, "piece": 64,
        "by_position": [
            {"first": 1, "last": 50, "nats": 50 * math.log(8), "tokens": 50,
             "tokens_per_second": 1234.5, "megabytes": 600.2},
            {"first": 51, "last": 100, "nats": 50 * math.log(4), "tokens": 50,
             "tokens_per_second": 1200.0, "megabytes": 600.2},
        ],
    }  # fmt: skip
    ((header, rows),) = printed_tables([cell])
    assert header == ["m, 4 + 60 tokens in sight", "perplexity", "tokens/s", "memory in MB"]
    assert rows == [["1 to 50", "8.0", "1,234", "600"], ["51 to 100", "4.0", "1,200", "600"]]
    drawn, _ = streaming_sections([cell])
    assert [(list(line.x), list(line.y)) for line in drawn.chart.lines] == [
        ([50, 100], pytest.approx([8.0, 4.0]))
    ]
