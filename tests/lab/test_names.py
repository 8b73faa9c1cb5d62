"""What paths and names of models mean: ``~``, and revisions on the Hub, without a network."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from coca_attention.errors import UserError
from coca_lab.data import load_tokenizer
from coca_lab.files import check_may_be_model
from coca_lab.fingerprints import model_fingerprint
from coca_lab.folders import made_from
from coca_lab.loading import load_model, weight_files
from coca_lab.studies import load_study
from coca_lab.training import load_recipe
from commands import run
from conftest import tiny_model

COMMITS = {"main": "a" * 40, "step1000": "b" * 40, "refs/pr/1": "c" * 40}
NAME = "lab/tiny"


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tokenizer):
    """A cache of the Hub's with three revisions of one model; that of main ends in a new line."""
    home = tmp_path_factory.mktemp("hub")
    folder = home / "models--lab--tiny"
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        snapshot = folder / "snapshots" / commit
        tiny_model("llama-rope", seed=seed).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (snapshot / "LICENSE").write_text(f"Terms of {revision}")
        reference = folder / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit + "\n" * (revision == "main"))
    return home


@pytest.fixture
def hub(cache, monkeypatch):
    """The snapshots of the model by its names."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    names = {f"{NAME}@{revision}": commit for revision, commit in COMMITS.items()}
    names |= {NAME: COMMITS["main"], f"{NAME}@{COMMITS['step1000']}": COMMITS["step1000"]}
    return {name: cache / "models--lab--tiny" / "snapshots" / each for name, each in names.items()}


def test_a_revision_is_a_part_of_the_name(hub):
    for name, folder in hub.items():
        ours, theirs = (load_model(each, device="cpu") for each in (name, folder))
        assert ours.lm_head.weight.equal(theirs.lm_head.weight)
        assert load_tokenizer(name).get_vocab() == load_tokenizer(folder).get_vocab()
        assert model_fingerprint(name) == f"{NAME} {folder.name}"
        assert next(iter(weight_files(name).values())).parent == folder
    assert len(set(map(model_fingerprint, hub))) == len(COMMITS)


def test_a_revision_that_is_not_there_is_named(hub):
    for load in (load_model, load_tokenizer, model_fingerprint, weight_files):
        with pytest.raises(UserError, match=rf"^{NAME}@step2: there is no such folder here"):
            load(f"{NAME}@step2")


def test_a_path_that_is_no_folder_says_what_to_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    for file in ("books.jsonl", "lab/config.json"):
        Path(file).touch()
    for name, what in {
        "books.jsonl": "is a file: name the model's folder",
        "lab/config.json": "is a file: name the model's folder, such as lab",
    }.items():
        with pytest.raises(UserError, match=f"^{name} {what}$"):
            check_may_be_model(name)
    # A name of the Hub where its owner's name is a folder here is told from paths.
    where = rf"there is no such folder; check the path \(here: {tmp_path}\)"
    with pytest.raises(
        UserError, match=rf"^lab/tyni: {where}; the Hub is not asked, because .* lab"
    ):
        check_may_be_model("lab/tyni")
    for name in ("./lab/tyni", "lab/tiny/x", f"{tmp_path}/tyni"):
        with pytest.raises(UserError, match=f"^{name}: {where}$"):
            check_may_be_model(name)


def test_a_folder_with_an_at_sign_is_a_folder(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, "tiny@8k")
    assert load_model("tiny@8k", device="cpu").config.model_type == "coca_gpt_neox"
    assert load_tokenizer("tiny@8k").eos_token == "<|endoftext|>"


def test_commands_take_a_revision_offline(hub, text_folder, tmp_path, monkeypatch, capsys):
    def command(*words):
        code, out, err = run(capsys, *words)
        assert code == 0, err
        return out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    name = f"{NAME}@step1000"
    lengths = ["--lengths", "256", "--samples", "2", "--max-new-tokens", "2"]
    command("eval", "passkey", name, *lengths, "--output=~/passkeys.json")
    cell = json.loads((tmp_path / "passkeys.json").read_text())["results"][0]
    assert cell["model"] == "tiny@step1000"
    assert command("generate", name, "alpha1", "--max-new-tokens", "3").startswith("alpha1")
    command("extend", name, "extended", "--method", "yarn", "--to", "64")
    command("convert", name, "converted", "--form", "strict")
    extended = load_model(tmp_path / "extended", device="cpu").lm_head.weight
    assert extended.equal(load_model(hub[name], device="cpu").lm_head.weight)
    for made in ("extended", "converted"):
        card = (tmp_path / made / "README.md").read_text()
        assert yaml.safe_load(card.split("---")[1])["base_model"] == NAME
        assert f"made from `{name}`." in card and made_from(tmp_path / made) == name
        assert (tmp_path / made / "LICENSE").read_text() == "Terms of step1000"
    recipe = {
        "model": {"start": name, "attention": "rope"},
        "data": {"source": "~/text", "held_out": 0, "block_length": 32, "cache": "~/tokens"},
        "training": {
            "steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "precision": "float32",
            "report_to": [],
        },
    }  # fmt: skip
    shutil.copytree(text_folder, tmp_path / "text")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command("train", "recipe.yaml", "--output=~/run")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert [*(tmp_path / "tokens" / "tokens").glob("*.bin")]


def test_every_path_of_a_recipe_and_of_a_study_may_begin_with_the_home(
    tmp_path, model_folder, text_folder, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(model_folder, tmp_path / "model")
    shutil.copytree(text_folder, tmp_path / "text")
    path = tmp_path / "recipe.yaml"
    recipe = {
        "model": {"start": "~/model", "teacher": "~/model"},
        "data": {"source": "~/text", "tokenizer": "~/model", "cache": "~/cache"},
        "validation": {"source": "~/text", "every": 1},
    }
    path.write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(path, ["--data.held_out", "0"])
    for section, fields in recipe.items():
        for field in fields.keys() - {"every"}:
            value = getattr(getattr(loaded, section), field)
            assert Path(value).is_relative_to(tmp_path), f"{section}.{field}"
    mixed = load_recipe(None, ["--data.mixture", "{a: {source: ~/text, weight: 1}}"])
    assert mixed.data.mixture["a"].source == str(tmp_path / "text")
    study = tmp_path / "study.yaml"
    models = {"ready": "~/model", "other": {"recipe": "~/recipe.yaml"}}
    study.write_text(yaml.safe_dump({"models": models, "text": "~/text", "passkey": {}}))
    trials = {trial.name: trial for trial in load_study(study).trials(tmp_path / "out")}
    ready, other = trials["ready"], trials["other"]
    assert ready.start == str(tmp_path / "model") and ready.made
    assert other.recipe.data.source == str(tmp_path / "text")
    assert load_model("~/model", device="cpu").config.model_type == "coca_gpt_neox"
