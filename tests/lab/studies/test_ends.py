"""Processes that are killed, and a full disk: the command, or the same one again, finishes."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from coca_lab.files import RESUMABLE
from runs import OPTIONS

pytestmark = pytest.mark.slow
STUDY = {
    "options": {name: x for name, x in OPTIONS.items() if not name.startswith("validation.")}
    | {"training.micro_batch_size": 4, "training.save_every": 25, "training.report_to": []}
    | {"data.held_out": 0.05, "model.attention": "rope"},
    "models": {"quick": {"training.steps": 2}, "long": {"training.steps": 600}},
    "perplexity": {"windows": [8, 16, 32]},
}


@pytest.fixture
def study(tmp_path, text_folder):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "text": str(text_folder)}))
    return path


def start(study, out):
    """The command in a process of its own, with two workers."""
    words = ["study", str(study), f"--output={out}", "--workers=2"]
    # A shell lets what it starts in the background ignore SIGINT, and children inherit that.
    obey = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, "-m", "coca_lab.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=obey,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )


def until(found, process):
    """What a function finds, as soon as it finds something."""
    deadline = time.monotonic() + 300
    while not (value := found()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    return value


def workers(process):
    """The processes that it has started, by the file that each prints into."""
    found = {}
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        try:
            words = Path("/proc", child, "cmdline").read_text()
            if "spawn_main" in words:
                found[int(child)] = Path(os.readlink(f"/proc/{child}/fd/1")).name
        except OSError:
            pass  # it has ended
    return found


def working_on(process, log):
    return next((child for child, name in workers(process).items() if name == log), None)


def starting(process, out):
    return next((child for child, name in workers(process).items() if ".log" not in name), None)


def idle(process, out):
    """The one that has trained and measured the quick model, while the other one is trained."""
    busy = steps_saved(out) and "long" not in finished(out)
    return busy and "quick" in finished(out) and working_on(process, "quick.log")


def busy(process, out):
    return steps_saved(out) and working_on(process, "long.log")


def finished(out):
    path = out / "results.json"
    return {c["model"] for c in json.loads(path.read_text())["results"]} if path.exists() else set()


def steps_saved(out):
    found = out.glob("long/checkpoints/checkpoint-*/trainer_state.json")
    return max((int(path.parent.name.split("-")[1]) for path in found), default=0)


def cells(out):
    every = json.loads((out / "results.json").read_text())["results"]
    return {(c["model"], c["window"]) for c in every}


EVERY = {(model, window) for model in ("quick", "long") for window in (8, 16, 32)}


@pytest.mark.parametrize("which", [starting, idle, busy])
def test_a_worker_that_is_killed_is_replaced(study, tmp_path, which):
    out = tmp_path / "out"
    process = start(study, out)
    os.kill(until(partial(which, process, out), process), signal.SIGKILL)
    _, said = process.communicate(timeout=600)
    assert (process.returncode, cells(out)) == (0, EVERY), said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_command_that_is_ended_leaves_no_worker_and_saves_what_it_trains(
    study, tmp_path, number, code
):
    out = tmp_path / "out"
    process = start(study, out)
    until(partial(busy, process, out), process)
    children = workers(process)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1] if code > 0 else process.wait()
    assert process.returncode == code, said
    deadline = time.monotonic() + 60
    while code < 0 and any(Path("/proc", str(child)).exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(children) == 2
    assert not any(Path("/proc", str(child)).exists() for child in children)
    assert steps_saved(out) % 25  # the step that it was at
    process = start(study, out)
    _, said = process.communicate(timeout=600)
    assert (process.returncode, cells(out)) == (0, EVERY), said
    log = (out / "logs" / "long.log").read_text()
    assert log.count("from the first step") == 1 and log.count("resuming from step") == 1


@pytest.mark.parametrize("size", ["160k", "480k"])  # before and after the first model is finished
def test_on_a_full_disk_nothing_is_lost(study, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    if subprocess.run([*mount, f"size={size}", "none", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        process = start(study, disk / "out")
        _, said = process.communicate(timeout=600)
        assert process.returncode == 2 and RESUMABLE in said, said
        subprocess.run([*mount, "remount,size=40m", "none", disk], check=True)
        process = start(study, disk / "out")
        _, again = process.communicate(timeout=600)
        assert (process.returncode, cells(disk / "out")) == (0, EVERY), again
    finally:
        subprocess.run(["umount", disk], check=True)
