"""`coca extend`: which method is chosen, what is said of it, and what is written."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention.models.configuration import rope_parameters
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.tasks import vocabulary_text
from coca_lab.evaluation import extension, perplexity
from coca_lab.evaluation.extension import Candidate, Check, Measured
from coca_lab.intervals import DocumentScore
from commands import run
from conftest import some_text
from families import vanilla

L = 256
DIFFICULTY = [2.0, 2.4, 2.8, 3.2, 2.2, 2.6, 3.0, 2.5]


def measured(candidate, hits, nats=0.0, beyond=0.0):
    """Eight documents, each worse than the base's by some nats a token, and passkeys found."""
    scores = {
        n: [
            DocumentScore(str(i), 100 * (each + extra + 0.001 * (i % 2)), 100)
            for i, each in enumerate(DIFFICULTY)
        ]
        for n, extra in ((L, nats), (2 * L, beyond))
    }
    if isinstance(candidate, int):
        candidate = Candidate("limited", candidate)
    return Measured(candidate, scores, dict(zip(scores, hits, strict=True)))


YARN = Candidate("yarn")


@pytest.mark.parametrize(
    ("found", "others", "chosen"),
    [
        (50, [measured(128, (50, 40))], "limited, W = 128"),
        (50, [measured(128, (49, 50))], "limited, W = 256"),  # a passkey is lost within L
        (50, [measured(128, (50, 40), nats=0.01)], "limited, W = 256"),  # every document is worse
        (50, [measured(128, (50, 40), nats=-0.01)], "limited, W = 128"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 40), beyond=-0.1)], "yarn"),
        (50, [measured(192, (50, 40)), measured(YARN, (50, 30), beyond=-0.1)], "limited, W = 192"),
        (50, [measured(YARN, (50, 50), nats=0.01, beyond=-0.1)], "limited, W = 256"),
        (0, [measured(YARN, (0, 0), beyond=-0.1)], "yarn"),  # no passkey could be lost
    ],
)
def test_the_best_method_that_loses_nothing_within_the_training_length_is_chosen(
    found, others, chosen
):
    base = measured(Candidate(), (found, 0), beyond=3.0)
    check = Check(L, base, [measured(L, (found, 3 * bool(found))), *others], "")
    assert check.chosen.candidate.label == chosen
    assert any("half of the check was empty" in text for text in check.warnings) == (found == 0)


def test_losses_and_intervals_are_told():
    others = [measured(L, (50, 3)), measured(YARN, (49, 50), nats=0.01, beyond=0.02)]
    check = Check(L, measured(Candidate(), (50, 0), beyond=3.0), others, "")
    (header, reading), (_, finding) = check.tables()
    assert header == ["perplexity, L = 256", "256", "512"]
    assert [row[-4] for row in finding] == ["", "nothing", "perplexity, passkeys"]
    assert reading[2] == ["yarn", "13.44 (+1.0% to +1.0%)", "13.57 (+2.0% to +2.0%)"]
    assert finding[2][-1] == "Transformers, vLLM, SGLang, llama.cpp"
    assert check.warnings == []


def test_it_is_said_if_the_only_method_loses_or_none_helps():
    others = [measured(YARN, (49, 0), beyond=4.0)]
    warnings = Check(L, measured(Candidate(), (50, 0), beyond=3.0), others, "").warnings
    assert warnings == [
        "yarn loses passkeys within L.",
        "Beyond L no method is better than the model as it is.",
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("source")
    texts = [Document("a", vocabulary_text()), Document("b", some_text(2000))]
    tokenizer = train_tokenizer(texts, 320, split_digits=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 160}
    vanilla("Llama", **sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for index in range(2):
        (tmp_path / "text" / f"{index}.txt").write_text(some_text(600, seed=index))
    return tmp_path / "model"


def extend(source, target, *more):
    """Words of the command, with a small check."""
    words = ["extend", str(source), str(target), "--check", str(source.parent / "text")]
    return [*words, "--to", "200", "--check-samples", "4", *map(str, more)]


def test_the_best_method_is_written_and_the_card_says_why(source, tmp_path, capsys):
    assert main(extend(source, tmp_path / "target")) == 0
    said, warned = capsys.readouterr()
    assert "Training length: 160 tokens (max_position_embeddings; --length sets another)" in said
    assert "warning: The model finds no passkey in texts of up to L = 160 tokens" in warned
    card = (tmp_path / "target" / "README.md").read_text()
    assert "## Context extension" in card and "for texts of 200 tokens; L = 160." in card
    labels = ["base", "yarn", "dynamic", "ntk", "limited, W = 160", "limited, W = 80"]
    rows = [line.split("|")[1].strip() for line in card.splitlines() if line.startswith("|")]
    for label in labels:
        assert sum(row.removesuffix(" (chosen)") == label for row in rows) == 2, label
    (chosen,) = {row.removesuffix(" (chosen)") for row in rows if row.endswith("(chosen)")}
    assert "target: " in said and f", {chosen}, for texts of 200 tokens; runs in Tr" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.max_position_embeddings == (160 if chosen == "dynamic" else 200)
    assert AutoTokenizer.from_pretrained(tmp_path / "target").model_max_length >= 200
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
    assert not list(tmp_path.glob("*.sqlite*"))


def test_a_check_counts_what_is_found_and_lost(source, tmp_path, capsys, monkeypatch):
    """Of a model that finds all within L, and some beyond by each method."""

    def answers(model, tokenizer, prompts, **_):
        rope = rope_parameters(model.config)
        method = rope.get("max_distance") or rope["rope_type"]
        known = {(128, "yarn"): 3, (168, "yarn"): 4, (168, 160): 1, (168, 80): 3, (128, 40): 3}
        share = known.get((prompts.shape[1], method), 4 if prompts.shape[1] == 128 else 0)
        texts = [tokenizer.decode(ids) for ids in prompts]
        keys = [re.search(r"passkey is (\d{5})", text)[1] for text in texts]
        return [key if index < share else "" for index, key in enumerate(keys)]

    monkeypatch.setattr("coca_lab.evaluation.retrieval.greedy_answers", answers)
    monkeypatch.setattr("coca_lab.evaluation.extension._is_worse", lambda *_: False)
    assert main(extend(source, tmp_path / "target")) == 0
    card, warned = (tmp_path / "target" / "README.md").read_text(), capsys.readouterr().err
    assert "empty" not in card + warned
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in card.splitlines()]
    assert [row[:4] for row in rows if len(row) == 7][2:] == [
        ["base", "4", "0", ""],
        ["yarn", "3", "4", "passkeys"],
        ["dynamic", "4", "0", "nothing"],
        ["ntk", "4", "0", "nothing"],
        ["limited, W = 160", "4", "1", "nothing"],
        ["limited, W = 80 (chosen)", "4", "3", "nothing"],
        ["limited, W = 40", "3", "0", "passkeys"],
    ]
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert rope_parameters(config)["max_distance"] == 80


def test_an_interrupted_check_goes_on(source, tmp_path, capsys, monkeypatch):
    measured, tally = [], perplexity._tallies
    words = extend(source, tmp_path / "target")

    def stop(*_):
        measured.append(1)
        if len(measured) == 3:  # base, yarn, dynamic
            raise KeyboardInterrupt
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(extension, "peak_growth", stop)
        assert main(words) == 130 and not (tmp_path / "target").exists()
    assert list(tmp_path.glob("target.values.sqlite"))
    read = []

    def remember(module, *rest):
        read.append(dict(rope_parameters(module.config)))
        return tally(module, *rest)

    monkeypatch.setattr(perplexity, "_tallies", remember)
    assert main(words) == 0
    assert read and all(rope["rope_type"] != "yarn" for rope in read)
    assert not list(tmp_path.glob("*.sqlite*"))


def test_what_is_repeated_at_the_end_reads_the_model_as_it_was(source, tmp_path, monkeypatch):
    """Limited distances convert a model for good, and what has failed is repeated after them."""
    limits = []

    def growth(run, device):
        model = run.__closure__[1].cell_contents
        limits.append(rope_parameters(model.config).get("max_distance"))
        if len(limits) == 1:
            raise RuntimeError("a device that was busy")
        return 0.0

    monkeypatch.setattr(extension, "peak_growth", growth)
    assert main(extend(source, tmp_path / "target")) == 0
    assert limits == [None, None, None, None, 160, 80, 40, None]


def test_what_was_measured_is_kept_until_the_folder_is_written(source, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    words = extend(source, tmp_path / "target", "--check-documents", 1, "--method", "yarn")
    with monkeypatch.context() as patch:
        patch.setattr("coca_lab.cli.models.extend_folder", full)
        assert main(words) == 2
    assert list(tmp_path.glob("target.values.sqlite"))
    monkeypatch.setattr("coca_lab.evaluation.perplexity._tallies", full)
    assert main(words) == 0 and not list(tmp_path.glob("*.sqlite*"))


@pytest.mark.parametrize("method", ["yarn", "dynamic", "ntk", "limited"])
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
    code, said, _ = run(capsys, "extend", source, tmp_path / "target", "--max-distance", 40)
    assert code == 0 and "limited, W = 40" in said
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert config.rope_parameters["max_distance"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-distance", 8, "--method", "yarn"], "--max-distance is for --method limited"),
        (["--to", 100], "must be a whole number from 161"),
        (["--method", "rope"], "method: Input should be 'auto', 'limited'"),
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
    assert code == 0 and err.count("is left out: method") == 3
    assert "would replace the linear scaling" in err and "limited, W = " in said


def test_convert_asks_for_a_form_and_names_extend(source, tmp_path, capsys):
    code, _, err = run(capsys, "convert", source, tmp_path / "target")
    assert code == 2 and "--form is missing: one of slack" in err and "coca extend" in err
    code, said, err = run(capsys, "convert", source, tmp_path / "target", "--form", "rope")
    assert code == 0 and "the same as before up to 160 tokens" in said
    assert "coca convert --form rope is now coca extend" in err
