"""coca generate."""

import io
import shutil
import sys

import pytest

from commands import run


@pytest.fixture
def words(model_folder):
    return ["generate", model_folder, "alpha1 beta2", "--max-new-tokens", "5"]


def test_generate_continues_the_prompt_with_the_likeliest_tokens_or_draws(capsys, words):
    code, likeliest, err = run(capsys, *words)
    assert code == 0, err
    assert likeliest.startswith("alpha1 beta2")
    assert run(capsys, *words[:3], "--max_new_tokens=5")[1] == likeliest
    assert run(capsys, *words, "--method", "ntk_text")[0] == 0
    first, again, other = (
        run(capsys, *words, "--temperature", "5", "--seed", s)[1] for s in (1, 1, 2)
    )
    assert likeliest != first == again != other
    hot = ["--temperature", "5", "--seed", "1"]
    assert run(capsys, *words, *hot, "--top-k", "1")[1] == likeliest
    assert run(capsys, *words, *hot, "--top-p", "0.0001")[1] == likeliest
    for bad, message in (
        (["--top-k", "1"], "set --temperature"),
        ([*hot, "--top-p", "0"], "--top-p"),
        ([*hot, "--top-k", "0"], "--top-k: must be greater than 0, got 0"),
    ):
        code, _, err = run(capsys, *words, *bad)
        assert code == 2 and message in err


def test_what_cannot_be_generated_is_refused_before_weights_are_read(capsys, words, monkeypatch):
    monkeypatch.setattr("coca_lab.cli.generate.load_model", None)
    for wrong, message in (
        (["--method", "temperature"], "a temperature is for layers without positions"),
        (["--chat"], "chat template"),
    ):
        code, said, err = run(capsys, *words, *wrong)
        assert code == 2 and said == "" and message in err


def test_generate_streams_to_a_terminal_or_when_asked(capsys, words, monkeypatch):
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


def test_generate_reads_standard_input_and_chats(
    capsys, words, model_folder, tmp_path, monkeypatch
):
    plain, words[2] = run(capsys, *words)[1], "-"
    for mark in ("", "\ufeff"):  # Windows' editors begin files with one
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{mark}alpha1 beta2\n"))
        assert run(capsys, *words)[1] == plain
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the prompt has no tokens" in run(capsys, *words)[2]
    words[2] = "beta2"
    code, _, err = run(capsys, *words, "--chat")
    assert code == 2 and "has no chat template" in err
    words[1] = shutil.copytree(model_folder, tmp_path / "chat")
    template = "{% for m in messages %}alpha1 {{ m.content }}{% endfor %}"
    (words[1] / "chat_template.jinja").write_text(template)
    assert plain == f"alpha1 beta2{run(capsys, *words, '--chat')[1]}"
