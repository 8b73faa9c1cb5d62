"""Studies: what is finished is not done again, what fails is, and one page shows all."""

import json
import os
import signal
import subprocess
import sys
import time
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coca_attention.errors import UserError
from coca_lab.arguments import KINDS, find_file, shipped
from coca_lab.cli import main
from coca_lab.cli.look import first_sentence
from coca_lab.files import hold
from coca_lab.studies import load_study
from coca_lab.studies import trial as module
from coca_lab.studies.run import run_study
from coca_lab.training import load_recipe

ALONE = {"workers": 0}


@pytest.fixture
def small(tmp_path, text_folder):
    """Two models; without training (1e-9) nothing is learned."""
    path = tmp_path / "study.yaml"
    path.write_text(
        f"""
title: Small
text: {text_folder}
options:
  model.hidden_size: 16
  model.num_layers: 1
  model.num_heads: 2
  data.vocab_size: 300
  data.block_length: 16
  training.steps: 4
  training.global_batch_size: 4
  training.micro_batch_size: 4
  training.precision: float32
  training.log_every: 2
  training.save_every: 2
  training.report_to: []
models:
  none: {{model.attention: strict, training.learning_rate: 1.0e-9}}
  some: {{model.attention: rope, training.learning_rate: 3.0e-2}}
scalings: [{{kind: none}}, {{kind: linear, factor: 2, models: [some]}}]
perplexity: {{windows: [16, 32]}}
passkey: {{lengths: [260], samples: 2, max_new_tokens: 4}}
"""
    )
    return path


@pytest.fixture
def made(monkeypatch):
    """Lists the trainings."""
    called, train = [], module.train

    def recorded(recipe, folder, **options):
        called.append(Path(folder).name)
        return train(recipe, folder, **options)

    monkeypatch.setattr(module, "train", recorded)
    return called


def content(results):
    return json.loads(Path(results).read_text())


def figures(results):
    return [
        (c["model"], c["size"], c["training_seed"], c["task"], c["scaling"], c.get("nats"))
        for c in content(results)["results"]
    ]


def test_models_are_trained_and_evaluated_once(small, tmp_path, made, capsys):
    seen = []
    study, out = load_study(small, ["--seeds=0,1"]), tmp_path / "out"
    results = run_study(study, out, progress=lambda *done: seen.append(done), **ALONE)
    assert results == out / "results.json"
    assert made == ["none", "some", "none-seed-1", "some-seed-1"]  # seed by seed
    assert any(": step 10" in line or "evaluated" in line for line, *_ in seen)
    assert seen[-1] == ("4 of 4 models finished", 100, 100)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    found = content(results)
    assert {(c["model"], c["scaling"]) for c in found["results"]} == {
        ("none", "none"), ("some", "none"), ("some", "linear")
    }  # fmt: skip
    assert [(run["name"], run["seed"]) for run in found["training"]] == [
        ("none", 0), ("some", 0), ("none", 1), ("some", 1)
    ]  # fmt: skip
    assert found["failures"] == {} and found["study"]["title"] == "Small"
    assert {c["parameters"] for c in found["results"]} == {
        r["parameters"] for r in found["training"]
    }
    page = (out / "report.html").read_text()
    assert "<h1>Small" in page and "Means of 2 seeds" in page
    # Every model has the same tokenizer, learned once.
    texts = {(out / name / "tokenizer.json").read_text() for name in made}
    assert texts == {(out / "tokenizer" / "tokenizer.json").read_text()}
    del made[:]
    assert content(run_study(study, out, **ALONE))["results"] == found["results"] and made == []
    moved = out.rename(tmp_path / "moved")
    assert content(run_study(study, moved, **ALONE))["results"] == found["results"] and made == []


def test_what_has_changed_is_evaluated_again_or_refused(small, tmp_path, made):
    words = ["--models={some: {training.learning_rate: 0.03}}", "--scalings=[{kind: none}]"]
    out = tmp_path / "out"
    before = content(run_study(load_study(small, words), out, **ALONE))
    study = load_study(small, [*words, "--passkey.samples=1"])
    after = content(run_study(study, out, **ALONE))
    assert made == ["some"] and len(after["results"][-1]["samples"]) == 1
    assert after["results"][0] == before["results"][0]  # from the values of its evaluation
    assert content(out / "results-1.json") == before
    with pytest.raises(UserError, match=r"another recipe .*learning_rate.*another --output"):
        run_study(load_study(small, [*words, "--training.learning-rate", "1e-8"]), out, **ALONE)
    assert made == ["some"] and content(out / "results.json") == after


def test_sizes_have_seeds_of_their_own(small, tmp_path):
    sizes = "{small: {}, large: {model.hidden_size: 32, seeds: [1]}}"
    study = load_study(small, [f"--sizes={sizes}", "--seeds=0,1"])
    assert [trial.folder for trial in study.trials(tmp_path)] == [
        "none-small", "some-small", "none-large-seed-1", "some-large-seed-1",
        "none-small-seed-1", "some-small-seed-1",
    ]  # fmt: skip
    study = load_study(small, [f"--sizes={sizes}", "--models={some: {model.attention: rope}}",
                               "--scalings=[{kind: none}]"])  # fmt: skip
    found = content(run_study(study, tmp_path / "out", **ALONE))
    sizes = {c["size"]: c["parameters"] for c in found["results"]}
    assert sizes["small"] < sizes["large"]
    assert [run["name"] for run in found["training"]] == ["some, small", "some, large"]
    assert "Perplexity, large" in (tmp_path / "out" / "report.html").read_text()


def test_models_start_from_others_and_are_converted(small, tmp_path, made):
    models = """
      last: {model.start: first, training.learning_rate: 1.0e-9}
      limited: {path: first, convert.form: rope, convert.max_distance: 8}
      first: {model.attention: rope}
      same: {path: first}"""
    content_ = yaml.safe_load(small.read_text())
    content_["models"] = yaml.safe_load(models)
    sizes = {
        n: content_["options"].pop(n) for n in [*content_["options"]] if n.startswith("model.")
    }
    content_["models"]["first"] |= sizes | {"data.vocab_size": 300}
    content_["models"]["last"] |= {"model.attention": "rope"}
    del content_["options"]["data.vocab_size"], content_["scalings"]
    small.write_text(yaml.safe_dump(content_, sort_keys=False))
    results = run_study(load_study(small), tmp_path / "out", **ALONE)
    assert made == ["first", "last"]
    nats = {
        (c["model"], c["window"]): c["nats"]
        for c in content(results)["results"]
        if c["task"] == "perplexity"
    }
    assert nats["last", 32] == pytest.approx(nats["first", 32], rel=1e-5)
    assert nats["same", 32] == nats["first", 32] != nats["limited", 32]
    recipe = load_recipe(tmp_path / "out" / "last" / "recipe.yaml")
    assert recipe.model.start == str(tmp_path / "out" / "first")
    content_["models"]["first"] = {"model.start": "last", "model.attention": "rope"}
    small.write_text(yaml.safe_dump(content_))
    with pytest.raises(UserError, match="models start from each other"):
        run_study(load_study(small), tmp_path / "circle", **ALONE)


def test_a_model_that_fails_is_tried_again_and_the_others_finish(small, tmp_path, made):
    models = (
        "{broken: {data.block_length: 99999}, next: {path: broken}, some: {training.log_every: 2}}"
    )
    study = load_study(small, [f"--models={models}", "--scalings=[{kind: none}]"])
    out = tmp_path / "out"
    for _ in range(2):
        with pytest.raises(UserError, match=r"2 of 3 trials failed, first broken: .*fewer than"):
            run_study(study, out, **ALONE)
    found = content(out / "results.json")
    assert [*found["failures"]] == ["broken", "next"] and made == ["broken", "some", "broken"]
    assert {cell["model"] for cell in found["results"]} == {"some"}
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("cause", ["a full disk", "another process"])
def test_what_may_pass_is_never_recorded(small, tmp_path, monkeypatch, cause):
    """The training reports both as errors of the user."""

    def full(path, value):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    study, out = load_study(small, ["--models={some: {}}", "--scalings=[{kind: none}]"]), tmp_path
    with monkeypatch.context() as patched:
        if cause == "a full disk":
            patched.setattr("coca_lab.training.run.write_json", full)
            with pytest.raises(UserError, match="No space left on device: free disk space"):
                run_study(study, out, **ALONE)
        else:
            with hold(out / "some" / ".lock"), pytest.raises(UserError, match="in use by another"):
                run_study(study, out, **ALONE)
    assert {c["model"] for c in content(run_study(study, out, **ALONE))["results"]} == {"some"}


def test_too_large_a_batch_is_halved(small, tmp_path, monkeypatch):
    seen, train = [], module.train

    def short_of_memory(recipe, *arguments, **options):
        seen.append(recipe.training.micro_batch_size)
        if seen[-1] > 1:
            raise torch.OutOfMemoryError("no")
        return train(recipe, *arguments, **options)

    monkeypatch.setattr(module, "train", short_of_memory)
    study = load_study(small, ["--models={some: {}}", "--scalings=[{kind: none}]"])
    run_study(study, tmp_path, **ALONE)
    assert seen == [4, 2, 1]
    run_study(load_study(small, ["--models={some: {}}", "--scalings=[{kind: none}]",
                                 "--passkey.samples=1"]), tmp_path, **ALONE)  # fmt: skip
    assert seen == [4, 2, 1]


def start(study, out):
    """The command in a process of its own, when it has saved one checkpoint more."""
    command = [sys.executable, "-m", "coca_lab.cli", "study", str(study), f"--output={out}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    before, deadline = steps_saved(out), time.monotonic() + 300
    while steps_saved(out) <= before:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    return process


def steps_saved(out):
    found = out.glob("some/checkpoints/checkpoint-*/trainer_state.json")
    return max((int(path.parent.name.split("-")[1]) for path in found), default=0)


@pytest.mark.slow
def test_ended_in_any_way_it_resumes_from_its_checkpoint(small, tmp_path, capsys):
    given, out = yaml.safe_load(small.read_text()), tmp_path / "out"
    del given["passkey"], given["models"]["none"]
    given["options"] |= {"training.steps": 1500, "training.save_every": 25}
    small.write_text(yaml.safe_dump(given))

    process = start(small, out)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "some: its process was ended by signal 9, perhaps for lack of memory" in said

    process = start(small, out)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130 and "goes on" in said
    assert steps_saved(out) % 25  # the last step is saved

    process = start(small, out)
    process.kill()
    process.communicate()
    left = Path("/proc", str(process.pid))
    while left.exists() or ((out / "some" / ".lock").exists() and is_held(out / "some" / ".lock")):
        time.sleep(0.1)  # until what it has started notices
    before = steps_saved(out)
    assert 0 < before < 1500
    assert main(["study", str(small), f"--output={out}", "--workers=0"]) == 0
    said = capsys.readouterr().err
    assert f"resuming from step {before:,}" in said
    (run,) = content(out / "results.json")["training"]
    assert run["seconds"] is None and run["steps"] == 1500


def is_held(lock):
    try:
        with hold(lock):
            return False
    except UserError:
        return True


def test_processes_and_ray_measure_the_same(small, tmp_path, ray):
    study = load_study(small)
    alone = figures(run_study(study, tmp_path / "alone", **ALONE))
    assert figures(run_study(study, tmp_path / "two", workers=2)) == alone
    assert (tmp_path / "two" / "logs" / "none.log").read_text()
    assert figures(run_study(study, tmp_path / "ray", ray="")) == alone
    one, other = (load_file(tmp_path / n / "some" / "model.safetensors") for n in ("alone", "two"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_from_the_command_line_to_a_report(small, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["study", str(small), "--output", str(out), "--workers", "0", "--training.steps", "2"]
    assert main([*words, "--training.save-every=1", "--model.num-layers", "2"]) == 0
    printed = capsys.readouterr()
    assert "some + PI (2)" in printed.out and str(out / "report.html") in printed.out
    recipe = load_recipe(out / "some" / "recipe.yaml")
    assert (recipe.steps, recipe.training.save_every, recipe.model.num_layers) == (2, 1, 2)
    assert main(["report", str(out), "--output", str(tmp_path / "again.html")]) == 0
    for word, message in (
        ("--workers=-1", "workers must be 0 or more"),
        ("--workers=x", "invalid int value: 'x'"),
        ("--worker=1", "unrecognized"),
    ):
        assert main(["study", str(small), word]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recipe": "nowhere.yaml"}, r"model none: nowhere\.yaml: no such recipe"),
        ({"recipe": "passkey-1n"}, "passkey-1n: no such recipe; did you mean passkey-1m"),
        ({"models": {}}, "needs models"),
        ({"models": {64: {}}}, "models.64: Input should be a valid string"),
        ({"sizes": {True: {}}}, "sizes.1: Input should be a valid string"),
        ({"sizes": {"s": {"model.hidden": 1}}}, "model none, size s: .*model.hidden"),
        ({"seeds": []}, "seeds must be different numbers"),
        ({"seeds": [1, 1]}, "seeds must be different numbers"),
        ({"sizes": {"s": {"seeds": 2}}}, "size s: seeds must be different numbers"),
        ({"options": {"training.seed": 1}}, "training.seed: set seeds"),
        ({"num_cpus": 0}, "num_cpus must be at least 1"),
        ({"models": {"a": {"model.atention": "rope"}}, "scalings": []}, "needs scalings"),
        ({"models": {"some": {"model.atention": "rope"}}}, "model some: .*model.atention"),
        ({"models": {"some": {"path": "x", "model.attention": "rope"}}}, "leave out path or model"),
        ({"models": {"some": {"path": "x", "convert.forms": "rope"}}}, "convert.*forms"),
        ({"models": {"some": {"path": "x", "convert.form": "rop"}}}, "did you mean rope"),
        ({"models": {"some": {}, "some!": {}}}, "must differ in letters, .* some; some!"),
        ({"scalings": [{"kind": "none", "models": ["other"]}]}, "does not have: other"),
        ({"passkey": {"samples": 0}}, "samples must be at least 1"),
        ({"trials": []}, "trials: there is no such field"),
    ],
)
def test_unfit_studies_are_refused(small, changed, message, tmp_path):
    small.write_text(yaml.safe_dump(yaml.safe_load(small.read_text()) | changed))
    with pytest.raises(UserError, match=message) as caught:
        load_study(small).trials(tmp_path)
    assert "\n" not in str(caught.value)


STUDIES = {
    "quickstart", "paper-50m", "paper-125m", "paper-350m", "long-context", "scaling", "books",
    "limits", "conversion", "verdict",
}  # fmt: skip


def test_the_projects_files_are_found_by_name(capsys, tmp_path, monkeypatch):
    assert set(shipped("study")) >= STUDIES
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        for name, path in shipped(kind).items():
            head = path.read_text(encoding="utf-8")
            assert find_file(name, kind) == path and "# Command" in head and "# Needs" in head
            assert len(first_sentence(path)) > 10 and "Needs" not in first_sentence(path)
    assert load_recipe("passkey-1m").training.steps == 2000
    Path("passkey-1m").write_text("training: {steps: 7}")
    assert load_recipe("passkey-1m").training.steps == 7  # a file comes first
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in (*STUDIES, "passkey-1m", "small"))
    for name in ("passkey-1m", "studies/verdict"):
        assert main(["recipes", name]) == 0
    assert capsys.readouterr().out.count("# Command") == 2
    assert main(["recipes", "passkey-2m"]) == 2
    assert "did you mean passkey-1m" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(shipped("study")))
def test_the_projects_studies_load(name, tmp_path):
    study = load_study(name)
    study.sizes = dict([*study.sizes.items()][:1])
    assert study.title and study.tasks and len(study.trials(tmp_path)) >= 5


def test_models_of_the_paper_differ_in_their_attention_alone(tmp_path):
    roformer, *others = (trial.recipe for trial in load_study("paper-50m").trials(tmp_path))
    assert roformer.steps * 256 * 512 == pytest.approx(20 * 54_606_848, rel=1e-4)
    for other in others:
        other.model.attention, other.model.layers = "rope", ""
        assert other == roformer
