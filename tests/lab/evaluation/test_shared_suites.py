"""Work that processes share: the same results, and a killed one costs its piece alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from coca_lab.analysis import task
from coca_lab.cli import main
from coca_lab.evaluation.journal import Journal
from coca_lab.evaluation.pieces import Claims, Piece, cut, work
from coca_lab.evaluation.suite import estimate_suite, load_suite, run_suite
from conftest import some_text, tiny_model

# The command line; where asked, slow and killed in the middle of a piece.
COMMAND = """
import os, signal, sys, time
from coca_lab.evaluation import pieces
from coca_lab.cli import main

compute, count = pieces._compute, [0]
def slowly(*args):
    count[0] += 1
    if os.environ.get("KILLED") == str(count[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("SLOW", 0)))
    compute(*args)
    print("computed", args[0].texts[0], flush=True)
pieces._compute = slowly
sys.exit(main(["eval", "suite", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory, tokenizer):
    """Two models, a text, and a suite of every kind of piece."""
    folder = tmp_path_factory.mktemp("shared")
    for name in ("llama-rope", "llama-slack"):
        tiny_model(name).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text").mkdir()
    for index in range(4):
        (folder / "text" / f"{index}.txt").write_text(some_text(500, seed=index))
    text = f"source: {folder / 'text'}"
    path = folder / "suite.yaml"
    path.write_text(
        f"""
models: {{RoFormer: {folder / "llama-rope"}, CoCA-Slack: {folder / "llama-slack"}}}
scalings: [{{kind: none}}, {{kind: ntk, factor: 4}}]
perplexity:
  {{{text}, windows: [32, 64], stride: 8, attend_last: 32, positions: 4}}
passkey: {{lengths: [260, 500], samples: 5, max_new_tokens: 4, batch_tokens: 600}}
streaming: {{{text}, tokens: 300, window: 28, ranges: 2}}
"""
    )
    return path


@pytest.fixture(scope="module")
def alone(suite, tmp_path_factory):
    """The results of one process."""
    return results(run_suite(load_suite(suite), tmp_path_factory.mktemp("alone")))


UNSTEADY = ("seconds", "tokens_per_second", "megabytes", "cache_megabytes")


def results(path):
    """The cells of a result file without what every run measures anew."""

    def steady(value):
        if isinstance(value, dict):
            return {k: steady(v) for k, v in value.items() if k not in UNSTEADY}
        return [steady(v) for v in value] if isinstance(value, list) else value

    return steady(json.loads(path.read_text())["results"])


def start(suite, output, rank=0, world=1, **variables):
    """Start one process of a launch."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(suite), "--output", str(output)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_share_a_suite_and_take_over_what_a_killed_one_left(suite, alone, tmp_path):
    out = tmp_path / "out"
    running = [
        start(suite, out, 0, 3, SLOW="0.2"),
        start(suite, out, 1, 3, SLOW="0.2", KILLED="3"),
        start(suite, out, 2, 3, SLOW="0.2"),
    ]
    first, killed, last = (process.communicate(timeout=120) for process in running)
    assert [process.returncode for process in running] == [0, -signal.SIGKILL, 0], (first, last)
    shares = [out.count("computed ") for out, _ in (first, killed, last)]
    assert min(shares) >= 2, "every process had its share"
    every = [line for out, _ in (first, killed, last) for line in out.splitlines()]
    computed = [line for line in every if line.startswith("computed")]
    assert len(computed) == len(set(computed)), "nothing was computed twice"
    assert "Results:" in first[0] and "Results:" not in last[0]
    assert results(out / "results.json") == alone


def test_results_do_not_depend_on_the_order_of_pieces(suite, alone, tmp_path, monkeypatch):
    """Which a process takes, and when, is up to the others."""

    def reverse(pieces, *rest, **options):
        work(pieces[::-1], *rest, **options)

    monkeypatch.setattr("coca_lab.evaluation.suite.work", reverse)
    assert results(run_suite(load_suite(suite), tmp_path)) == alone


def test_the_next_start_goes_on_after_all_were_killed(suite, alone, tmp_path):
    out = tmp_path / "out"
    killed = start(suite, out, 1, 2, KILLED="3")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    before = (out / "journal.jsonl").read_text().splitlines()
    assert before and not (out / "results.json").exists()
    with open(out / "journal.jsonl", "a") as file:
        file.write('{"key": {"ta')  # killed while writing
    run_suite(load_suite(suite), out)
    assert results(out / "results.json") == alone
    lines = (out / "journal.jsonl").read_text().splitlines()
    assert lines[: len(before)] == before
    assert len(lines) == len({json.dumps(json.loads(line)["key"]) for line in lines})


def launched(processes, *words):
    """Run ``coca`` in processes as users start them."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "coca_lab.cli", *map(str, words)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Results:") == 1
    return done


def torchrun(suite, output, *words):
    """The results of a suite in two processes."""
    launched(2, "eval", "suite", suite, *words, "--output", output)
    return results(output / "results.json")


def analysis(suite, output, *words):
    """The words of an analysis of four documents."""
    settings = ["--pairs=64", "--max-documents=4", "--shifts=[1]", *words]
    model = suite.parent / "llama-slack"
    return ["analyze", model, "--source", suite.parent / "text", *settings, "--output", output]


def test_an_analysis_goes_on_where_it_ended(suite, tmp_path, monkeypatch):
    alone, broken = tmp_path / "alone.json", tmp_path / "broken.json"
    assert main([*map(str, analysis(suite, alone))]) == 0
    read, indices = task.read_document, []

    def read_document(model, document, index, *rest):
        indices.append(index)
        if len(indices) == 2:
            raise MemoryError
        return read(model, document, index, *rest)

    monkeypatch.setattr(task, "read_document", read_document)
    words = [*map(str, analysis(suite, broken))]
    assert main(words) == 2 and not broken.exists()  # out of memory
    assert main(words) == 0
    assert sorted(indices) == [0, 1, 1, 2, 3]
    assert results(broken) == results(alone)
    assert {path.name for path in tmp_path.iterdir()} == {"alone.json", "broken.json"}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["analyze"], ["--source=TEXT", "--max-documents=2", "--pairs=64"]),
        (["analyze"], ["--passkeys=260,300", "--prompts=3"]),
        (["eval", "perplexity"], ["--source=TEXT", "--windows=[32,64]"]),
        (["eval", "streaming"], ["--source=TEXT", "--tokens=300", "--window=28"]),
    ],
)
def test_the_first_process_writes_what_all_have_done(
    command, options, suite, tmp_path, monkeypatch, capsys
):
    text = str(suite.parent / "text")
    options = [option.replace("TEXT", text) for option in options]
    common = [*command, str(suite.parent / "llama-rope"), *options]
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    assert main([*common, "--output", str(alone)]) == 0
    capsys.readouterr()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([*common, "--output", str(shared)]) == 0  # takes all, as nobody else has begun
    assert not capsys.readouterr().out and not shared.exists()
    journal = tmp_path / "shared.journal.jsonl"
    done = journal.read_text()
    monkeypatch.setenv("RANK", "0")
    assert main([*common, "--output", str(shared)]) == 0
    assert journal.read_text() == done, "nothing was computed twice"
    assert "Results:" in capsys.readouterr().out
    assert results(shared) == results(alone)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--passkeys=260,300", "--prompts=3"]])
def test_an_analysis_under_torchrun(words, suite, tmp_path):
    assert main([*map(str, analysis(suite, tmp_path / "alone.json", *words))]) == 0
    launched(2, *analysis(suite, tmp_path / "two.json", *words))
    assert results(tmp_path / "two.json") == results(tmp_path / "alone.json")


@pytest.mark.slow
def test_under_torchrun(suite, alone, tmp_path):
    assert torchrun(suite, tmp_path / "out") == alone


def close(value, other):
    """Equal but for numbers, which may differ by rounding; a sum of a thousand nats in float32."""
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(close(value[k], other[k]) for k in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(close, value, other))
    return value == pytest.approx(other, rel=1e-5) if isinstance(value, float) else value == other


@pytest.mark.slow
def test_a_model_that_is_split_over_processes(suite, alone, tmp_path):
    """Tensor parallelism: half the heads in each of two processes, collinear and rotary."""
    words = ["--device=tensor-parallel", "--streaming=null"]
    found = torchrun(suite, tmp_path / "out", *words)
    assert close(found, [cell for cell in alone if cell["task"] != "streaming"])
    lines = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    (tmp_path / "out" / "journal.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert torchrun(suite, tmp_path / "out", *words) == found
    with pytest.raises(ValueError, match="needs several processes"):
        run_suite(load_suite(suite, ["--device=tensor-parallel"]), tmp_path / "out")


@pytest.mark.slow
def test_texts_that_are_split_over_processes(suite, alone, tmp_path):
    """Context parallelism, of a suite and of one model."""
    expected = [cell for cell in alone if cell["task"] == "perplexity"]
    words = ["--device=context-parallel", "--streaming=null", "--passkey=null"]
    assert close(torchrun(suite, tmp_path / "suite", *words), expected)
    text = ["--source", suite.parent / "text", "--windows=[32,64]", "--stride=8"]
    model = [suite.parent / "llama-slack", *text, "--positions=4"]
    command = ["eval", "perplexity", *model, "--name=CoCA-Slack", "--device=context-parallel"]
    found = launched(2, *command, "--output", tmp_path / "results.json")
    mine = [c for c in expected if c["model"] == "CoCA-Slack" and c["scaling"] == "none"]
    assert close(results(tmp_path / "results.json"), mine), found.stdout


def test_texts_can_be_split_for_perplexity_alone(suite):
    with pytest.raises(ValueError, match="for perplexity alone; got passkey, streaming"):
        load_suite(suite, ["--device=context-parallel"])


def test_layers_over_all_devices(suite, alone, tmp_path, monkeypatch):
    wanted = load_suite(suite, ["--device=auto"])
    assert results(run_suite(wanted, tmp_path)) == alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process on each machine"):
        run_suite(wanted, tmp_path)


def test_claims_end_with_their_process(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from coca_lab.evaluation.pieces import Claims\n"
        "claims = Claims(Path(sys.argv[1]), alone=False)\n"
        "print(claims.take('\"a\"'), flush=True); time.sleep(60)"
    )
    lock = tmp_path / ".claims"
    other = subprocess.Popen([sys.executable, "-c", program, lock], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"True\n"
    claims = Claims(lock, alone=False)
    assert not claims.take('"a"') and claims.take("b")
    # Nobody waits for a piece that another process works on, if told so; if not, it is taken over.
    journal, seen = Journal(tmp_path / "journal.jsonl"), []
    piece = Piece("a", ["a"], 10, 10, lambda missing, advance: seen.append(missing) or [1])
    work([piece], journal, claims=claims, wait=False)
    assert not seen
    other.kill()
    other.wait()
    work([piece], journal, claims=claims)
    assert seen == [[0]] and Journal(tmp_path / "journal.jsonl").get("a") == 1


def test_a_piece_is_not_looked_at_again_for_every_other_one(monkeypatch):
    seen, looks, missing = [], [], Piece.missing
    monkeypatch.setattr(Piece, "missing", lambda *args: looks.append(1) or missing(*args))
    pieces = [Piece("a", [i], 10, 10, lambda missing, advance: [1]) for i in range(300)]
    work(pieces, Journal(), lambda label, done, total: seen.append(done))
    assert seen == [*range(10, 3001, 10)]
    assert len(looks) < 10 * len(pieces)


def test_file_systems_without_locks_serve_one_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", refuse)
    alone = Claims(tmp_path / "a", alone=True)
    assert alone.take("a")
    alone.release("a")
    with pytest.raises(ValueError, match=r"cannot be locked here .*another file system"):
        Claims(tmp_path / "b", alone=False).take("a")


def test_two_writers_of_a_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    one, two = Journal(path), Journal(path)
    one.put("a", 1)
    two.put("b", 2)
    with open(path, "a") as file:
        file.write('{"key": "c", "val')
    assert one.get("b") is None
    one.refresh()
    assert one.get("b") == 2 and path.read_text().endswith("val")
    two.put_all([("d", 4), ("e", 5)], 3.0)
    assert len(path.read_text().splitlines()) == 4 and Journal(path).get("e") == 5
    assert Journal(path).seconds('"d"') == 1.5
    path.unlink()  # by hand, while it is in use
    one.refresh()
    one.put("f", 6)
    assert len(Journal(path)) == 1 and one.get("a") == 1


def test_cut():
    assert [(s.start, s.stop) for s in cut([3, 3, 3, 9, 1], 6)] == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(suite, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["eval", "suite", str(suite), "--dry-run", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "CoCA-Slack ntk perplexity" in printed and "Nothing was written" in printed
    assert "not measured" in printed  # streaming is one piece
    assert not out.exists()
    wanted = load_suite(suite, ["--streaming=null"])
    before = estimate_suite(wanted, out)
    assert [e.cells for e in before] == [3, 2, 2, 2, 3, 2, 2, 2]  # attend-last has no scaling
    assert all(e.seconds > 0 and e.left == e.tokens for e in before)
    passkeys = before[1]
    assert passkeys.tokens == 5 * (260 + 4 * 4) + 5 * (500 + 4 * 4)
    started = time.perf_counter()
    run_suite(wanted, out)
    took = time.perf_counter() - started
    assert took / 10 < sum(e.seconds for e in before) < took * 10
    after = estimate_suite(wanted, out)
    assert all((e.cells, e.left, e.seconds) == (0, 0, 0.0) for e in after)
    assert [e.tokens for e in after] == [e.tokens for e in before]
