"""``coca serve`` answered over HTTP, with OpenAI's client."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from coca_attention import convert
from coca_attention.models import Roles
from coca_lab.cli import main
from coca_lab.cli.serve import PLAIN_TEMPLATE
from coca_lab.data import load_tokenizer
from conftest import some_text, tiny_model
from families import vanilla

if is_serve_available():
    from starlette import testclient

needs_server = pytest.mark.skipif(
    not is_serve_available(),
    reason="Transformers' server is not installed: pip install 'PATH/TO/coca-attention[serve]'",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model as the quickstart leaves it: without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "CoCA-Strict"
    tiny_model("strict").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def serve(folder, tmp_path):
    """Start a server of the folder with options; returns its process and address."""
    started = []

    def start(*options):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "coca_lab.cli", "serve", str(folder)]
        log = open(tmp_path / "log", "w")  # noqa: SIM115 (of the process)
        process = subprocess.Popen(
            [*command, "--port", str(port), "--device", "cpu", *options],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        started.append(process)
        address = f"http://localhost:{port}"
        for _ in range(240):
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{address}/health")
                return process, f"{address}/v1"
            except OSError:
                time.sleep(0.5)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for process in started:
        process.kill()
        process.wait()


def stop(process, log, by=signal.SIGINT):
    """Ctrl-C, or another signal."""
    process.send_signal(by)
    assert process.wait(timeout=60) == 0, log.read_text()
    assert "Traceback" not in log.read_text() and "coca:" not in log.read_text()


def expected(model, tokenizer, prompt, tokens):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@needs_server
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--continuous-batching",)], ids=["", "continuous"])
def test_a_served_model_answers_as_it_does_alone(serve, folder, tokenizer, tmp_path, options):
    import openai

    process, address = serve(*options)
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    prompts = [some_text(words, seed=words) for words in (3, 9, 14, 20)]
    model = tiny_model("strict")
    wanted = [expected(model, tokenizer, prompt, 16) for prompt in prompts]
    assert len(set(wanted)) > 1

    def ask(prompt):
        chunks = client.chat.completions.create(
            model=str(folder),
            messages=[{"role": "user", "content": prompt}],
            max_tokens=16,
            temperature=0.0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content for chunk in chunks]
        assert len(pieces) > 3  # a stream, not one answer
        return "".join(piece or "" for piece in pieces)

    alone = [ask(prompt) for prompt in prompts]
    # A stream keeps back what is not yet a whole character.
    assert [text.rstrip("�") for text in alone] == [text.rstrip("�") for text in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts * 2)) == alone * 2
    stop(process, tmp_path / "log")
    assert "no chat template" in (tmp_path / "log").read_text()


@needs_server
@pytest.mark.slow
def test_ctrl_c_ends_a_server_in_the_middle_of_an_answer(serve, folder, tmp_path):
    import openai

    process, address = serve()
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    chunks = client.chat.completions.create(
        model=str(folder),
        messages=[{"role": "user", "content": "alpha1 beta2"}],
        max_tokens=300,
        stream=True,
    )
    next(iter(chunks))
    stop(process, tmp_path / "log")


@needs_server
@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_answer(serve, folder, tmp_path):
    import openai

    process, address = serve()
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)
    chunks = client.completions.create(
        model=str(folder), prompt="alpha1", max_tokens=10**6, stream=True
    )
    next(iter(chunks))
    process.send_signal(signal.SIGINT)
    while "Waiting for connections to close" not in (tmp_path / "log").read_text():
        next(iter(chunks))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in (tmp_path / "log").read_text()


@needs_server
@pytest.mark.slow
def test_sigterm_ends_a_server_too(serve, tmp_path):
    stop(serve()[0], tmp_path / "log", signal.SIGTERM)


@needs_server
@pytest.mark.slow
def test_a_port_in_use_is_an_error(folder, capfd):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--port", port, "--device", "cpu"]) == 2
    assert "address already in use" in (said := capfd.readouterr().err)
    assert "try another --port" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the model comes first: coca serve MODEL"),
        (["--port", "8000"], "the model comes first: coca serve MODEL"),
    ],
)
def test_a_server_needs_a_model(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


@needs_server
def test_unknown_options_of_the_server_are_refused(folder, capsys):
    assert main(["serve", str(folder), "--nonsense"]) == 2
    said = capsys.readouterr().err
    assert "No such option" in said and "--nonsense" in said and "see coca serve --help\n" in said


@needs_server
def test_a_decay_and_continuous_batching_are_refused_before_the_server_starts(
    folder, tmp_path, capsys
):
    model = convert(vanilla("Llama"), "rope", roles=Roles("g"))
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(folder).save_pretrained(tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--continuous-batching"]) == 2
    assert "does not support a decay" in capsys.readouterr().err


def test_a_missing_server_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main(["serve", str(folder)]) == 2
    assert "pip install 'PATH/TO/coca-attention[serve]'" in capsys.readouterr().err


def prepared(folder, **options):
    """What ``coca serve`` runs, without a socket."""
    from coca_lab.cli.server import Server

    template = json.dumps({"chat_template": PLAIN_TEMPLATE})
    return Server(
        str(folder), device="cpu", non_blocking=True, chat_template_kwargs=template, **options
    )


@pytest.fixture(scope="module")
def server(folder):
    server = prepared(folder)
    yield server
    server.kill_server()


@pytest.fixture(scope="module")
def batching(folder):
    """With continuous batching, in little memory."""
    server = prepared(folder, continuous_batching=True, cb_num_blocks=64, cb_block_size=32)
    yield server
    server.kill_server()


def ask(server, path, body=None):
    """Status and content of the answer to a request."""
    client = testclient.TestClient(server.server.config.app, raise_server_exceptions=False)
    if body is None:
        return client.get(path)
    # As ASCII: clients write half a surrogate pair as an escape sequence.
    return client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def chat(content="alpha1 beta2", **options):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12, **options}


def text_of(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@needs_server
@pytest.mark.parametrize("options", [{"temperature": 1.5}, {"top_p": 0.99}], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_temperature_is_sampled_with(server, tokenizer, path, options):
    def answer(**options):
        given = chat(**options)
        if path == "/v1/completions":
            given["prompt"] = given.pop("messages")[0]["content"]
        return text_of(ask(server, path, given))

    greedy = expected(tiny_model("strict"), tokenizer, "alpha1 beta2", 12)
    assert answer() == answer(temperature=0) == greedy
    drawn = [answer(seed=seed, **options) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert len({greedy, *drawn}) == 3


@needs_server
def test_the_served_model_is_the_one_that_is_listed(server, folder):
    answer = ask(server, "/v1/models")
    assert answer.status_code == 200
    assert [model["id"] for model in answer.json()["data"]] == [str(folder)]


@needs_server
@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/audio/transcriptions"])
def test_clients_cannot_load_or_unload_models(server, path):
    assert ask(server, path, {"model": "other"}).status_code == 404


PROBLEMS = {
    "max_tokens": (chat(max_tokens=-5), 422, "greater than 0"),
    "temperature": (chat(temperature=-1), 422, "greater than or equal to 0"),
    "top_p": (chat(top_p=7), 422, "less than or equal to 1"),
    "null": (chat(None), 400, "the prompt has no tokens"),
    "empty": (chat(""), 400, "the prompt has no tokens"),
    "surrogate": (chat("a\ud800b"), 400, "half a surrogate pair"),
    "no messages": ({}, 422, "Field required"),
    "content": (chat(5), 422, "valid string"),
    "template": (
        chat(chat_template_kwargs={"chat_template": "{{ raise_exception('no such role') }}"}),
        400,
        "no such role",
    ),
    "tools": (chat(tools=5), 500, "TypeError: 'int' object is not iterable"),
}


@needs_server
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_client_is_told_what_is_wrong(server, problem, stream):
    body, status, message = PROBLEMS[problem]
    answer = ask(server, "/v1/chat/completions", {**body, "stream": stream})
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


async def post(app, name, body, gone=None):
    """The messages that an application sends to a client, who leaves at the event ``gone``."""
    incoming = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent = []

    async def receive():
        if incoming:
            return incoming.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": headers}, receive, send)
    return sent


@needs_server
@pytest.mark.parametrize("kind", ["server", "batching"])
def test_a_request_ends_with_its_client(request, folder, kind):
    """One client leaves at the first of many tokens; the next does not wait for the others."""
    server = request.getfixturevalue(kind)
    (model,) = (timed.model for timed in server._model_manager.loaded_models.values())
    passes = []

    async def clients():
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def count(*_):
            passes.append(1)
            loop.call_soon_threadsafe(started.set)

        app = server.server.config.app
        with model.register_forward_hook(count):
            left = await post(app, "first", {"prompt": "alpha1", "max_tokens": 1900}, started)
            stayed = await post(app, "second", {"prompt": "alpha1", "max_tokens": 2})
        return left, stayed

    left, (start, *_) = asyncio.run(clients())
    assert left == [] and start["status"] == 200
    assert 2 <= len(passes) < 100
    if kind == "batching":
        batches = server._generation_state.get_manager(f"{folder}@main", use_cb=True).scheduler
        assert "first" not in batches.active_requests


@needs_server
def test_requests_that_are_answered_together_sample_alike(batching):
    greedy = text_of(ask(batching, "/v1/chat/completions", chat()))
    answer = ask(batching, "/v1/chat/completions", chat(temperature=0.5))
    assert answer.status_code == 400
    assert "all requests sample as the first one did (greedily)" in answer.text
    # An empty prompt must not end the thread that answers everyone.
    assert ask(batching, "/v1/chat/completions", chat("")).status_code == 400
    assert text_of(ask(batching, "/v1/chat/completions", chat(temperature=0))) == greedy


def damage(model):
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))


@needs_server
def test_a_model_that_returns_nan_is_not_served(folder, tmp_path, capsys):
    model = tiny_model("strict")
    damage(model)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(folder).save_pretrained(tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--device", "cpu"]) == 2
    assert "the model returns NaN or infinity" in capsys.readouterr().err


@needs_server
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_an_answer_with_nan_is_an_error(folder, stream):
    server = prepared(folder)
    damage(*(timed.model for timed in server._model_manager.loaded_models.values()))
    answer = ask(server, "/v1/chat/completions", chat(stream=stream))
    assert "the model returns NaN or infinity" in answer.text
    assert answer.status_code == (200 if stream else 500)
    server.kill_server()
