"""Prompts that a server answers: servers that run, and one that says what a test wants."""

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from tokenizers.processors import TemplateProcessing

from coca_attention.errors import UserError
from coca_lab.data.ruler import ask_for_ruler
from coca_lab.data.tasks import Prompt, ask_for_passkeys
from coca_lab.evaluation import endpoint as module
from coca_lab.evaluation.endpoint import NO_PENALTY, Endpoint, as_sent
from coca_lab.export.llama_cpp import serve
from commands import run, serving
from natives import exported, penalised, roles, saved


def completion(text=" 12345", **usage):
    return 200, json.dumps({"choices": [{"text": text}], "usage": usage})


@contextmanager
def server(*said):
    """A server that says one thing after the other, the last one from then on; and what it read."""
    read, lock, together = [], threading.Lock(), threading.Barrier(2)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                read.append((self.path, self.headers, body))
                status, text = said[min(len(read), len(said)) - 1]
            if text == "together":
                together.wait(10)  # for another request, else the test fails
                status, text = completion()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1", read
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "WAITS", (0.0, 0.0))


def prompts_of(tokenizer, count=1):
    return ask_for_passkeys(tokenizer, 300, range(count))


def test_a_prompt_is_sent_as_openai_says(tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(completion(prompt_tokens=300)) as (url, read):
        prompts = prompts_of(tokenizer)
        assert Endpoint(f"{url}/", "m").answers(tokenizer, prompts, 7) == [" 12345"]
    ((path, headers, body),) = read
    assert path == "/v1/completions" and headers["Authorization"] == "Bearer secret"
    text = tokenizer.decode(prompts[0].ids)
    asked = {"model": "m", "prompt": text, "max_tokens": 7, "temperature": 0}
    assert body == asked | NO_PENALTY


def test_a_server_is_asked_without_the_penalties_that_it_does_not_know(tokenizer):
    refused = 422, "Unexpected fields: {'repeat_penalty', 'repetition_penalty'}"
    with server(refused, completion()) as (url, read):
        endpoint = Endpoint(url, "m")
        assert endpoint.answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
        assert endpoint.answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
    sent = [NO_PENALTY.keys() & body for _, _, body in read]
    assert sent == [NO_PENALTY.keys(), {"frequency_penalty"}, {"frequency_penalty"}]


def test_a_server_that_counts_no_tokens_is_warned_of(tokenizer, caplog):
    with server(completion()) as (url, _):
        Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer, 3), 7)
    (said,) = caplog.messages
    assert "cut prompts are not noticed" in said


def test_a_text_is_sent_only_if_it_has_the_same_tokens(tokenizer):
    (prompt,) = ask_for_ruler(tokenizer, "niah_single_1", 900, [0])
    assert as_sent(tokenizer, prompt) == prompt.text
    started = copy.deepcopy(tokenizer)  # which begins texts with a token
    first = (tokenizer.eos_token, tokenizer.eos_token_id)
    started.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first[0]} $A", special_tokens=[first]
    )
    (prompt,) = ask_for_passkeys(started, 300, [0])
    assert as_sent(started, prompt) == started.decode(prompt.ids[1:])
    ids = [tokenizer.vocab["a"], *tokenizer("lpha")["input_ids"]]  # it would be read as one token
    assert as_sent(tokenizer, Prompt(ids, {})) == ids != tokenizer("alpha")["input_ids"]


def test_several_requests_are_answered_at_once(tokenizer):
    with server((200, "together")) as (url, read):
        assert len(Endpoint(url, "m", 2).answers(tokenizer, prompts_of(tokenizer, 4), 7)) == 4
    assert len(read) == 4


def test_busy_servers_are_asked_again(tokenizer):
    with server((503, "loading"), (429, "too many"), completion()) as (url, read):
        assert Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
    assert len(read) == 3


@pytest.mark.parametrize(
    ("said", "message", "requests"),
    [
        ((400, '{"error": "prompt is\\ntoo long"}'), r'status 400: \{"error": "prompt is\\ntoo', 1),
        ((404, ""), "status 404: nothing", 1),
        ((500, "broken"), "status 500: broken, 3 times", 3),
        ((200, "<html>"), "expected JSON, got <html>", 1),
        ((200, '{"error": "no such model"}'), 'a completion, got {"error": "no such model"}', 1),
        ((200, '{"choices": []}'), 'expected a completion, got {"choices": \\[\\]}', 1),
        ((200, '{"choices": [{"text": null}]}'), 'expected a completion, got {"choices"', 1),
        ((200, "[1]"), "expected a completion, got \\[1\\]", 1),
        (completion(prompt_tokens="300"), 'expected a number of prompt_tokens, got "300"', 1),
        (completion(prompt_tokens=256), "it read 256 tokens of a prompt of 300: give the", 1),
    ],
)
def test_wrong_answers_are_errors_with_the_servers_words(tokenizer, said, message, requests):
    with server(said) as (url, read):
        with pytest.raises(UserError, match=message) as caught:
            Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7)
        assert str(caught.value).startswith(f"{url} (m): ")
    assert len(read) == requests


def test_a_server_that_is_gone_is_not_asked_for_ever(tokenizer, monkeypatch, caplog):
    with server(completion()) as (url, _):
        pass
    endpoint, asked = Endpoint(url, "m"), Mock(wraps=module.urlopen)
    monkeypatch.setattr(module, "urlopen", asked)
    for _ in range(2):
        with pytest.raises(UserError, match=r"no answer \(.*refused.*\), 3 times"):
            endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert asked.call_count == 3
    (said,) = caplog.messages  # while the user waits
    assert "refused" in said and said.endswith("asking again, up to 2 times")
    with pytest.raises(UserError, match="expected an address such as http"):
        Endpoint("file:///etc/passwd", "m")


def test_a_command_resumes_with_what_the_server_has_not_answered(capsys, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["eval", "passkey", tmp_path / "tokenizer", "--model", "m", "--requests", "2",
             "--lengths", "300", "--samples", "6", "--output", tmp_path / "r.json"]  # fmt: skip
    with server(*[completion()] * 4, (400, "out of memory")) as (url, read):
        code, _, err = run(capsys, *words, "--endpoint", url)
        assert code == 2 and "status 400: out of memory" in err
        del read[:]  # from the beginning
        code, out, _ = run(capsys, *words, "--endpoint", url)
    assert code == 0 and len(read) == 2
    cells = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [sample["output"] for sample in cells[0]["samples"]] == [" 12345"] * 6
    assert cells[0]["model"] == "m" and "300" in out


@pytest.mark.parametrize("command", ["eval", "study"])
def test_a_server_is_asked_again_once_a_command_has_ended(capsys, tokenizer, tmp_path, command):
    tokenizer.save_pretrained(tmp_path / "m")
    passkey = {"lengths": [300], "samples": 2}
    content = {"models": {"m": str(tmp_path / "m")}, "passkey": passkey}
    (tmp_path / "study.yaml").write_text(json.dumps(content))
    words, file = ["study", tmp_path / "study.yaml", "--output", tmp_path / "out"], "out/results"
    if command == "eval":
        words = ["eval", "passkey", tmp_path / "m", "--lengths", "300", "--samples", "2"]
        words, file = [*words, "--output", tmp_path / "r.json", "--model", "m"], "r"
    with server(*[completion(" 1")] * 2, completion(" 2")) as (url, read):
        for count, answer in ((2, " 1"), (4, " 2")):
            assert run(capsys, *words, "--endpoint", url)[0] == 0 and len(read) == count
            (cell,) = json.loads((tmp_path / f"{file}.json").read_text())["results"]
            assert [sample["output"] for sample in cell["samples"]] == [answer] * 2


def test_what_is_no_prompt_is_not_asked(capsys, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    code, _, err = run(capsys, "eval", "perplexity", tmp_path, "--endpoint", "http://localhost/v1")
    assert code == 2 and "unrecognized arguments: --endpoint" in err
    words = ["eval", "passkey", tmp_path, "--endpoint", "http://localhost/v1"]
    code, _, err = run(capsys, *words[:3], "--model", "m")
    assert code == 2 and "model is what a server calls it: set --endpoint" in err
    code, _, err = run(capsys, *words, "--method", "yarn")
    assert code == 2 and "an endpoint answers prompts, without a method" in err


def assert_answers_alike(capsys, words, served, output):
    """A server and a model in this process."""
    found = []
    for where in (served, []):
        code, _, err = run(capsys, "eval", "passkey", *words, *where, "--output", output)
        assert code == 0, err
        cells = json.loads(output.read_text())["results"]
        # A stream keeps back what is not yet a whole character.
        found.append([x["output"].rstrip("�") for cell in cells for x in cell["samples"]])
        output.unlink()
    assert found[0] == found[1] and len(set(found[0])) > 1


@pytest.mark.slow
def test_coca_serve_answers_as_the_model_does_here(capsys, model_folder, tmp_path):
    pytest.importorskip("uvicorn", reason="Transformers' server is an extra")
    folder = penalised(model_folder, tmp_path / "model")
    words = [folder, "--lengths", "300,301", "--samples", "8", "--max-new-tokens", "12"]
    with serving(folder, tmp_path / "log", "--context", "2048") as (url, _):
        at = ["--endpoint", f"{url}/v1", "--model", str(folder), "--requests", "2"]
        assert_answers_alike(capsys, words, at, tmp_path / "r.json")


@pytest.mark.slow
def test_llama_cpp_answers_as_transformers_does(capsys, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp", reason="llama.cpp as its authors publish it")
    source = saved(roles(), tmp_path / "model")
    native = exported(source, tmp_path / "native", "--context", "512", "--gguf")
    server = serve(next(native.glob("*.gguf")), 512)
    words = [native, "--samples", "6", "--max-new-tokens", "12", "--lengths"]
    at = ["--endpoint", f"{server.listening_address}/v1", "--model", "any", "--requests", "3"]
    assert_answers_alike(capsys, [*words, "350"], at, tmp_path / "r.json")
    code, _, err = run(capsys, "eval", "passkey", *words, "600", *at)
    assert code == 2 and "status 400" in err and "exceed" in err
