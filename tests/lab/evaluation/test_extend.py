"""`coca extend`: which methods are compared, what is said of them, and what is written."""

import itertools
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from coca_attention.models import METHODS as ROWS
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.cli.console import markdown_table
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.ruler import NEEDLE, draw_distinct
from coca_lab.engine import Engine
from coca_lab.evaluation import MethodSettings, choice, evaluate, needles, open_model
from coca_lab.evaluation.check import check_of_cells, measurements_of_check
from coca_lab.evaluation.choice import RULE, Loss, Read
from coca_lab.evaluation.needles import NEEDLES_TASK
from coca_lab.evaluation.task import finish
from coca_lab.fingerprints import model_fingerprint
from coca_lab.report import printed_tables, read_results
from coca_lab.settings.commands import CheckSettings
from coca_lab.settings.evaluations import NeedleSettings
from coca_lab.store import Store
from commands import run
from conftest import some_text
from families import vanilla


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


@pytest.fixture
def finds(monkeypatch):
    """What counts as found, and as help: random weights do no better than a guess."""
    monkeypatch.setattr(choice, "GUESS", 100.0)
    monkeypatch.setattr(choice.Choice, "helps", True)


TO = 300
"""The longest text, which all methods can read."""


def extend(source, target, *more):
    """Words of the command, with a small check."""
    words = ["extend", str(source), str(target), "--check", str(source.parent / "text")]
    return [*words, "--to", str(TO), "--check-numbers", "1", *map(str, more)]


METHODS = ["limited", "yarn", "ntk", "leaky", "shifted"]


def test_the_best_method_is_written_and_the_card_says_why(source, tmp_path, finds, capsys):
    code, said, err = run(capsys, *extend(source, tmp_path / "target"))
    assert code == 0 and "warning" not in err, err
    assert "Training length: 160 tokens (max_position_embeddings; --length sets another)" in said
    assert "Not measured: temperature (a temperature is for layers without positions" in said
    (left_out,) = re.findall(r"^Not measured unless named with --method: (.*)$", said, re.MULTILINE)
    assert "self_extend (leaky with rounded distances), string (" in left_out
    assert {"temperature", *re.findall(r"(\w+) \(", left_out)} == {
        name for name, row in ROWS.items() if row.folder
    } - set(METHODS)
    card = (tmp_path / "target" / "README.md").read_text()
    assert "## Context extension" in card and f"for texts of {TO} tokens; L = 160." in card
    table, _, _ = card[card.index("| method | within L") :].partition("\n\n")
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    names = [row[0].removesuffix(" (taken)") for row in rows]
    assert sorted(names) == sorted(["as it is", "last L alone", *METHODS])
    (taken,) = [name for name, row in zip(names, rows, strict=True) if "(taken)" in row[0]]
    words = {name: row[1] for name, row in zip(names, rows, strict=True)}
    assert words["as it is"] == ""
    # What is exact within L cannot lose there.
    assert words["limited"] == words[taken] == "no loss shown"
    assert f"{taken} is taken: " in said and f"{taken} is taken: " in card
    # First is what is measured and what is not: layers without positions are those of few models.
    lines = said.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "Training length",
        "Measuring shifted, limited, leaky, yarn, ntk",
        "Not measured",
        "Not measured unless named with --method",
    ]
    # Then the decision, and all tables but the one that decides are in the card alone.
    decision = lines[4]
    assert decision.startswith(f"{taken} is taken: ") and decision in card
    for text, shown in (
        ("Perplexity against the length read at once (texts 1 of 2)", False),
        ("95% interval", False),
        ("within L", True),
    ):
        assert text in card and (text.strip("| ") in said) == shown
    # In a terminal of 80 columns every row of it is one line, and what it leaves out is below it.
    start = next(i for i, line in enumerate(lines) if line.startswith("method "))
    printed = lines[start : start + len(rows) + 1]
    assert all(len(line) <= 80 for line in printed)
    assert [re.split("  +", line.strip())[0] for line in printed[1:]] == [row[0] for row in rows]
    unclear = [name for name, word in words.items() if word in ("loses", "cannot tell")]
    below = lines[start + len(printed) : start + len(printed) + len(unclear)]
    assert unclear and [line.partition(":")[0] for line in below] == unclear
    assert f", {taken}, for texts of {TO} tokens; runs in Tr" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.max_position_embeddings == TO
    assert AutoTokenizer.from_pretrained(tmp_path / "target").model_max_length >= TO
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
    # All that was measured is there for coca report, and makes no other model of the folder.
    results = tmp_path / "target" / "results.json"
    assert f"Results: {results}" in said
    (content,) = read_results([tmp_path / "target"])
    caveats = [line for line in said.splitlines() if line.startswith("The documents do not show")]
    kept = content["check"]["decision"]
    assert content["check"]["left_out"] == lines[2:4] and all(each in card for each in lines[2:4])
    assert caveats and kept.split(". The documents do")[0] + "." == decision
    assert all(line in kept for line in caveats)
    assert [each["word"] for each in content["check"]["readings"]] == [*words.values()]
    tables = printed_tables(content["results"])
    assert len(tables) > 2 and all(markdown_table(*each) in card for each in tables)
    identity = model_fingerprint(tmp_path / "target")
    results.unlink()
    assert model_fingerprint(tmp_path / "target") == identity


def test_what_is_compared_is_what_the_tasks_measure(source):
    model = open_model(source)
    settings = CheckSettings(
        check=str(source.parent / "text"), check_numbers=1, check_documents=2, text_field="text"
    )
    yarn = MethodSettings("yarn", TO / 160)
    measurements = measurements_of_check(model, [yarn], settings, length=160, to=TO)
    items = [item for each in measurements for item in each.items]
    # Progress counts tokens, of which a reading of the last L alone has fewer.
    assert {item.cost for item in items if f"needles {TO}," in item.label} == {160, TO}
    cells = finish(measurements, Engine())
    found = check_of_cells(model, [yarn], settings, cells, length=160)
    (read,) = found.choice.others
    assert read.method == "yarn" and [*read.perplexity] == [40, 160, TO] and [*read.near] == [160]
    asked = NeedleSettings(
        source=settings.check, lengths=[160, TO], count=1, max_documents=2, near=160,
        max_tokens=TO + 1, skip_short=True,
    )  # fmt: skip
    near, far = evaluate(NEEDLES_TASK, model, asked, yarn)
    assert sum(x.nats for x in read.near[160]) / 14 == pytest.approx(near["nats"])
    beyond = far["ranges"]["beyond"]
    assert sum(x.tokens for x in read.far) == 7 * beyond["needles"] > 0
    assert sum(x.nats for x in read.far) / (7 * beyond["needles"]) == pytest.approx(beyond["nats"])
    assert {cell["task"] for cell in cells} == {"perplexity", "needles"}
    # The last L tokens of every text beside all of it, and the model as it is.
    assert {(cell["task"], cell["scaling"]) for cell in cells} == {
        *itertools.product(("perplexity", "needles"), ("none", "yarn")),
        ("perplexity", "attend-last"),
        ("needles", "last 160 tokens alone"),
    }


def test_an_interrupted_check_goes_on_and_its_values_are_kept(
    source, tmp_path, values, finds, monkeypatch, capsys
):
    """For the same command, and for others on the same text."""
    words = extend(source, tmp_path / "target")
    read, original = [], needles._read

    def counted(*arguments):
        read.append(arguments)
        if len(read) == 6:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(needles, "_read", counted)
    assert main(words) == 130 and not (tmp_path / "target").exists()
    assert list(values.glob("*.sqlite"))
    assert main(words) == 0
    # Two documents, two lengths, the model as it is and five methods, and the last L tokens of the
    # longer ones; one was begun twice.
    reads = 2 * 2 * 6 + 2 + 1
    assert len(read) == reads
    words[2] = str(tmp_path / "other")
    assert main([*words, "--method", "yarn"]) == 0 and len(read) == reads


def test_without_a_method_that_shows_no_loss_none_is_taken(source, tmp_path, capsys, monkeypatch):
    lost = {"2.0% of perplexity at 160": Loss("loses", 0.02, (0.01, 0.03), documents=1)}
    monkeypatch.setattr(Read, "losses", lambda *_: lost)
    code, said, err = run(capsys, *extend(source, tmp_path / "target", "--check-documents", 1))
    assert code == 2 and "no method is taken, so no model is written" in err
    assert 'No method has "no loss shown" within L, so none is taken.' in said
    assert "\nlimited: loses 2.0% of perplexity at 160\n" in said
    assert RULE in said and "perplexity at (" not in said and not (tmp_path / "target").exists()
    # Hours of measurements are there for a report.
    results = tmp_path / "target.results.json"
    assert f"Results: {results}, drawn by coca report {results}" in said
    (content,) = read_results([results])
    assert content["check"]["decision"].startswith("No method has") and content["results"]
    assert read_results([tmp_path / "target"]) == [content]


def test_a_method_that_is_named_is_written_whatever_the_check_says(source, tmp_path, capsys):
    words = extend(source, tmp_path / "target", "--method", "yarn", "--check-documents", 1)
    code, said, _ = run(capsys, *words)
    reason = "yarn is written because it was named; the check says: cannot tell with 1 document."
    card = (tmp_path / "target" / "README.md").read_text()
    assert code == 0 and reason in said and reason in card and ", yarn, for texts of" in said
    assert "| yarn | cannot tell |" in card
    assert (
        "\n\nyarn: cannot tell with 1 document\n\n" in card and "\nyarn: cannot tell with" in said
    )
    assert "YaRN to 1.88 L" in card


def test_where_no_method_finds_the_numbers_none_is_taken(source, tmp_path, capsys):
    """Of random weights, which do no better than a guess."""
    code, said, err = run(capsys, *extend(source, tmp_path / "target"))
    assert code == 2 and "so no model is written: name one with --method" in err
    first = next(line for line in said.splitlines() if line.startswith("The documents"))
    assert "finds more beyond L than a guess, so none is taken: " in first
    assert "\nThe model does not find numbers even within L" in said
    assert not (tmp_path / "target").exists()


def test_where_no_number_is_farther_back_than_the_training_length_nothing_is_decided(
    source, tmp_path, capsys
):
    words = extend(source, tmp_path / "target")
    words[words.index("--to") + 1] = "165"
    code, said, err = run(capsys, *words)
    assert code == 2 and said == ""  # before anything is read
    assert "no number would be hidden farther back than L = 160 tokens" in err
    assert "hide more (--check-numbers, " in err and "or read longer texts (--to, 165 now)" in err
    assert not (tmp_path / "target").exists()
    code, said, _ = run(capsys, *words, "--method", "yarn")  # is written, and its perplexity said
    assert code == 0 and "nan" not in said and "no better than the last" not in said
    rows = [line.split() for line in said.splitlines() if line.startswith("yarn ")]
    assert "–" in rows[-1]


def test_one_document_and_how_much_is_read_are_said_first(source, tmp_path, capsys):
    words = extend(source, tmp_path / "target", "--check-documents", 1, "--device", "cpu")
    _, said, err = run(capsys, *words)
    assert re.search(rf"^Measuring .*: \d+ readings of up to {TO} tokens$", said, re.M)
    assert "1 document of 300 tokens cannot show whether a method loses within L" in err
    assert "documents to read: 1 of more than 300 tokens (at most 1: --check-documents)" in err
    assert run(capsys, *words, "--device", "cuda:9")[0] == 2


@pytest.mark.parametrize("tokens", [0, 2, TO])
def test_a_text_that_is_refused_is_so_before_anything_is_printed(tokens, source, tmp_path, capsys):
    """The last token that is read predicts one more, which a text of T tokens has not."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(some_text(600), add_special_tokens=False)["input_ids"][:tokens]
    text = tokenizer.decode(ids)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == tokens
    (tmp_path / "a.txt").write_text(text)
    words = extend(source, tmp_path / "target")
    words[4] = str(tmp_path / "a.txt")
    code, said, err = run(capsys, *words)
    why = f"no document of at least {TO + 1} tokens" if tokens else "the file is empty: name one"
    assert (code, said) == (2, "") and f"{tmp_path / 'a.txt'}: {why}" in err


def test_a_model_that_takes_no_method_is_refused_before_anything_is_measured(
    source, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(needles, "_read", None)
    words = extend(source, tmp_path / "target")
    words[1] = str(tmp_path / "model")
    config = GPT2Config(
        vocab_size=1000, n_positions=160, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(words[1])
    AutoTokenizer.from_pretrained(source).save_pretrained(words[1])
    for given in (words, words[:3], [*words[:3], "--method", "yarn"]):
        code, said, err = run(capsys, *given)
        assert (code, said) == (2, "") and "models of type 'gpt2' cannot be extended: all" in err
    named = extend(source, tmp_path / "target", "--method", "limited", "--near", 9999)
    code, said, err = run(capsys, *named)
    assert (code, said) == (2, "") and "no method can extend" in err and "limited: --near" in err


@pytest.mark.parametrize("method", ["yarn", "dynamic", "ntk", "limited", "leaky"])
def test_a_method_can_be_named(method, source, tmp_path, capsys):
    code, said, _ = run(
        capsys, "extend", source, tmp_path / "target", "--method", method, "--length", 40
    )
    assert code == 0 and "Training length: 40 tokens (--length)" in said
    assert "for texts of 60 tokens; runs in Transformers" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    base = AutoModelForCausalLM.from_pretrained(source).eval()
    ids, longer = some_tokens(base, length=40), some_tokens(base, length=80)
    if method in ("dynamic", "limited"):
        assert difference(logits(model, ids), logits(base, ids)) < 1e-5
    assert difference(logits(model, longer), logits(base, longer)) > 1e-4


def test_results_of_a_check_have_the_length_that_is_set(source, tmp_path, finds, capsys):
    """Not the 160 of the configuration: multiples of L in tables and reports are of it."""
    words = extend(source, tmp_path / "target", "--length", 100)
    code, said, err = run(capsys, *words)
    assert code == 0, err
    assert "Training length: 100 tokens (--length)" in said
    (content,) = read_results([tmp_path / "target"])
    assert {cell["training_length"] for cell in content["results"]} == {100}
    # Which is said once, and not with every method.
    assert re.match(r"\w+ is taken: ", content["check"]["decision"])
    assert "length=" not in content["check"]["decision"]
    assert "length=" not in (tmp_path / "target" / "README.md").read_text()


@pytest.mark.parametrize("installed", [True, False])
def test_a_command_of_an_extra_that_is_missing_is_named_with_it(
    installed, source, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("coca_lab.cli.serve.is_serve_available", lambda: installed)
    code, said, _ = run(capsys, "extend", source, tmp_path / "target")
    assert code == 0
    served = f", coca serve {tmp_path / 'target'}{'' if installed else ' (with the extra serve)'}"
    assert f"{served}\n" in said


@pytest.mark.parametrize("method", ["auto", "yarn"])
def test_what_a_method_does_to_short_texts_is_said(method, source, tmp_path, capsys):
    words = [source, tmp_path / "target", "--method", method]
    code, said, err = run(capsys, "extend", *words)
    assert code == 0
    taken = "Method: shifted, the default; texts of up to 160 tokens are computed as before\n"
    assert (taken in said) == ("\nOther methods: --check" in said) == (method == "auto")
    engines = {
        "auto": "shifted, for texts of 240 tokens; runs in Transformers after import "
        "coca_attention.models\n",
        "yarn": "yarn, for texts of 240 tokens; runs in Transformers, vLLM",
    }
    assert engines[method] in said
    size = sum(file.stat().st_size for file in (tmp_path / "target").iterdir())
    assert f"target: {size / 1e6:,.1f} MB\n" in err
    # Of methods that change short texts it is said, on the screen and in the card.
    sentence = (
        "Texts of up to 160 tokens change, too, and answers to them may get worse; methods "
        "shifted and limited keep them as they are."
    )
    card = (tmp_path / "target" / "README.md").read_text()
    assert (sentence in said) == (sentence in card) == (method == "yarn")


def test_what_is_taken_unasked_and_what_nobody_measured_is_said(source, tmp_path, capsys):
    for to, measured in ((2560, True), (2561, False)):
        target = tmp_path / str(to)
        _, said, err = run(capsys, "extend", source, target, "--to", to)
        why = "choose --to 310, or for longer texts leaky, which changes short ones and finds"
        assert "Method: limited, the default; texts of up to 160 tokens are computed as" in said
        reach = f"shifted distances read at most 310 tokens here, got {to:,}"
        warning = "warning: limited finds little farther back than 160 tokens, and shifted is not"
        assert f"{warning} possible: {reach}: {why} " in err
        (printed,) = re.findall(r"What it finds: coca (.*)", said)
        assert printed == f"eval needles {target} --max-documents 1 --lengths {to}"
        if measured:
            output = tmp_path / "found.json"
            code, table, err = run(capsys, *printed.split(), "--output", output)
            assert code == 0, err
            assert "numbers found whole" in table and f"{to:,} tokens" in table
        unknown = "limited was measured up to 16 times, so how well the model reads there is unknow"
        assert (unknown in err) != measured and ("--check TEXT" in err) != measured
    _, said, err = run(
        capsys, "extend", source, tmp_path / "named", "--to", 9999, "--method", "yarn"
    )
    assert "Method: " not in said and "yarn was measured up to 16 times" in err


def test_only_methods_that_can_be_saved_are_offered(capsys):
    with pytest.raises(SystemExit):
        main(["extend", "--help"])
    offered = re.search(r"--method \{auto,(.*?)\}", capsys.readouterr().out)[1].split(",")
    assert offered == [name for name, row in ROWS.items() if row.folder]


def test_info_card_and_configuration_agree_on_the_context(source, tmp_path, capsys):
    for method in ("yarn", "limited", "leaky", "dynamic"):
        target = tmp_path / method
        run(capsys, "extend", source, target, "--method", method)
        code, said, _ = run(capsys, "info", target)
        context = f"240 tokens, extended from 160 by {method}"
        assert code == 0 and context in said
        counted = [
            line.partition("count as ")[2] for line in said.splitlines() if "count as" in line
        ]
        assert counted == {"limited": ["160"], "leaky": ["0.5 d + 40"]}.get(method, [])
        card = (target / "README.md").read_text()
        assert f"| context | {context} |" in card
        methods = "[log n scaling](https://kexue.fm/archives/8823), " if method == "limited" else ""
        assert f"| methods | {methods}{ROWS[method].source} |" in card
        config = AutoModelForCausalLM.from_pretrained(target).config
        assert config.context_extension == {"method": method, "length": 160, "to": 240}


def test_limits_of_distances_are_of_a_named_method(source, tmp_path, capsys):
    words = ["--method", "limited", "--near", 40]
    code, said, _ = run(capsys, "extend", source, tmp_path / "target", *words)
    assert code == 0 and "limited (near=40), for texts of" in said
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "target").config
    assert config.rope_parameters["distance_map"]["near"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--near", 8, "--method", "yarn"],
            "yarn has no --near, which is for shifted, limited",
        ),
        (["--near", 8], "error: --near is for some methods: name one with --method"),
        (["--options", "{first: 9}"], "--options are those of one method, and without --method"),
        (["--check-numbers", 3], "--check-numbers says how to measure: add --check TEXT"),
        (["--to", 100], "error: --to, the tokens to read, must be a whole number of at least 161"),
        (["--to", 100], "is 160 (max_position_embeddings; --length sets another)"),
        (["--method", "rope"], "--method: expected one of 'auto', 'shifted'"),
        (["--check", "nosuch.txt"], "nosuch.txt"),
        (["--near", 500, "--method", "limited"], "error: --near, in tokens and at most L, must be"),
        (
            ["--check-lengths", "64,100", "--check", "stdlib"],
            "--check-lengths must be above L = 160 tokens and at most --to, 240, got 64, 100",
        ),
        (["--check-lengths", "241", "--check", "stdlib"], "at most --to, 240, got 241"),
    ],
)
def test_what_cannot_be_extended_is_refused(words, message, source, tmp_path, capsys):
    code, _, err = run(capsys, "extend", source, tmp_path / "target", *words)
    assert code == 2 and message in err
    assert not (tmp_path / "target").exists()


def test_a_method_that_is_not_for_a_model_is_left_out(tmp_path, source, finds, capsys):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    sizes = AutoModelForCausalLM.from_pretrained(source).config
    vanilla(
        "Llama", vocab_size=sizes.vocab_size, max_position_embeddings=160, rope_parameters=rope
    ).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "model")
    words = extend(source, tmp_path / "target", "--check-documents", 1)
    words[1] = str(tmp_path / "model")
    code, said, err = run(capsys, *words)
    assert code == 0 and "warning: ntk" not in err
    # One document shows no loss of methods alone that compute the same within L.
    assert re.search(r"^(limited|shifted) is taken", said, re.MULTILINE)
    for method in ("yarn", "ntk"):
        why = "would replace the linear scaling that the model was trained with"
        assert re.search(rf"^Not measured: {method} \(.*{why}", said, re.MULTILINE)


def test_what_is_left_out_is_said_before_anything_is_measured(
    source, tmp_path, capsys, monkeypatch
):
    words = extend(source, tmp_path / "target", "--check-documents", 1, "--check-lengths", 300)
    words += ["--near", "161"]  # more than limited takes
    words[words.index("--to") + 1] = "400"
    with monkeypatch.context() as patch:
        patch.setattr(needles, "_read", Mock(side_effect=KeyboardInterrupt))
        code, shown, _ = run(capsys, *words)
    assert code == 130
    reach = "shifted distances read at most 310 tokens here, got 400: choose --to 310, or"
    assert re.search(r"^Measuring leaky, yarn, ntk: \d+ readings of up to 400 tokens$", shown, re.M)
    assert f"Not measured: shifted ({reach}" in shown
    assert "Not measured: limited (--near, in tokens and at most L, " in shown
    _, said, err = run(capsys, *words)
    assert said.startswith(shown)
    assert "left out" not in err and "Perplexity of 300 tokens, and the prob" in said


def test_checks_of_one_model_run_beside_each_other_on_other_texts(
    source, tmp_path, values, capsys, monkeypatch
):
    words = extend(source, tmp_path / "target", "--method", "dynamic")
    assert main(words) == 0
    (first,) = values.glob("*.sqlite")
    (tmp_path / "other").mkdir()
    for file in (source.parent / "text").iterdir():
        (tmp_path / "other" / file.name).write_text(file.read_text())
    words[2] = str(tmp_path / "again")
    with Store(first):
        code, _, err = run(capsys, *words)
        assert code == 2 and err.endswith("is in use by another process: wait until it ends\n")
        # A text that is refused is so before anything waits.
        (tmp_path / "short.txt").write_text("short")
        for text, why in (("short.txt", "no document of at least"), ("no.txt", "no such file")):
            words[4] = str(tmp_path / text)
            code, _, err = run(capsys, *words)
            assert code == 2 and why in err and list(values.glob("*.sqlite")) == [first]
        words[4] = str(tmp_path / "other")
        assert main(words) == 0
    assert len(list(values.glob("*.sqlite"))) == 2


def test_an_extended_model_is_refused_before_anything_is_said(source, tmp_path, capsys):
    run(capsys, "extend", source, tmp_path / "first", "--method", "yarn")
    for words in ([], ["--to", 200]):
        code, said, err = run(capsys, "extend", tmp_path / "first", tmp_path / "second", *words)
        assert (code, said) == (2, "") and "first was extended by yarn already" in err
        (proposed,) = re.findall(r"coca (extend .*)", err)
        given = map(str, [tmp_path / "second", *words])
        assert proposed == " ".join(["extend", f"PATH/{source.name}", *given])
    assert run(capsys, *proposed.replace(f"PATH/{source.name}", str(source)).split())[0] == 0
    (tmp_path / "first" / "README.md").unlink()
    code, _, err = run(capsys, "extend", tmp_path / "first", tmp_path / "third")
    assert code == 2 and "start from the original, the model that it was made from" in err


def test_convert_asks_for_a_form_and_names_extend(source, tmp_path, capsys):
    code, _, err = run(capsys, "convert", source, tmp_path / "target")
    assert code == 2 and "--form is missing, such as strict" in err and "coca extend" in err
    code, said, err = run(capsys, "convert", source, tmp_path / "target", "--form", "rope")
    assert code == 0 and "the same as before up to 160 tokens" in said
    assert "coca convert --form rope is deprecated: use coca extend" in err


def test_a_prompt_beyond_what_a_model_was_extended_for_is_warned_of(source, tmp_path, capsys):
    target = tmp_path / "target"
    run(capsys, "extend", source, target)
    for words, warned in ((100, False), (400, True)):
        prompt = " ".join(some_text(words).split()[:words])
        code, _, err = run(capsys, "generate", target, prompt, "--max-new-tokens", 1)
        assert code == 0, err
        assert (f"are more than the 240 that {target} was extended for" in err) == warned
