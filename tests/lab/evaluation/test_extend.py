"""`coca extend`: which method is chosen, what is said of it, and what is written."""

import inspect
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention.errors import UserError
from coca_attention.models.configuration import rope_parameters
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.ruler import NEEDLE, draw_distinct
from coca_lab.evaluation import extension, marked
from coca_lab.evaluation.extension import Candidate, ExtensionCheck, Measured
from coca_lab.evaluation.marked import ask_for_numbers, hide_numbers, read_marked
from coca_lab.evaluation.task import Model
from coca_lab.evaluation.windows import TokenDocument
from coca_lab.generation import greedy_answers
from coca_lab.intervals import DocumentScore
from commands import run
from conftest import some_text
from families import vanilla

L = 256
DIFFICULTY = [2.0, 2.4, 2.8, 3.2, 2.2, 2.6, 3.0, 2.5]


def scores(extra):
    """Eight documents, each worse than the base's by some nats a token."""
    return [
        DocumentScore(str(i), 100 * (each + extra + 0.001 * (i % 2)), 100)
        for i, each in enumerate(DIFFICULTY)
    ]


def measured(candidate, hits, nats=0.0, beyond=0.0):
    """Documents that are worse than the base's by some nats within L and beyond, and numbers."""
    if isinstance(candidate, int):
        candidate = Candidate("limited", candidate, L)
    found = {n: [i < hit for i in range(50)] for n, hit in zip((L, 2 * L), hits, strict=True)}
    return Measured(candidate, {L: scores(nats), 2 * L: scores(beyond)}, found)


def check(base, others):
    """What is known of a model whose last L tokens are read as well as those of a text of L."""
    return ExtensionCheck(L, base, {2 * L: scores(0.0)}, others, "")


BASE, YARN, NTK = (Candidate(method, length=L) for method in ("base", "yarn", "ntk"))


@pytest.mark.parametrize(
    ("found", "others", "chosen"),
    [
        (50, [measured(128, (50, 40))], "limited, W = 128"),
        (50, [measured(128, (45, 40))], "limited, W = 128"),  # which may be chance
        (50, [measured(128, (44, 50))], "limited, W = 256"),  # numbers are lost within L
        (50, [measured(128, (50, 40), nats=0.01)], "limited, W = 256"),  # every document is worse
        (50, [measured(128, (50, 40), nats=-0.01)], "limited, W = 128"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 40), beyond=-0.1)], "yarn"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 30), beyond=-0.1)], "limited, W = 192"),
        (50, [measured(YARN, (50, 50), nats=0.01, beyond=-0.1)], "limited, W = 256"),
        (0, [measured(YARN, (0, 0), beyond=-0.1)], "yarn"),  # no number could be lost
        # What other engines run is taken where the best is not clearly better.
        (50, [measured(192, (50, 40)), measured(YARN, (50, 35))], "yarn"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 34))], "limited, W = 192"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 40), beyond=0.01)], "limited, W = 192"),
        (50, [measured(NTK, (50, 36)), measured(YARN, (50, 35)), measured(192, (50, 40))], "ntk"),
    ],
)
def test_the_best_method_that_loses_nothing_within_the_training_length_is_chosen(
    found, others, chosen
):
    limited = measured(L, (found, 3 * bool(found)))
    told = check(measured(BASE, (found, 0), beyond=3.0), [limited, *others])
    assert told.chosen.candidate.label == chosen
    assert any("half of the check was empty" in text for text in told.warnings) == (found == 0)


def test_losses_and_intervals_are_told():
    others = [measured(L, (50, 3)), measured(YARN, (40, 50), nats=0.01, beyond=0.02)]
    told = check(measured(BASE, (50, 0), beyond=3.0), others)
    (header, reading), (_, finding), (_, costs) = told.tables()
    assert header == ["perplexity, L = 256", "256", "512"]
    assert [row[-1] for row in finding] == ["", "nothing", "perplexity, numbers"]
    assert reading[1] == ["base, last L tokens", "13.30", "13.30"]
    assert reading[3] == ["yarn", "13.44 (+1.0 to +1.0 %)", "13.57 (+2.0 to +2.0 %)"]
    assert finding[2][:3] == ["yarn", "40 of 50", "50 of 50"]
    assert costs[2][-1] == "Transformers, vLLM, SGLang, llama.cpp"
    assert told.warnings == []


def test_why_a_method_is_chosen_is_told():
    others = [measured(L, (50, 40)), measured(YARN, (50, 37))]
    tie, base = "runs in more engines: Transformers, vLLM, SGLang, llama.cpp.", (50, 0)
    assert check(measured(BASE, base), others).reason == (
        "yarn is taken: it finds 37 of 50 numbers beyond L and limited, W = 256 40, which may be "
        f"chance (p = 0.25), and {tie}"
    )
    best = check(measured(BASE, base), others[:1])
    assert best.reason.startswith("limited, W = 256 is taken: it finds 40 of 50 numbers beyond L,")
    assert best.reason in best.markdown()


@pytest.mark.parametrize(("megabytes", "columns"), [(None, []), (12.0, ["memory"])])
def test_memory_is_told_where_it_is_known(megabytes, columns):
    base, other = (replace(measured(x, (1, 1)), megabytes=megabytes) for x in (BASE, YARN))
    header, rows = check(base, [other]).tables()[2]
    assert header == ["512 tokens", "time", *columns, "runs in"]
    assert all(len(row) == len(header) for row in rows)


def test_it_is_said_if_the_only_method_loses_or_none_helps():
    others = [measured(YARN, (40, 0), beyond=4.0)]
    assert check(measured(BASE, (50, 0), beyond=3.0), others).warnings == [
        "yarn loses numbers within L.",
        "Beyond L no method is better than the model as it is.",
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("source")
    words = draw_distinct(np.random.default_rng(1), "words", 1000)
    lines = [f"\n{NEEDLE.format(kind='numbers', key=key, value=1234567890)}\n" for key in words]
    texts = [Document("a", "".join(lines)), Document("b", some_text(2000))]
    tokenizer = train_tokenizer(texts, 1000, split_digits=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 160}
    vanilla("Llama", **sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for index in range(2):
        (tmp_path / "text" / f"{index}.txt").write_text(some_text(600, seed=index))
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def values(monkeypatch, tmp_path):
    """The folder of values, empty for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coca-attention" / "extend"


def extend(source, target, *more):
    """Words of the command, with a small check."""
    words = ["extend", str(source), str(target), "--check", str(source.parent / "text")]
    return [*words, "--to", "320", "--check-numbers", "1", *map(str, more)]


def marked_text(source, count=1):
    """A tokenizer, a document, and the same with numbers for lengths of 160 and 320 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(some_text(600))["input_ids"]
    document = TokenDocument("a", torch.tensor(ids))
    (text,) = hide_numbers([document], tokenizer, [160, 320], count)
    return tokenizer, document, text


def test_numbers_are_hidden_in_texts_of_an_exact_length(source):
    tokenizer, document, text = marked_text(source)
    kept = text.ids[~text.hidden]
    assert kept.equal(document.tokens[: len(kept)])
    assert len(text.ids) == text.stops[320] and text.hidden.sum() > 0
    for length, asked in text.questions.items():
        before = tokenizer.decode(text.ids[: text.stops[length]])
        assert len(asked) == 1
        for question, number in asked:
            assert f"{tokenizer.decode(question)} {number}.\n" in before
            assert text.stops[length] + len(question) + len(tokenizer(f" {number}.\n")[0]) <= length


def test_numbers_need_room(source):
    with pytest.raises(UserError, match="no room for 9 numbers and a question: hide fewer"):
        marked_text(source, 9)


@pytest.mark.parametrize("method", ["base", "yarn", "ntk", "limited"])
def test_one_reading_measures_as_a_reading_for_every_length(method, source, monkeypatch):
    tokenizer, _, text = marked_text(source)
    model, found = AutoModelForCausalLM.from_pretrained(source).eval(), []
    monkeypatch.setattr(marked, "is_hit", lambda answer, number: found.append(answer))
    limit = 40 if method == "limited" else None
    with Candidate(method, limit, 160, 320).applied(Model(model, tokenizer)):
        cache, scores, _ = read_marked(model, text, [160, 320], 30)
        for length, score in zip((320, 160), reversed(scores), strict=True):
            stop, (question, number) = text.stops[length], text.questions[length][0]
            nats = -logits(model, text.ids[None, :stop])[0].log_softmax(-1)
            targets = [i for i in range(stop) if not text.hidden[i]][-30:]
            exact = sum(nats[i - 1, text.ids[i]].item() for i in targets)
            assert score == {"nats": pytest.approx(exact, rel=1e-5), "tokens": 30}
            ask_for_numbers(model, tokenizer, text, length, cache)
            prompt = torch.cat((text.ids[:stop], torch.tensor(question)))[None]
            most = len(tokenizer(f" {number}.")["input_ids"])
            assert found[-1:] == greedy_answers(model, tokenizer, prompt, max_new_tokens=most)


def test_the_last_tokens_are_read_without_those_before(source):
    _, _, text = marked_text(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    _, (score,), _ = read_marked(model, text.last(320, 100), [320], 30)
    stop = text.stops[320]
    nats = -logits(model, text.ids[None, stop - 100 : stop])[0].log_softmax(-1)
    targets = [i for i in range(stop) if not text.hidden[i]][-30:]
    exact = sum(nats[i - 1 - stop + 100, text.ids[i]].item() for i in targets)
    assert score["nats"] == pytest.approx(exact, rel=1e-5)


def test_the_best_method_is_written_and_the_card_says_why(source, tmp_path, capsys):
    assert main(extend(source, tmp_path / "target")) == 0
    said, warned = capsys.readouterr()
    assert "Training length: 160 tokens (max_position_embeddings; --length sets another)" in said
    assert "warning: The model finds no number in texts of up to L = 160 tokens" in warned
    *told, reason, _ = said.splitlines()
    assert max(map(len, told)) <= 80
    assert "Transformers, vLLM, SGLang, llama.cpp" in " ".join(said.split())  # wrapped or not
    card = (tmp_path / "target" / "README.md").read_text()
    assert "## Context extension" in card and "for texts of 320 tokens; L = 160." in card
    labels = ["base", "yarn", "dynamic", "ntk", "leaky", "limited, W = 160", "limited, W = 80"]
    rows = [line.split("|")[1].strip() for line in card.splitlines() if line.startswith("|")]
    for label in labels:
        assert sum(row.removesuffix(" (chosen)") == label for row in rows) == 3, label
        assert label in said
    (chosen,) = {row.removesuffix(" (chosen)") for row in rows if row.endswith("(chosen)")}
    assert reason.startswith(f"{chosen} is taken: it finds") and "memory" not in said
    assert "target: " in said and f", {chosen}, for texts of 320 tokens; runs in Tr" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.max_position_embeddings == (160 if chosen == "dynamic" else 320)
    assert AutoTokenizer.from_pretrained(tmp_path / "target").model_max_length >= 320
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


def method_in(rope):
    """A limit of distances, or the name of another method."""
    found = rope.get("distance_map")
    if found is None:
        return rope["rope_type"]
    return "leaky" if found["slope"] else found["near"]


def test_a_check_counts_what_is_found_and_lost(source, tmp_path, capsys, monkeypatch):
    """Of a model that finds all within L, and some beyond by each method."""

    def answers(module, tokenizer, text, length, cache):
        rope = rope_parameters(module.config)
        method = method_in(rope)
        known = {(160, "yarn"): 4, (320, "yarn"): 20, (320, 160): 1, (320, 80): 8, (160, 40): 4}
        share = known.get((length, method), 10 if length == 160 else 0)
        return [index < share for index in range(10)]

    monkeypatch.setattr(extension, "ask_for_numbers", answers)
    monkeypatch.setattr(extension, "_is_worse", lambda *_: False)
    assert main(extend(source, tmp_path / "target", "--check-documents", 1)) == 0
    card, warned = (tmp_path / "target" / "README.md").read_text(), capsys.readouterr().err
    assert "empty" not in card + warned
    table = card[card.index("| numbers found") : card.index("| 320 tokens")].splitlines()
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in table[2:-1]]
    assert rows == [
        ["base", "10 of 10", "0 of 10", ""],
        ["yarn", "4 of 10", "10 of 10", "numbers"],
        ["dynamic", "10 of 10", "0 of 10", "nothing"],
        ["ntk", "10 of 10", "0 of 10", "nothing"],
        ["leaky", "10 of 10", "0 of 10", "nothing"],
        ["limited, W = 160", "10 of 10", "1 of 10", "nothing"],
        ["limited, W = 80 (chosen)", "10 of 10", "8 of 10", "nothing"],
        ["limited, W = 40", "4 of 10", "0 of 10", "numbers"],
    ]
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert rope_parameters(config)["distance_map"]["near"] == 80


def roles_read(monkeypatch, act=lambda count: None):
    """Limits of distances and rules with which texts are read from now on."""
    read = []

    def growth(run, device):
        rope = rope_parameters(inspect.getclosurevars(run).nonlocals["module"].config)
        read.append(method_in(rope))
        act(len(read))
        run()
        return 0.0

    monkeypatch.setattr(marked, "peak_growth", growth)
    return read


def test_an_interrupted_check_goes_on_and_its_values_are_kept(
    source, tmp_path, values, monkeypatch
):
    """For the same command, and for others on the same text."""
    words = extend(source, tmp_path / "target")

    def stop(count):
        if count == 7:  # two documents each: the base's last tokens, the base, yarn
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        roles_read(patch, stop)
        assert main(words) == 130 and not (tmp_path / "target").exists()
    assert list(values.glob("*.sqlite"))
    read = roles_read(monkeypatch)
    assert main(words) == 0
    rest = ["dynamic", "default", "leaky", 160, 80, 40]
    assert read == [method for method in rest for _ in range(2)]
    words[2] = str(tmp_path / "other")
    assert main([*words, "--method", "yarn"]) == 0 and len(read) == 12


def test_what_is_repeated_at_the_end_reads_the_model_as_it_was(source, tmp_path, monkeypatch):
    """Limited distances convert a model for good, and what has failed is repeated after them."""

    def fail(count):
        if count == 1:
            raise RuntimeError("a device that was busy")

    read = roles_read(monkeypatch, fail)
    assert main(extend(source, tmp_path / "target", "--check-documents", 1)) == 0
    assert read == [
        "default",
        "default",
        "yarn",
        "dynamic",
        "default",
        "leaky",
        160,
        80,
        40,
        "default",
    ]


@pytest.mark.parametrize("method", ["yarn", "dynamic", "ntk", "limited", "leaky"])
def test_a_method_can_be_named(method, source, tmp_path, capsys):
    code, said, _ = run(
        capsys, "extend", source, tmp_path / "target", "--method", method, "--length", 40
    )
    assert code == 0 and "Training length: 40 tokens (--length)" in said
    assert "for texts of 160 tokens; runs in Transformers" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    base = AutoModelForCausalLM.from_pretrained(source).eval()
    ids, longer = some_tokens(base, length=40), some_tokens(base, length=150)
    if method in ("dynamic", "limited"):
        assert difference(logits(model, ids), logits(base, ids)) < 1e-5
    assert difference(logits(model, longer), logits(base, longer)) > 1e-4


def test_the_default_method_takes_a_limit_of_distances(source, tmp_path, capsys):
    code, said, _ = run(capsys, "extend", source, tmp_path / "target", "--near", 40)
    assert code == 0 and "limited, W = 40" in said
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert config.rope_parameters["distance_map"]["near"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--near", 8, "--method", "yarn"], "method yarn has no --near"),
        (["--to", 100], "must be a whole number from 161"),
        (["--method", "rope"], "--method: expected one of 'auto', 'none'"),
        (["--check", "nosuch.txt"], "nosuch.txt"),
        (["--check-lengths", "[100]", "--check", "stdlib"], "need one above L = 160"),
    ],
)
def test_what_cannot_be_extended_is_refused(words, message, source, tmp_path, capsys):
    code, _, err = run(capsys, "extend", source, tmp_path / "target", *words)
    assert code == 2 and message in err
    assert not (tmp_path / "target").exists()


def test_a_method_that_is_not_for_a_model_is_left_out(tmp_path, source, capsys):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    sizes = AutoModelForCausalLM.from_pretrained(source).config
    vanilla(
        "Llama", vocab_size=sizes.vocab_size, max_position_embeddings=160, rope_parameters=rope
    ).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "model")
    words = extend(source, tmp_path / "target", "--check-documents", 1)
    words[1] = str(tmp_path / "model")
    code, said, err = run(capsys, *words)
    assert code == 0 and err.count("is left out: method") == 4
    assert "would replace the linear scaling" in err and "limited, W = " in said


def test_convert_asks_for_a_form_and_names_extend(source, tmp_path, capsys):
    code, _, err = run(capsys, "convert", source, tmp_path / "target")
    assert code == 2 and "--form is missing: one of slack" in err and "coca extend" in err
    code, said, err = run(capsys, "convert", source, tmp_path / "target", "--form", "rope")
    assert code == 0 and "the same as before up to 160 tokens" in said
    assert "coca convert --form rope is deprecated: use coca extend" in err
