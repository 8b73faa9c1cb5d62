"""README.md of every model folder, in the Hub's format."""

import re

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM

from coca_attention.models import Roles
from coca_attention.models.cards import write_card
from coca_attention.testing import logits, some_tokens
from coca_lab.folders import convert_folder
from coca_lab.training import load_recipe, train
from conftest import CONFIGS, tiny_model
from families import vanilla
from stage_runs import TEACHER, base, write_recipe  # noqa: F401 (a fixture)


@pytest.fixture
def source(tmp_path, tokenizer):
    folder = tmp_path / "source"
    vanilla("Llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    metadata = "license: other\nlicense_name: lab\nlanguage: en\nbase_model: lab/first\n"
    (folder / "README.md").write_text(f"---\n{metadata}---\n# The source\n")
    (folder / "LICENSE").write_text("terms")
    return folder


def run_python(card):
    """Execute the Python of a card; returns its names."""
    names = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.S)[1], names)
    return names


def test_a_converted_folder_has_a_card_with_the_terms_of_its_source(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    roles = Roles("lg", window=8)
    model = convert_folder(source, target, form="strict", roles=roles)
    card = ModelCard.load(target / "README.md")
    data = card.data
    assert (data.license, data.license_name, data.language) == ("other", "lab", "en")
    assert (data.base_model, data.library_name) == ("lab/first", "transformers")
    assert data.tags == ["coca-attention"]
    assert (target / "SOURCE_README.md").read_text() == (source / "README.md").read_text()
    assert (target / "LICENSE").read_text() == "terms"
    for text in ("`coca_llama`, made from `source`", "| attention | strict |", "lg (g: sees the"):
        assert text in card.text
    assert "turning_pairs 0, temperature 64, decay 1.0, decay_length 8.0" in card.text
    assert "| training length | 64 tokens |" in card.text
    for source in ("kexue.fm/archives/9603", "kexue.fm/archives/8823", "arxiv.org/abs/2205.09921"):
        assert source in card.text, source
    assert "pip install PATH/TO/coca-attention  # its source tree\n" in card.text
    assert "Collinear Constrained Attention" in card.text and "needs further training" in card.text
    monkeypatch.chdir(tmp_path)
    loaded = run_python(card)["model"]
    assert torch.equal(logits(loaded, some_tokens(loaded)), logits(model, some_tokens(loaded)))


def test_the_card_of_rotary_attention_does_not_call_it_coca(source, tmp_path):
    for name, roles in (("roles", Roles("lg", window=8)), ("limited", None)):
        convert_folder(source, tmp_path / name, form="rope", roles=roles)
        text = (tmp_path / name / "README.md").read_text()
        assert "Collinear" not in text and "Its classes are in the package coca-attention." in text


def test_a_run_and_its_stages_have_cards(base, text_folder, tmp_path, monkeypatch):  # noqa: F811
    recipe = load_recipe(write_recipe(base, text_folder, tmp_path / "r.yaml", TEACHER))
    folder = train(recipe, tmp_path / "run")
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert result.metric_type == "perplexity" and f"{result.metric_value:.2f}. For" in card.text
    assert "- tokens: 768, in 12 steps" in card.text and "No license is named" not in card.text
    assert "- stage attention" in (folder / "stages/attention/README.md").read_text()
    # The rotary base of the run is a model of Transformers itself.
    theirs = ModelCard.load(base / "README.md")
    assert "pip install transformers" in theirs.text and "No license is named" in theirs.text
    assert theirs.data.tags == [] and "coca" not in theirs.text.lower().replace(base.name, "")
    monkeypatch.chdir(folder.parent)
    assert type(run_python(card)["model"]).__name__ == "CoCALlamaForCausalLM"


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_model_has_a_readable_card(kind, tmp_path):
    write_card(tmp_path, CONFIGS[kind]())
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert "{" not in card.text and "None" not in card.text


def test_a_damaged_card_of_the_source_is_carried_over_unread(source, tmp_path):
    (source / "README.md").write_bytes(b"---\n- no: [mapping\n---\n\xff")
    convert_folder(source, tmp_path / "target")
    assert (tmp_path / "target/SOURCE_README.md").is_file()
    assert ModelCard.load(tmp_path / "target/README.md").data.license is None


def test_the_source_may_be_a_name_or_gone(tmp_path):
    config = CONFIGS["llama-strict"]()
    for source, base_model in (("lab/first", "lab/first"), (str(tmp_path / "a/b/gone"), None)):
        write_card(tmp_path, config, source=source)
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.base_model == base_model
        assert ("huggingface.co/lab/first" in card.text) == bool(base_model)


def test_the_card_of_another_head_names_its_class(tmp_path):
    config = CONFIGS["llama-strict"]()
    for name, auto, pipeline in (
        (
            "CoCALlamaForTokenClassification",
            "AutoModelForTokenClassification",
            "token-classification",
        ),
        ("CoCALlamaModel", "AutoModel", None),
    ):
        config.architectures = [name]
        write_card(tmp_path, config)
        card = ModelCard.load(tmp_path / "README.md")
        assert f"\nmodel = {auto}.from_pretrained(" in card.text
        assert card.data.pipeline_tag == pipeline


def test_long_lists_of_factors_are_left_out(tmp_path):
    config = vanilla("Phi-3").config
    config.rope_parameters |= {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    write_card(tmp_path, config)
    assert "| rotation | longrope, rope_theta" in (text := (tmp_path / "README.md").read_text())
    assert "[1.0]" not in text


class Hub:
    """What the Hub holds, in place of the methods of `HfApi` that ask it."""

    def __init__(self, monkeypatch):
        self.files = {}
        monkeypatch.setattr(
            HfApi, "create_repo", lambda api, name, **_: type("", (), {"repo_id": name})
        )
        monkeypatch.setattr(
            HfApi, "file_exists", lambda api, repo_id, name, **_: name in self.files
        )
        monkeypatch.setattr(HfApi, "upload_file", self.upload_file)
        monkeypatch.setattr(HfApi, "create_commit", self.create_commit)
        monkeypatch.setattr(HfApi, "create_branch", lambda api, *_, **__: None)
        monkeypatch.setattr(ModelCard, "load", self.load)

    def upload_file(self, *, path_or_fileobj, path_in_repo, **_):
        self.files[path_in_repo] = path_or_fileobj

    def create_commit(self, *_, operations, **__):
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()

    def load(self, *_, **__):
        if "README.md" not in self.files:
            raise EntryNotFoundError("none", response=None)
        return ModelCard(self.files["README.md"].decode())


def test_push_to_hub_uploads_the_card(source, tmp_path, monkeypatch):
    convert_folder(source, tmp_path / "target", form="strict")
    written = (tmp_path / "target/README.md").read_text()
    hub = Hub(monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    model.push_to_hub("me/model")
    assert {"config.json", "model.safetensors", "README.md"} <= set(hub.files)
    assert hub.files["README.md"].decode() == written
    hub.files["README.md"] = b"# Another\n"
    model.push_to_hub("me/model")
    assert "# Another" in hub.files["README.md"].decode()


def test_a_model_from_no_folder_gets_a_card_when_it_is_pushed(monkeypatch):
    hub = Hub(monkeypatch)
    tiny_model("slack").push_to_hub("me/model")
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/model")' in card and "| attention | slack |" in card
