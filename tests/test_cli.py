"""The command line: one clear line for an error, help from the fields, whole commands."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from coca_attention.cli import COMMANDS, completion, main
from coca_attention.data import held_out, read_documents
from coca_attention.quickstart import HELD_OUT
from conftest import some_text, tiny_model


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("slack").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_overview_lists_every_command_with_its_docstring(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, entry in COMMANDS.items():
        functions = entry.values() if isinstance(entry, Mapping) else [entry]
        assert name in out
        for function in functions:
            assert function.__doc__.splitlines()[0] in out
    assert run(capsys)[1] == out
    assert "perplexity" in run(capsys, "eval", "--help")[1]
    assert run(capsys, "--version")[1].startswith("coca 0.")


def test_the_fields_of_a_stage_have_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--stages.help"])
    assert stop.value.code == 0
    assert "Rank of the adapters of lora" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["quickstart"], ["--output", "--sizes.steps", "Optimizer steps of each model"]),
        (
            ["train"],
            [
                "--training.steps",
                "--model.attention",
                "AdamW's weight decay",
                "--extend Train",
                "--output",
            ],
        ),
        (["eval", "perplexity"], ["--windows", "--attend-last", "Random seed of the bootstrap"]),
        (["generate"], ["--max-new-tokens", "prompt", "Tokens to generate at most"]),
        (["report"], ["--title", "HTML file to write"]),
    ],
)
def test_help_comes_from_the_fields(capsys, words, options):
    try:
        main([*words, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for option in options:
        assert option in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "coca has no command 'trian'; did you mean train?"),
        (["summon"], "no command 'summon'; choose one of quickstart, train"),
        (["eval", "vibes"], "coca eval has no command 'vibes'; choose one of perplexity"),
        (["train", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
        (["train", "--output", "x"], "the recipe comes first"),
        (["quickstart", "--sizes.stepz", "3"], "--sizes.stepz; did you mean --sizes.steps?"),
        (["eval", "perplexity"], "missing MODEL: usage: coca eval perplexity MODEL"),
        (
            ["eval", "perplexity", "nowhere", "--windows", "a,b"],
            "--windows must be a list of",
        ),
        (["eval", "perplexity", "nowhere", "--windows", "64", "--stride", "65"], "not exceed"),
        (["eval", "perplexity", "nowhere"], "nowhere: no model could be loaded"),
        (["generate", "nowhere", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "nowhere", "x", "--window", "0"], "window must be at least 1 token"),
        (["report"], "give result files or folders first"),
        (["report", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("coca: error: ") and err.count("\n") == 1
    assert message in err


RECIPE = str(Path(__file__).parents[1] / "recipes" / "books-5m.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", RECIPE, "--model.bdy", "llama"], "option --model.bdy; did you mean --model.bod"),
        (
            ["train", RECIPE, "--model.body", "llamma"],
            "--model.body must be gpt_neox or llama, got 'llamma'; did you mean llama? (see coca",
        ),
        (["train", RECIPE, "--model.hidden-size", "x"], "--model.hidden-size must be a whole num"),
        (["train", RECIPE, "--model.attention", "strickt"], "'strickt'; did you mean strict?"),
        (["train", RECIPE, "--model.window"], "--model.window needs a value: a whole number or nu"),
        (["train", RECIPE, "--model.temperature", "x"], "must be true, false or null, got 'x'"),
        (["train", RECIPE, "--stages", "[{name: a, trian: t}]"], "no option 'trian'; did you mean"),
        (["train", RECIPE, "more"], "unexpected word 'more'"),
        (["eval", "needles", "m", "--kinds", "single,mlti-key"], "did you mean multi-key?"),
        (["bench", "--cases", "operater"], "did you mean operator?"),
    ],
)
def test_typing_errors_are_explained_and_not_blamed_on_the_file(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "books-5m" not in err and "<class" not in err and "Union" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hiden_size: 3}", "model has no option 'hiden_size'; did you mean hidden_size?"),
        ("model: {hidden_size: x}", "model.hidden_size must be a whole number, got 'x'"),
        (
            "stages: [{name: a, train: tt}]",
            "stages.train must be t, qt, qtv, all or lora",
        ),
        ("model: {num_heads: 7, hidden_size: 8}", "model.hidden_size must be a multiple of num_he"),
    ],
)
def test_errors_of_a_file_are_blamed_on_it(capsys, tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for more in ([], ["--training.steps", "3"]):
        code, _, err = run(capsys, "train", path, *more)
        assert code == 2
        assert f"{path}: {message}" in err


LIGHT = [
    [], ["train", "-h"], ["eval", "perplexity", "--help"],
    ["train", RECIPE, "--model.layers", "x"], ["train", RECIPE, "--model.body", "x"],
    ["eval", "perplexity", "m", "--windows", "0"], ["eval", "streaming", "m", "--sinks", "-1"],
    ["eval", "passkey", "m", "--samples", "0"], ["analyze", "m", "--passkeys", "0"],
    ["bench", "--rounds", "0"], ["generate", "m", "p", "--temperature", "-1"],
    ["convert", "a", "b", "--layers", "x"], ["quickstart", "--workers", "0"],
    ["eval", "passkey", "./nowhere"], ["analyze", "./nowhere"], ["generate", "./nowhere", "p"],
    ["convert", "./nowhere", "b"], ["export", "./nowhere", "b"], ["serve", "./nowhere"],
]  # fmt: skip


def test_help_and_usage_errors_import_nothing_heavy():
    """They take a fraction of a second of CPU time then; torch and Transformers take seconds."""
    program = (
        "import sys; from coca_attention.cli import COMMANDS, completion, main\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'accelerate', 'datasets'}\n"
        "for command in completion.leaves(COMMANDS):\n"
        "    completion.parser_of(command).format_help()\n"
        "    assert not heavy & set(sys.modules), command.__doc__\n"
        f"for words in {LIGHT!r}:\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "    assert not heavy & set(sys.modules), words\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-500:]
    assert "unexpected" not in finished.stderr


def test_the_short_help_is_one_line_for_an_option_and_names_what_comes_first(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "perplexity", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: coca eval perplexity MODEL [options]\n")
    assert len(out.splitlines()) < 40 and "--windows INTEGER,…" in out
    with pytest.raises(SystemExit):
        main(["train", "-h"])
    out = capsys.readouterr().out
    assert out.startswith("usage: coca train RECIPE [options]\n") and len(out.splitlines()) < 45
    heads = [line for line in out.splitlines() if line.endswith(":")]
    assert heads[:2] == ["The model:", "The text:"] and heads[-1] == "Other options:"
    with pytest.raises(SystemExit):
        main(["eval", "suite", "--help"])
    out = capsys.readouterr().out
    assert "==SUPPRESS==" not in out and "<class" not in out and "ScalingSettings" not in out


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(ValueError, match="no such recipe"):
        main(["train", "nowhere.yaml", "--debug"])


def test_a_defect_is_one_line_too(capsys, monkeypatch):
    def broken(words):
        raise RuntimeError("one\ntwo")

    monkeypatch.setitem(COMMANDS, "report", broken)
    code, _, err = run(capsys, "report")
    assert code == 1
    assert err == (
        "coca: unexpected RuntimeError: one two (run again with --debug for the traceback)\n"
    )


def test_an_interrupt_says_so(capsys, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "report", interrupted)
    assert run(capsys, "report")[0] == 130


def test_eval_perplexity_and_report(capsys, model_folder, text_folder, tmp_path):
    output = tmp_path / "deep" / "result.json"
    code, out, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", text_folder, "--windows", "16,64",
        "--scaling", "ntk", "--factor", "2", "--attend-last", "16", "--output", output,
        "--name", "tiny",
    )  # fmt: skip
    assert code == 0, err
    content = json.loads(output.read_text())
    cells = content["results"]
    assert [(c["scaling"], c["window"]) for c in cells] == [
        ("ntk", 16), ("ntk", 64), ("attend-last", 16),
    ]  # fmt: skip
    assert len({c["tokens"] for c in cells}) == 1
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert f"{cells[1]['perplexity']:.1f}" in out and "tiny + NTK (2)" in out
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "report", output, "--output", page, "--title", "Mine")
    assert code == 0, err
    assert "<title>Mine</title>" in page.read_text()


def test_a_command_that_was_stopped_resumes_from_its_journal(
    capsys, model_folder, text_folder, tmp_path, monkeypatch
):
    words = [
        "eval", "perplexity", model_folder, "--source", text_folder, "--windows", "16,64",
        "--output", tmp_path / "r.json",
    ]  # fmt: skip

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_attention.cli.evaluation.write_json", stopped)
    assert run(capsys, *words)[0] == 130
    assert len((tmp_path / "r.journal.jsonl").read_text().splitlines()) == 2
    monkeypatch.undo()
    monkeypatch.setattr("coca_attention.evaluation.perplexity.score.score_documents", stopped)
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert len(json.loads((tmp_path / "r.json").read_text())["results"]) == 2
    assert not (tmp_path / "r.journal.jsonl").exists()


def test_a_result_file_that_cannot_be_written_is_found_before_the_work(capsys, tmp_path):
    code, _, err = run(capsys, "eval", "perplexity", "nowhere", "--output", tmp_path)
    assert code == 2 and "is a folder" in err


def test_a_document_shorter_than_the_window_is_an_error(capsys, model_folder, tmp_path):
    (tmp_path / "short.txt").write_text("alpha1 beta2")
    code, _, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", tmp_path, "--windows", "64"
    )
    assert code == 2
    assert "short.txt' has" in err and "--skip-short" in err
    (tmp_path / "long.txt").write_text(some_text(300))
    code, out, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", tmp_path, "--windows", "64",
        "--skip-short", "--output", tmp_path / "r.json",
    )  # fmt: skip
    assert code == 0, err
    assert "perplexity at" in out


def test_generate_continues_the_prompt(capsys, model_folder):
    words = ["generate", model_folder, "alpha1 beta2", "--max_new_tokens", "5"]
    code, first, err = run(capsys, *words)
    assert code == 0, err
    assert first.startswith("alpha1 beta2")
    assert run(capsys, *words)[1] == first
    assert run(capsys, *words, "--scaling", "ntk")[0] == 0
    drawn = [run(capsys, *words, "--temperature", "5", "--seed", s)[1] for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_draws_from_the_likeliest_tokens(capsys, model_folder):
    words = ["generate", model_folder, "alpha1 beta2", "--max-new-tokens", "5"]
    likeliest = run(capsys, *words)[1]
    hot = ["--temperature", "5", "--seed", "1"]
    assert run(capsys, *words, *hot)[1] != likeliest
    assert run(capsys, *words, *hot, "--top-k", "1")[1] == likeliest
    assert run(capsys, *words, *hot, "--top-p", "0.0001")[1] == likeliest
    for bad, message in (
        (["--top-k", "1"], "set --temperature"),
        ([*hot, "--top-p", "0"], "top_p must be above 0"),
        ([*hot, "--top-k", "0"], "top_k must be at least 1"),
        (["--temperature", ".nan"], "temperature must be 0, or between"),
    ):
        code, _, err = run(capsys, *words, *bad)
        assert code == 2 and message in err


def test_generate_streams_to_a_terminal_or_when_asked(capsys, model_folder, monkeypatch):
    words = ["generate", model_folder, "alpha1 beta2", "--max-new-tokens", "5"]
    writes = []

    def record(stream):
        write = stream.write
        monkeypatch.setattr(stream, "write", lambda text: (writes.append(text), write(text))[1])

    record(sys.stdout)
    whole = run(capsys, *words)[1]
    assert writes == [whole.removesuffix("\n"), "\n"]
    writes.clear()
    assert run(capsys, *words, "--stream")[1] == whole
    assert len(writes) > 2 and "".join(writes) == whole
    writes.clear()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(capsys, *words)[1] == whole
    assert len(writes) > 2


def test_generate_reads_standard_input_and_chats(capsys, model_folder, tmp_path, monkeypatch):
    words = ["generate", model_folder, "-", "--max-new-tokens", "5"]
    monkeypatch.setattr("sys.stdin", io.StringIO("alpha1 beta2\n"))
    assert run(capsys, *words)[1] == run(capsys, *words[:2], "alpha1 beta2", *words[3:])[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the prompt has no tokens" in run(capsys, *words)[2]
    words[2] = "beta2"
    code, _, err = run(capsys, *words, "--chat")
    assert code == 2 and "has no chat template" in err
    folder = tmp_path / "chat"
    shutil.copytree(model_folder, folder)
    template = "{% for m in messages %}alpha1 {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    answer = run(capsys, "generate", folder, *words[2:], "--chat")[1]
    plain = run(capsys, *words[:2], "alpha1 beta2", *words[3:])[1]
    assert plain == f"alpha1 beta2{answer}"


def test_generate_says_so_where_the_model_returns_nan(capsys, tmp_path, tokenizer):
    model = tiny_model("slack")
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, err = run(capsys, "generate", tmp_path, "alpha1 beta2")
    assert (code, out) == (2, "")
    assert "the model returns NaN or infinity after" in err


def test_completion_knows_commands_options_and_values(capsys):
    for command in completion.leaves(COMMANDS):
        assert completion.parser_of(command).options(), command.__doc__
    pytest.importorskip("shtab")
    code, out, err = run(capsys, "completion", "bash")
    assert code == 0, err
    for word in ("perplexity", "--model.body", "gpt_neox", "--output"):
        assert word in out
    assert "choose" not in run(capsys, "completion", "zsh")[2]
    assert "completion is for bash" in run(capsys, "completion", "fish")[2]


def test_generate_in_constant_memory(capsys, model_folder):
    words = ["generate", model_folder, "alpha1 beta2 " * 20, "--max_new_tokens", "5"]
    code, short, err = run(capsys, *words, "--window", "1", "--sinks", "0")
    assert code == 0, err
    plain = run(capsys, *words)[1]
    assert run(capsys, *words, "--window", "2000", "--scaling", "ntk")[0] == 0
    assert run(capsys, *words, "--window", "2000")[1] == plain != short


def test_eval_streaming(capsys, model_folder, tmp_path):
    (tmp_path / "text.txt").write_text(some_text(200))
    code, out, err = run(
        capsys, "eval", "streaming", model_folder, "--source", tmp_path / "text.txt",
        "--tokens", "100", "--ranges", "2", "--output", tmp_path / "r.json",
    )  # fmt: skip
    assert code == 0, err
    assert "tokens in sight" in out and "51 to 100" in out


def test_generate_refuses_an_empty_prompt(capsys, model_folder):
    code, _, err = run(capsys, "generate", model_folder, "")
    assert code == 2 and "the prompt has no tokens" in err


QUICK = [
    "--sizes.block_length=16", "--sizes.num_layers=2", "--sizes.hidden_size=16",
    "--sizes.num_heads=2", "--sizes.vocab_size=300", "--sizes.steps=6", "--sizes.batch_size=4",
    "--sizes.longest=4", "--sizes.judged=2",
]  # fmt: skip


def test_quickstart_small_then_reused_then_changed(capsys, tmp_path):
    output, texts = tmp_path / "quick", tmp_path / "texts"
    texts.mkdir()
    for index in range(60):
        (texts / f"{index}.txt").write_text(some_text(200, seed=index))
    words = ["quickstart", "--output", output, "--source", texts, *QUICK, "--workers=1"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    content = json.loads((output / "results.json").read_text())
    labels = {(c["model"], c["scaling"]) for c in content["results"]}
    rotary = ("RoFormer", "CoCA-Slack", "CoCA-Strict")
    assert labels == (
        {(m, "none") for m in (*rotary, "ALiBi", "Roles")}
        | {(m, "attend-last") for m in (*rotary, "ALiBi", "Roles")}
        | {(m, "ntk") for m in rotary}
    )
    assert len({c["tokens"] for c in content["results"]}) == 1
    assert [run["name"] for run in content["training"]] == [
        "ALiBi", "RoFormer", "CoCA-Slack", "CoCA-Strict", "Roles",
    ]  # fmt: skip
    assert len({run["tokens"] for run in content["training"]}) == 1
    assert "</html>" in (output / "report.html").read_text()
    assert "CoCA-Strict + NTK (4)" in out

    scored = {d["id"] for c in content["results"] for d in c["documents"]}
    unseen = {d.id for d in read_documents(str(texts)) if held_out(d, HELD_OUT)}
    assert scored and scored <= unseen

    weights = output / "RoFormer" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    (output / "evaluation" / "ALiBi.json").unlink()
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert weights.stat().st_mtime_ns == written
    again = json.loads((output / "results.json").read_text())
    for before, after in zip(content["results"], again["results"], strict=True):
        assert before["nats"] == pytest.approx(after["nats"], rel=1e-6)

    # The same models, other windows: evaluated again.
    code, _, err = run(capsys, *words, "--sizes.judged=3")
    assert code == 0, err
    assert weights.stat().st_mtime_ns == written
    changed = json.loads((output / "results.json").read_text())
    assert changed["results"][0]["tokens"] > content["results"][0]["tokens"]

    (output / "evaluation" / "ALiBi.json").write_text("{")
    code, _, err = run(capsys, *words)
    assert code == 2 and "damaged; remove the file" in err
    code, _, err = run(capsys, *words, "--sizes.vocab-size=290")
    assert code == 2 and "another recipe" in err
    code, _, err = run(capsys, *words, "--sizes.longest=0")
    assert code == 2 and "longest must be at least 1, got 0" in err
    code, _, err = run(capsys, *words, "--sizes.num_layers=1")
    assert code == 2 and "Roles: model.layers lg needs num_layers of at least 2" in err
    code, _, err = run(capsys, *words, "--workers=0")
    assert code == 2 and "workers must be at least 1, got 0" in err

    # Two at a time, in processes of their own: the same figures.
    words[2] = output = tmp_path / "processes"
    code, _, err = run(capsys, *words[:-1], "--workers=2")
    assert code == 0, err
    parallel = json.loads((output / "results.json").read_text())
    for one, other in zip(content["results"], parallel["results"], strict=True):
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-6)
    assert (output / "ALiBi.log").is_file()
    code, _, err = run(capsys, *words, "--sizes.seed=1")
    assert code == 2 and "another recipe" in err


def test_the_installed_program_runs():
    finished = subprocess.run(
        [sys.executable, "-m", "coca_attention.cli", "report"], capture_output=True, text=True
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("coca: error: give result files or folders first")


def test_analyze_measures_angles_or_answers(capsys, model_folder, text_folder, tmp_path):
    angles, answers = tmp_path / "angles.json", tmp_path / "answers.json"
    common = ["analyze", model_folder, "--name", "Tiny"]
    small = ["--max-documents", "1", "--pairs", "8", "--shifts", "[]"]
    run(capsys, *common, "--source", text_folder, *small, "--output", angles)
    assert [c["task"] for c in json.loads(angles.read_text())["results"]] == ["angles"]
    shown = run(capsys, *common, "--passkeys", "220,260", "--prompts", "2", "--output", answers)
    assert "attention to the key’s line at" in shown[1]
    cells = json.loads(answers.read_text())["results"]
    assert [(c["task"], c["length"], c["prompts"]) for c in cells] == [
        ("attention", 220, 2),
        ("attention", 260, 2),
    ]
    assert all(c["model"] == "Tiny" and c["attention"] for c in cells)
