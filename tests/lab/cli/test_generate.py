"""coca generate."""

import io
import shutil
import sys

from commands import run


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
        ([*hot, "--top-p", "0"], "top_p"),
        ([*hot, "--top-k", "0"], "top_k"),
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
