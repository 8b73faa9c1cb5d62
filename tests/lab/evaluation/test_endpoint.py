"""Prompts that a server answers: servers that run, and one that says what a test wants."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from coca_attention.errors import UserError
from coca_lab.data.ruler import ask_for_ruler
from coca_lab.data.tasks import Prompt, ask_for_passkeys
from coca_lab.evaluation import endpoint as module
from coca_lab.evaluation.endpoint import NO_PENALTY, Endpoint, as_sent
from coca_lab.export.llama_cpp import serve
from coca_lab.loading import load_model
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
                says = said[min(len(read), len(said)) - 1]
            status, text, *headers = says(body) if callable(says) else says
            if text == "together":
                together.wait(10)  # for another request, else the test fails
                status, text = completion()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in headers:
                self.send_header(name, value)
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
def waits(monkeypatch):
    """The seconds for which the client waits before it asks again, here in no time."""
    monkeypatch.setattr(module, "RETRIES", 2)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    seconds, sleep = [], anyio.sleep

    async def wait(delay):
        seconds.append(delay)
        await sleep(0)

    monkeypatch.setattr(anyio, "sleep", wait)
    return seconds


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


@pytest.mark.parametrize(
    "refused",
    [
        # Transformers, OpenAI, pydantic, and one that lists what it takes
        "Unexpected fields in the request: {'repeat_penalty', 'repetition_penalty'}",
        '{"error": {"message": "Unrecognized request argument supplied: repeat_penalty"}}',
        '{"detail": [{"loc": ["body", "repeat_penalty"], "input": 1}]}',
        "unknown field `repeat_penalty`, expected one of `prompt`, `frequency_penalty`",
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_server_is_asked_without_a_field_that_it_names(tokenizer, refused, status, caplog):
    # A busy server between does not count: it is asked again as often as ever.
    busy = [(503, "loading")] * 2
    with server(*busy, (status, refused), *busy, completion()) as (url, read):
        endpoint = Endpoint(url, "m")
        assert endpoint.answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
        assert endpoint.answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
    sent = [NO_PENALTY.keys() & body for _, _, body in read]
    assert sent == [NO_PENALTY.keys()] * 3 + [NO_PENALTY.keys() - {"repeat_penalty"}] * 4
    assert [said for said in caplog.messages if "it takes no repeat_penalty" in said]


@pytest.mark.parametrize("status", [503, 429, 500, 403])
def test_no_other_status_drops_a_guard(tokenizer, status):
    with server((status, "repeat_penalty"), completion()) as (url, read):
        endpoint = Endpoint(url, "m")
        if status == 403:
            with pytest.raises(UserError, match="status 403"):
                endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
        else:
            endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert not endpoint.refused and NO_PENALTY.keys() < read[-1][2].keys()


@pytest.mark.parametrize("status", [400, 422, 503])
def test_a_server_that_repeats_the_request_refuses_no_field(tokenizer, status):
    sent = {"model": "m", "prompt": "a", "max_tokens": 7} | NO_PENALTY
    said = json.dumps({"error": f"no such model: {json.dumps(sent)}", "request": sent})
    with server((status, said)) as (url, read):
        endpoint = Endpoint(url, "m")
        with pytest.raises(UserError, match=f"status {status}: .*no such model"):
            endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert not endpoint.refused and len(read) == (3 if status == 503 else 1)


def test_a_server_that_counts_no_tokens_is_warned_of(tokenizer, caplog):
    with server(completion()) as (url, read):
        Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer, 3), 7)
    assert all("Authorization" not in headers for _, headers, _ in read)
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


def test_a_server_says_how_long_to_wait(tokenizer, waits):
    with server((503, "busy", ("Retry-After", "7")), completion()) as (url, _):
        assert Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
    assert waits == [7.0]
    tomorrow = 429, "tomorrow", ("Retry-After", "86400")
    message = "429: tomorrow"
    with server(tomorrow) as (url, _), pytest.raises(UserError, match=message):
        Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7)
    assert max(waits) < 10  # it does not wait so long


@pytest.mark.parametrize("broken", [1, 3])
def test_a_body_that_breaks_off_is_asked_for_again(tokenizer, broken):
    half = (200, completion()[1][:20], ("Content-Length", "900"))
    with server(*[half] * broken, completion()) as (url, read):
        endpoint = Endpoint(url, "m")
        if broken == 1:
            assert endpoint.answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]
        else:
            with pytest.raises(UserError, match=r"no answer \(.*\)"):
                endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert len(read) == min(broken + 1, 3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_the_key_to_another_host(tokenizer, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(completion()) as (other, stolen):
        elsewhere = status, "", ("Location", f"{other}/completions")
        message = f"status {status}.* redirects to {other}"
        with server(elsewhere) as (url, _), pytest.raises(UserError, match=message):
            Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7)
    assert not stolen


def test_the_key_is_in_no_message_and_no_answer(tokenizer, monkeypatch, caplog):
    key = "sk-" + "0123456789" * 6
    monkeypatch.setenv("OPENAI_API_KEY", f"{key}\n")
    said = f"the key {key} is wrong"
    cut = 400, "x" * 270 + key  # within the key, if it were not taken out first
    elsewhere = 302, "", ("Location", f"http://x/?{key}")
    for refusal in ((401, said), (503, said), (200, said), cut, elsewhere):
        with server(refusal) as (url, _), pytest.raises(UserError) as caught:
            Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7)
        assert "[OPENAI_API_KEY]" in str(caught.value) and "sk-0" not in str(caught.value)
        assert caught.value.__suppress_context__  # a traceback has no other message
    with server(completion(f" 12345 {key}")) as (url, _):
        endpoint = Endpoint(url, "m")
        with pytest.raises(UserError, match="answer repeats the key, OPENAI_API_KEY"):
            endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert "sk-0" not in caplog.text and key not in repr(vars(endpoint))
    with pytest.raises(UserError, match="no user or password: set OPENAI_API_KEY") as caught:
        Endpoint(f"http://me:{key}@localhost/v1", "m")
    assert key not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with pytest.raises(UserError, match="characters that no key has"):
        Endpoint("http://localhost/v1", "m")


@pytest.mark.parametrize(
    ("said", "message", "requests"),
    [
        ((400, '{"error": "prompt is\\ntoo long"}'), r'status 400: \{"error": "prompt is\\ntoo', 1),
        ((404, ""), "status 404: nothing", 1),
        ((500, "broken"), "status 500: broken", 3),
        ((200, "<html>"), "expected JSON, got <html>", 1),
        ((200, '{"error": "no such model"}'), 'a completion, got {"error":"no such model"}', 1),
        ((200, '{"choices": []}'), 'expected a completion, got {"choices":\\[\\]}', 1),
        ((200, '{"choices": [{"text": null}]}'), 'expected a completion, got {"choices"', 1),
        ((200, "[1]"), "expected a completion, got \\[1\\]", 1),
        (completion(prompt_tokens="300"), 'expected a number of prompt_tokens, got "300"', 1),
        (completion(prompt_tokens=256), "it read 256 tokens of a prompt of 300: give the", 1),
        (completion(prompt_tokens=256), "counts no tokens that it finds in a cache, switch", 1),
        (completion(prompt_tokens=301), "it read 301 tokens of a prompt of 300: .* takes$", 1),
        (completion(" 1" * 99), "it answered .* tokens where 7 were asked for", 1),
    ],
)
def test_wrong_answers_are_errors_with_the_servers_words(tokenizer, said, message, requests):
    with server(said) as (url, read):
        with pytest.raises(UserError, match=message) as caught:
            Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7)
        assert str(caught.value).startswith(f"{url} (m): ")
    assert len(read) == requests


def test_tokens_from_a_cache_may_be_counted_apart(tokenizer):
    counted = completion(prompt_tokens=44, prompt_tokens_details={"cached_tokens": 256})
    with server(counted) as (url, _):
        assert Endpoint(url, "m").answers(tokenizer, prompts_of(tokenizer), 7) == [" 12345"]


def test_a_prompt_in_an_answer_is_no_answer(tokenizer, caplog):
    (prompt,) = prompts_of(tokenizer)
    text = tokenizer.decode(prompt.ids)
    for echo in (text, f"<s>{text}", text.replace(" ", "  ")):
        with server(completion(f"{echo} is what?")) as (url, _):
            endpoint = Endpoint(url, "m")
            if "  " in echo:
                with pytest.raises(UserError, match="repeats the prompt with other spaces"):
                    endpoint.answers(tokenizer, [prompt], 7)
            else:
                assert endpoint.answers(tokenizer, [prompt], 7) == [" is what?"]
    assert "it repeats the prompt, which is taken off its answers" in caplog.text


def test_a_server_that_is_gone_is_not_asked_for_ever(tokenizer, waits, caplog):
    with server(completion()) as (url, _):
        pass
    endpoint = Endpoint(url, "m")
    for _ in range(2):
        with pytest.raises(UserError, match=r"no answer \(.*\)"):
            endpoint.answers(tokenizer, prompts_of(tokenizer), 7)
    assert len(waits) == 2
    (said,) = caplog.messages  # while the user waits
    assert said.endswith("asking again, up to 2 times")


def test_a_server_that_hangs_is_asked_twice(capsys, tokenizer, tmp_path, monkeypatch):
    monkeypatch.undo()  # with the client's own waits and retries
    tokenizer.save_pretrained(tmp_path)
    words = ["eval", "passkey", tmp_path, "--model", "m", "--lengths", "300", "--samples", "1"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = ["--endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "--timeout", "1"]
        code, _, err = run(capsys, *words, *at)
        assert code == 2 and "no answer within 2 times 1 s" in err and "--timeout" in err
        silent.settimeout(1)
        asked = [silent.accept()[0] for _ in range(2)]
        with pytest.raises(TimeoutError):
            silent.accept()
    for connection in asked:
        connection.close()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000", "http://", "http://a:b/v1", "http://[1/v1"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UserError, match="expected an address such as http"):
        Endpoint(url, "m")


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package openai: .*\[endpoint\]"):
        Endpoint("http://localhost/v1", "m")


def test_an_interruption_is_obeyed_while_a_server_hangs(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    words = ["eval", "passkey", tmp_path, "--model", "m", "--lengths", "300", "--samples", "2"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        command = [sys.executable, "-m", "coca_lab.cli", *map(str, words), "--endpoint", url]
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        silent.settimeout(120)
        try:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(4) == b"POST"
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=60)  # the request itself may take an hour
        finally:
            process.kill()
    assert process.returncode == 130 and "coca: interrupted" in err and "Traceback" not in err


# Log probabilities of the tokens of a text


def probabilities(*values, count=4, likeliest=-1.0):
    others = [None, *({"x": likeliest, "y": value} for value in values)]
    logprobs = {"token_logprobs": [None, *values], "top_logprobs": others}
    choice = {"text": "x", "logprobs": logprobs}
    return 200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": count}})


def test_log_probabilities_are_those_of_the_tokens_of_a_text():
    with server(probabilities(-1, -2.5, -0.5, -9)) as (url, read):
        found = Endpoint(url, "m").log_probabilities([[5, 6, 7, 8], [1, 2, 3, 4]])
        assert found == [[(-1.0, True), (-2.5, False), (-0.5, True)]] * 2
        assert Endpoint(url, "m").log_probabilities([]) == []
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "model": "m"}
    assert sorted(body["prompt"] for _, _, body in read) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert all(body.items() >= asked.items() for _, _, body in read)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (completion(prompt_tokens=4), "takes echo with logprobs, as vLLM does, got"),
        (probabilities(-1), "takes echo with logprobs, as vLLM does, got 2 for 4 tokens"),
        ((400, "Only no echo is supported"), "Only no echo is .*takes echo with logprobs"),
        (probabilities(-1, -2, -3, count=3), "it read 3 tokens of a prompt of 4"),
        (probabilities(-1, None, -4), "expected a log probability, got null"),
        (probabilities(-1, -2, -4, likeliest=None), "expected the likeliest token, got .*null"),
        (probabilities(-1, float("nan"), -4), "expected a log probability, got NaN"),
        (probabilities(-1, 3, -4), "expected a log probability, got 3"),
        ((200, "[1]"), r"expected a completion, got \[1\]"),
    ],
)
def test_servers_without_log_probabilities_of_prompts_are_refused(said, message):
    with server(said) as (url, _), pytest.raises(UserError, match=message):
        Endpoint(url, "m").log_probabilities([[5, 6, 7, 8]])


def test_needles_behind_a_server_are_those_of_the_model(capsys, model_folder, tmp_path):
    model = load_model(model_folder, device="cpu")

    def says(body):
        together.wait(10)
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].double().log_softmax(-1)
        values = scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        others = [{"any": value} for value in scores.amax(-1).tolist()]
        logprobs = {"token_logprobs": [None, *values], "top_logprobs": [None, *others]}
        choice = {"text": "x", "logprobs": logprobs}
        return 200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": ids.numel()}})

    together = threading.Barrier(2)  # one request alone would wait for another in vain
    for name in ("a", "b"):
        line = f"One line of text {name} that is long enough.\n"
        (tmp_path / f"{name}.txt").write_text(line * 400)
    texts = tmp_path / "*.txt"
    words = ["eval", "needles", model_folder, "--source", texts, "--lengths", "900", "--count", "3"]
    words += ["--near", "300", "--output", tmp_path / "r.json"]
    found = []
    with server(says) as (url, read):
        for where in ([], ["--endpoint", url, "--model", "m"]):
            code, _, err = run(capsys, *words, *where)
            assert code == 0, err
            (cell,) = json.loads((tmp_path / "r.json").read_text())["results"]
            found.append([needle for text in cell["documents"] for needle in text["needles"]])
        assert len(read) == 2 and len(found[0]) == 6
    for here, there in zip(*found, strict=True):
        assert here["nats"] == pytest.approx(there["nats"], abs=1e-4)
        assert {**here, "nats": 0} == {**there, "nats": 0}
    code, _, err = run(capsys, *words, "--method", "yarn", "--endpoint", "http://localhost/v1")
    assert code == 2 and "is for tasks of prompts or needles, without a method" in err


# Commands


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
    assert code == 2 and "there is no option --endpoint" in err
    words = ["eval", "passkey", tmp_path, "--endpoint", "http://localhost/v1"]
    code, _, err = run(capsys, *words[:3], "--model", "m")
    assert code == 2 and "--model is what a server calls it: set --endpoint" in err
    code, _, err = run(capsys, *words, "--method", "yarn")
    assert code == 2 and "is for tasks of prompts or needles, without a method" in err


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
    with serving(folder, tmp_path / "log") as (url, _):
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
