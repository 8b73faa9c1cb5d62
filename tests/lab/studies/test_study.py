"""Studies: what is finished is not done again, what fails is, and one page shows all."""

import json
import os
import shutil
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
import yaml
from transformers import TrainerState

import studies.recall  # noqa: F401 (registers the task, as COCA_IMPORT does)
from coca_attention.errors import UserError
from coca_lab.cli import main
from coca_lab.cli.recipes import purpose
from coca_lab.engine import Engine
from coca_lab.files import hold
from coca_lab.store import Store
from coca_lab.studies import load_study, run_study
from coca_lab.studies import trial as module
from coca_lab.studies.running import _Run
from coca_lab.training import load_recipe
from coca_lab.training.arguments import training_arguments
from coca_lab.yaml_files import FILE_KINDS, find_file, shipped
from runs import OPTIONS, changed, weights

pytestmark = pytest.mark.usefixtures("undrawn")

STUDY = {
    "title": "Small",
    "options": {name: x for name, x in OPTIONS.items() if not name.startswith("validation.")}
    | {"training.steps": 4, "training.micro_batch_size": 4, "training.save_every": 2}
    | {"training.report_to": [], "data.held_out": 0.05},
    "models": {  # without training (1e-9) nothing is learned
        "none": {"model.attention": "strict", "training.learning_rate": 1e-9},
        "some": {"model.attention": "rope", "training.learning_rate": 3e-2},
    },
    "methods": [{"method": "none"}, {"method": "linear", "factor": 2, "models": ["some"]}],
    "perplexity": {"windows": [16, 32]},
    "passkey": {"lengths": [260], "samples": 2, "max_new_tokens": 4},
}
ONE = ["--models={some: {}}", "--methods=[{method: none}]"]


@pytest.fixture(scope="module")
def small(tmp_path_factory, text_folder):
    """The study as a file."""
    path = tmp_path_factory.mktemp("small") / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "text": str(text_folder)}, sort_keys=False))
    return path


def edited(small, path, **fields):
    """The study with other fields, as a file in a folder; those that are None are left out."""
    content = yaml.safe_load(small.read_text()) | fields
    content = {name: value for name, value in content.items() if value is not None}
    (path / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return path / "study.yaml"


@contextmanager
def trainings():
    """Lists the trainings of this process."""
    called, train = [], module.train

    def recorded(recipe, folder, **options):
        called.append(Path(folder).name)
        return train(recipe, folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "train", recorded)
        yield called


@pytest.fixture
def made():
    """Lists the trainings of a test."""
    with trainings() as called:
        yield called


def run(path, words, out, **options):
    """The results of a study in this process, with words that override its file."""
    study = load_study(path, words)
    return json.loads(run_study(study, out, **{"workers": 0, **options}).read_text())


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """The folder of a finished study, to be read or copied, its trainings and its progress."""
    seen, out = [], tmp_path_factory.mktemp("finished") / "out"
    threads, used = torch.get_num_threads(), set()

    def progress(*done):
        seen.append(done)
        used.add(torch.get_num_threads())

    torch.set_num_threads(2)
    with trainings() as called:
        run(small, [], out, progress=progress)
    assert used == {1} and torch.get_num_threads() == 2  # the study's, and the caller's again
    torch.set_num_threads(threads)
    return out, called, seen


def figures(out):
    names = ("model", "size", "training_seed", "task", "scaling", "nats")
    cells = json.loads((out / "results.json").read_text())["results"]
    return [[cell.get(name) for name in names] for cell in cells]


def test_a_study_shows_how_far_the_trainings_of_its_processes_are(small, tmp_path):
    study, said = load_study(small), []
    first, second = study.trials(tmp_path)
    trials = {trial.label: trial for trial in (first, second)}
    shown = _Run(study, trials, Engine(), tmp_path, lambda *line: said.append(line))
    shown.needed = [first, second]
    steps = module.Steps(second.steps)  # as in another process
    for done in range(20, 31):
        steps.on_step_end(None, TrainerState(global_step=done, max_steps=40), None)
    shown._look()
    line = "28% of the work, 0 of 2 models finished, some: step 30 of 40"
    assert said == [(line, 28, 100)]
    steps.on_train_end(None, None, None)
    shown._look()
    assert len(said) == 1 and not list(tmp_path.glob("logs/*"))


def test_models_are_trained_and_evaluated_once(small, finished, tmp_path, made):
    first, trained, seen = finished
    assert trained == ["none", "some"]
    assert any("evaluated" in line for line, *_ in seen)
    assert seen[-1] == ("100% of the work, 2 of 2 models finished", 100, 100)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    # A copy elsewhere, with a second seed.
    out = shutil.copytree(first, tmp_path / "out")
    found = run(small, ["--seeds=0,1"], out)
    assert made == ["none-seed-1", "some-seed-1"]
    assert {(c["model"], c["scaling"]) for c in found["results"]} == {
        ("none", "none"), ("some", "none"), ("some", "linear")
    }  # fmt: skip
    assert [(run["name"], run["seed"]) for run in found["training"]] == [
        ("none", 0), ("some", 0), ("none", 1), ("some", 1)
    ]  # fmt: skip
    assert found["failures"] == {} and found["study"]["title"] == "Small"
    parameters = ({each["parameters"] for each in found[n]} for n in ("results", "training"))
    assert next(parameters) == next(parameters)
    page = (out / "report.html").read_text()
    assert "<h1>Small" in page and "Means of 2 training seeds" in page
    # Every model has the same tokenizer, learned once.
    texts = {(out / name / "tokenizer.json").read_text() for name in [*trained, *made]}
    assert texts == {p.read_text() for p in out.glob("tokenizers/*/tokenizer/tokenizer.json")}


def test_what_has_changed_is_evaluated_again_or_refused(small, finished, tmp_path, made):
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = json.loads((out / "results.json").read_text())
    after = run(small, ["--passkey.samples=1"], out)
    assert made == [] and len(after["results"][-1]["samples"]) == 1
    assert after["results"][0] == before["results"][0]  # from the values of its evaluation
    assert json.loads((out / "results-1.json").read_text()) == before
    with pytest.raises(UserError, match=r"another recipe .*learning_rate.*another --output"):
        run(small, ["--training.learning-rate", "1e-8"], out)
    assert made == [] and json.loads((out / "results.json").read_text()) == after


def test_sizes_have_seeds_of_their_own(small, tmp_path):
    sizes = "--sizes={small: {seeds: [0, 1]}, large: {model.hidden_size: 32, seeds: [1]}}"
    assert [trial.folder for trial in load_study(small, [sizes]).trials(tmp_path)] == [
        "none-small", "some-small", "none-large-seed-1", "some-large-seed-1",
        "none-small-seed-1", "some-small-seed-1",
    ]  # fmt: skip
    for words in (["--seeds=2"], ["--seeds", "2"]):  # of all models and sizes
        trials = load_study(small, [sizes, *words]).trials(tmp_path)
        assert [trial.seed for trial in trials] == [2, 2, 2, 2]
    sizes = sizes.replace("seeds: [0, 1]", "seeds: [0]")
    found = run(small, [*ONE, sizes], tmp_path)
    parameters = {c["size"]: c["parameters"] for c in found["results"]}
    assert parameters["small"] < parameters["large"]
    assert [run["name"] for run in found["training"]] == ["some, small", "some, large"]
    assert "length read at once, large" in (tmp_path / "report.html").read_text()


def test_models_start_from_others_and_are_converted(small, tmp_path, made):
    options = yaml.safe_load(small.read_text())["options"]
    new = {n: options.pop(n) for n in [*options] if n.startswith("model.")}
    new |= {"model.attention": "rope", "data.vocab_size": options.pop("data.vocab_size")}
    models = {
        "last": {"model.start": "first", "model.attention": "rope", "training.learning_rate": 1e-9},
        "limited": {"path": "first", "convert.form": "rope", "convert.near": 8},
        "roles": {"path": "first", "convert.form": "rope", "convert.roles.layers": "g"},
        "first": new,
        "same": {"path": "first"},
    }
    path = edited(small, tmp_path, models=models, options=options, methods=None)
    found = run(path, [], tmp_path / "out")
    assert made == ["first", "last"]
    nats = {c["model"]: c["nats"] for c in found["results"] if c.get("window") == 32}
    assert nats["last"] == pytest.approx(nats["first"], rel=1e-5)
    assert nats["same"] == nats["first"] and nats["first"] not in (nats["limited"], nats["roles"])
    recipe = load_recipe(tmp_path / "out" / "last" / "recipe.yaml")
    assert recipe.model.start == str(tmp_path / "out" / "first")
    models["first"] = {"model.start": "last", "model.attention": "rope"}
    with pytest.raises(UserError, match="models start from each other"):
        run(edited(path, tmp_path, models=models), [], tmp_path / "circle")


def test_a_model_that_fails_is_tried_again_and_the_others_finish(small, tmp_path, made):
    models = "--models={broken: {data.block_length: 99999}, next: {path: broken}, some: {}}"
    for _ in range(2):
        with pytest.raises(UserError, match=r"2 of 3 trials failed, first broken: .*fewer than"):
            run(small, [models, ONE[1]], tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [*found["failures"]] == ["broken", "next"] and made == ["broken", "some", "broken"]
    assert {cell["model"] for cell in found["results"]} == {"some"}
    assert (tmp_path / "report.html").is_file()
    with pytest.raises(UserError, match="1 of 1 trials failed"):
        run(small, [models.replace("next: {path: broken}, some: {}", ""), ONE[1]], tmp_path)
    assert not (tmp_path / "report.html").exists()  # it shows another study


def test_what_may_pass_is_never_recorded(small, tmp_path, monkeypatch):
    """The training reports a full disk and another process as errors of the user."""

    def full(path, value):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    with hold(tmp_path / "some" / ".lock"), pytest.raises(UserError, match="in use by another"):
        run(small, ONE, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("coca_lab.training.run.write_json", full)
        with pytest.raises(UserError, match="No space left on device: free disk space"):
            run(small, ONE, tmp_path)
    assert {c["model"] for c in run(small, ONE, tmp_path)["results"]} == {"some"}


@pytest.mark.parametrize(
    ("batch", "first", "tried"), [(4, 4, [4, 2, 1]), (14, 14, [14, 7, 2, 1]), (9, 9, [9, 3, 1])]
)
def test_too_large_a_batch_is_read_in_smaller_equal_parts(
    small, tmp_path, monkeypatch, batch, first, tried
):
    seen, train = [], module.train

    def short_of_memory(recipe, *arguments, **options):
        seen.append(recipe.training.micro_batch_size)
        training_arguments(recipe, *recipe.schedules, tmp_path)  # as a training begins
        if seen[-1] > 1:
            raise torch.OutOfMemoryError("no")
        return train(recipe, *arguments, **options)

    options = yaml.safe_load(small.read_text())["options"]
    sizes = {"training.global_batch_size": batch, "training.micro_batch_size": first}
    small = edited(small, tmp_path, options=options | sizes)
    monkeypatch.setattr(module, "train", short_of_memory)
    run(small, ONE, tmp_path)
    assert seen == tried
    run(small, [*ONE, "--passkey.samples=1"], tmp_path)
    assert seen == tried


@pytest.mark.slow
def test_processes_and_ray_measure_the_same(small, finished, tmp_path, ray):
    for name, engine in (("two", {"workers": 2}), ("ray", {"ray": ""})):
        run(small, [], tmp_path / name, **engine)
        assert figures(tmp_path / name) == figures(finished[0])
    assert (tmp_path / "two" / "logs" / "none.log").read_text()
    assert changed(*(weights(out / "some") for out in (finished[0], tmp_path / "two"))) == set()


def test_from_the_command_line_to_a_report(small, finished, tmp_path, capsys):
    out = shutil.copytree(finished[0], tmp_path / "out")
    words = ["study", str(small), "--output", str(out), "--workers", "0"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "some + PI to 2 L" in printed.out and str(out / "report.html") in printed.out
    assert main(["report", str(out), "--output", str(tmp_path / "again.html")]) == 0
    for word, message in (
        ("--workers=-1", "workers must be 0 or more"),
        ("--workers=x", "invalid int value: 'x'"),
        ("--worker=1", "there is no option --worker"),
    ):
        assert main(["study", str(small), word]) == 2
        assert message in capsys.readouterr().err
    words = ["--training.steps", "2", "--training.save-every=1", "--model.num-layers", "2"]
    for recipe in (trial.recipe for trial in load_study(small, words).trials(tmp_path)):
        assert (recipe.steps, recipe.training.save_every, recipe.model.num_layers) == (2, 1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recipe": "nowhere.yaml"}, r"model none: nowhere\.yaml: no such recipe"),
        ({"recipe": "passkey-1n"}, "passkey-1n: no such recipe; did you mean passkey-1m"),
        ({"models": {}}, "needs models"),
        ({"models": {64: {}}}, "models: must be a valid string, got 64"),
        ({"sizes": {True: {}}}, "sizes: must be a valid string, got True"),
        ({"sizes": {"s": {"model.hidden": 1}}}, "model none, size s: .*model.hidden"),
        ({"seeds": []}, "seeds must be one or more different"),
        ({"seeds": [1, 1]}, "seeds must be one or more different"),
        ({"sizes": {"s": {"seeds": 2}}}, "size s: seeds must be one or more different"),
        ({"options": {"training.seed": 1}}, "training.seed: set seeds"),
        ({"num_cpus": 0}, "num_cpus: must be greater than 0"),
        (
            {
                "models": {"a": {"model.attention": "rope"}, "b": {"model.attention": "rope"}},
                "methods": [{"method": "none", "models": ["b"]}],
            },
            "no method applies to a",
        ),
        ({"models": {"some": {"model.atention": "rope"}}}, "model some: .*model.atention"),
        ({"models": {"some": {"path": "x", "model.attention": "rope"}}}, "leave out path or model"),
        ({"models": {"some": {"path": "x", "convert.forms": "rope"}}}, "convert.*forms"),
        ({"models": {"some": {"path": "x", "convert.form": "rop"}}}, "did you mean rope"),
        ({"models": {"some": {}, "some!": {}}}, "must differ in letters, .* some; some!"),
        ({"methods": [{"method": "none", "models": ["other"]}]}, "does not have: other"),
        ({"passkey": {"samples": 0}}, "passkey.samples: .* greater than 0"),
        ({"trials": []}, "trials: there is no such field"),
        ({"modles": {}}, "modles: there is no such field; did you mean models"),
        ({"perplexity": None, "passkey": None, "methods": None}, "needs a task"),
        ({"perplexity": {"windows": [8], "stride": 9}}, "stride"),
        ({"methods": [{"method": "ntk", "models": ["some"]}]}, "no method applies to none"),
        ({"methods": [{"method": "ntq"}]}, "methods.method: .*'yarn'"),
        (
            {"methods": [{"method": "none"}], "scalings": [{"kind": "yarn"}]},
            "scalings is the old name of methods: leave it out",
        ),
        ({"methods": None, "scalings": {"kind": "yarn"}}, "scalings: expected a list, got {"),
        ({"methods": None, "scalings": [{"factor": 2}]}, "scalings were mappings such as"),
        ({"methods": None, "scalings": [{"kind": "nkt"}]}, "methods.method: .*'ntk_text'"),
    ],
)
def test_unfit_studies_are_refused(small, fields, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        load_study(edited(small, tmp_path, **fields)).trials(tmp_path)
    assert "\n" not in str(caught.value)


def test_methods_of_models_that_are_not_chosen_are_left_out(small, tmp_path, caplog):
    caplog.set_level("INFO", logger="coca_lab")
    both = {"method": "ntk", "factor": 2, "models": ["none", "some"]}
    path = edited(small, tmp_path, methods=[*STUDY["methods"], both])
    assert len(load_study(path).methods) == 3 and not caplog.messages
    study = load_study(path, ["--models={none: {}}"])
    found = [(each.method, each.models) for each in study.methods]
    assert found == [("none", None), ("ntk", ["none"])]
    said = "left out, because `models` does not have them: linear of some, ntk of some"
    assert caplog.messages == [said]
    # Nothing is left for a model, or the methods were chosen, too: a name may be wrong.
    path = edited(small, tmp_path, methods=STUDY["methods"][1:])
    for words, message in (
        ([], "no method applies to none: add"),
        (["--methods=[{method: ntk, models: [some]}]"], "names models that the study does not"),
    ):
        with pytest.raises(UserError, match=message):
            load_study(path, ["--models={none: {}}", *words])


def test_the_projects_files_are_found_by_name(capsys, tmp_path, monkeypatch):
    studies = {
        "quickstart", "paper-50m", "paper-125m", "paper-350m", "long-context", "scaling", "books",
        "limits", "conversion", "verdict",
    }  # fmt: skip
    assert set(shipped("study")) >= studies
    monkeypatch.chdir(tmp_path)
    for kind in FILE_KINDS:
        for name, path in shipped(kind).items():
            head = path.read_text(encoding="utf-8")
            assert find_file(name, kind) == path and "# Command" in head and "# Needs" in head
            assert len(purpose(path)) > 10 and "Needs" not in purpose(path)
    assert load_recipe("passkey-1m").training.steps == 2000
    assert load_recipe("recipes/passkey-1m.yaml") == load_recipe("passkey-1m")  # as in a clone
    Path("passkey-1m").write_text("training: {steps: 7}")
    assert load_recipe("passkey-1m").training.steps == 7  # a file comes first
    assert main(["recipes", "--all"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in (*studies, "passkey-1m", "small"))
    for name in ("passkey-1m", "studies/verdict"):
        assert main(["recipes", name]) == 0
    assert capsys.readouterr().out.count("# Command") == 2
    assert main(["recipes", "passkey-2m"]) == 2
    assert "did you mean passkey-1m" in capsys.readouterr().err


def test_the_quickstart_has_three_models_and_small_the_papers_others_too():
    quickstart, small = load_study("quickstart"), load_study("small")
    assert [*quickstart.models] == ["RoFormer", "CoCA-Strict", "Native"]
    assert {*small.models} == {*quickstart.models, "CoCA-Slack", "ALiBi"}
    native, recommended = quickstart.models["Native"], load_recipe("native-1m").model
    assert native["model.body"] == recommended.body == "cohere2"
    assert native["model.options"].keys() == recommended.options.keys()


def test_the_projects_studies_load_and_the_papers_models_differ_in_attention(tmp_path):
    added = {"extend-fresh-texts", "extend-shifted", "extend-shifted-short", "qwen-without-factor"}
    for name in shipped("study"):
        study = load_study(name)
        study.sizes = dict([*study.sizes.items()][:1])
        assert study.title and study.tasks
        # Studies compare models, or methods of one; some add a method to another study's.
        compared = len(study.trials(tmp_path)) * len(study.methods)
        assert (compared == 1) == (name in added)
    roformer, *others = (trial.recipe for trial in load_study("paper-50m").trials(tmp_path))
    assert roformer.steps * 256 * 512 == pytest.approx(20 * 54_606_848, rel=1e-4)
    for other in others:
        if other.model.attention == "own":  # its body has other options
            other.model = roformer.model
        other.model.attention, other.model.layers = "rope", ""
        assert other == roformer


def test_nothing_is_made_of_a_model_that_diverged(small, tmp_path, made):
    bad = {"bad": {"model.attention": "rope", "training.learning_rate": 1e30}}
    path = edited(small, tmp_path, models={"next": {"path": "bad"}, **bad}, methods=None)
    for _ in range(2):
        with pytest.raises(UserError, match="1 of 2 trials failed, first next: bad diverged"):
            run(path, [], tmp_path / "out")
    assert made == ["bad"]  # which would diverge again


def test_the_best_learning_rate_is_chosen_and_more_models_join_later(small, tmp_path, made):
    models = {
        "tuned": {"model.attention": "rope"},
        "fixed": {"model.attention": "rope", "training.learning_rate": 1e-9},
    }
    options = yaml.safe_load(small.read_text())["options"]
    del options["training.learning_rate"]
    fields = {"options": options, "methods": None, "passkey": None}
    fields["learning_rates"] = [1e-9, 3e-2, 1e30]
    fields["choose"] = {"task": "perplexity", "window": 32}
    found = run(edited(small, tmp_path, models=models, **fields), [], tmp_path / "out")
    tried = [f"tuned-rate-{rate}-seed-100" for rate in ("1e-09", "0.03", "1e-30")]
    assert made == [*tried[:1], "fixed", *tried[1:], "tuned"]
    assert [(c["model"], c["learning_rate"]) for c in found["results"] if c["window"] == 32] == [
        ("tuned", 3e-2), ("fixed", 1e-9)
    ]  # fmt: skip
    assert {c["learning_rate"] for c in found["tuning"]["results"]} == {1e-9, 3e-2}
    assert list(found["failures"]) == ["tuned, rate 1e+30, seed 100"]  # it diverged, for ever
    models["later"] = {"model.attention": "strict", "training.learning_rate": 1e-9}
    made.clear()
    again = run(edited(small, tmp_path, models=models, **fields), [], tmp_path / "out")
    assert made == ["later"] and not (tmp_path / "out" / "results-1.json").exists()
    assert [c for c in again["results"] if c["model"] != "later"] == found["results"]
    unfit = fields | {"choose": {"task": "perplexity", "window": 33}}
    made.clear()
    with pytest.raises(UserError, match=r"no cell of tuned, rate 1e-09.* has what choose asks"):
        run(edited(small, tmp_path, models=models, **unfit), [], tmp_path / "unfit")
    assert made == tried[:1]  # nothing more is trained
    with pytest.raises(UserError, match=r"no cell of tuned, rate 1e-09.* has what choose asks"):
        run(edited(small, tmp_path, models=models, **unfit), [], tmp_path / "out")
    models["next"] = {"path": "tuned"}
    with pytest.raises(UserError, match=r"next starts from tuned, .*set training\.learning_rate"):
        run(edited(small, tmp_path, models=models, **fields), [], tmp_path / "out")
    with pytest.raises(UserError, match="`learning_rates` need `choose`"):
        load_study(edited(small, tmp_path, **fields | {"choose": {"task": "passkey"}}))


@pytest.mark.parametrize(
    ("task", "low", "high"),
    [
        ("ruler", {"score": 0.25}, {"score": 0.5}),
        ("passkey", {"accuracy": 0.25}, {"accuracy": 0.5}),
        ("recall", {"right": 1, "asked": 4, "accuracy": 0.25}, {"right": 5, "asked": 9}),
        ("perplexity", {"nats": 9.0, "tokens": 3}, {"nats": 8.0, "tokens": 4}),
        ("needles", {"nats": 2.3, "needles": 9}, {"nats": 2.1, "needles": 3}),
    ],
)
def test_learning_rates_are_chosen_by_any_task(small, tmp_path, task, low, high):
    options = yaml.safe_load(small.read_text())["options"]
    del options["training.learning_rate"]
    fields = {"options": options, "models": {"tuned": {"model.attention": "rope"}}}
    fields |= {
        "methods": [{"method": "none"}],
        "learning_rates": [1e-3, 1e-2],
        "choose": {"task": task},
    }
    fields |= {task: {}} if task in ("needles", "ruler", "recall") else {}
    study = load_study(edited(small, tmp_path, **fields))
    trials = study.trials(tmp_path)
    with Store() as store:
        for trial, figures in zip(trials, (low, high), strict=True):
            store.put([trial.key], [{"cells": [{"task": task, **figures}]}])
        assert study.best_rates(trials, store) == {"tuned": 1e-2}
        store.put([trials[0].key], [{"cells": [{"task": task, "length": 64}]}])
        with pytest.raises(UserError, match="neither nats nor right answers"):
            study.best_rates(trials, store)
