"""README.md of the folders that commands write, in the Hub's format."""

import os
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard

from coca_attention import __version__
from coca_attention.errors import install
from coca_attention.models import Roles
from coca_attention.testing import logits, some_tokens
from coca_lab.folders import convert_folder, write_card
from conftest import CONFIGS
from families import vanilla


@pytest.fixture
def source(tmp_path, tokenizer):
    folder = tmp_path / "source"
    vanilla("Llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    metadata = "license: other\nlicense_name: lab\nlanguage: en\nbase_model: lab/first\n"
    (folder / "README.md").write_text(f"---\n{metadata}---\n# The source\n")
    (folder / "LICENSE.txt").write_text("terms")
    return folder


class Values(dict):
    """As `importlib.metadata.metadata` returns, with several values a name."""

    get_all = dict.get


def run_python(card):
    """Execute the Python of a card; returns its names."""
    names = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.S)[1], names)
    return names


def test_a_converted_folder_has_a_card_with_the_terms_of_its_source(source, tmp_path, monkeypatch):
    roles = Roles("lg", window=8, decay=1.0)
    model = convert_folder(source, tmp_path / "target", form="strict", roles=roles)
    card = ModelCard.load(tmp_path / "target/README.md")
    data = card.data
    assert (data.license, data.license_name, data.language) == ("other", "lab", "en")
    assert (data.base_model, data.library_name) == ("lab/first", "transformers")
    assert (data.tags, data.pipeline_tag) == (["coca-attention"], "text-generation")
    assert (tmp_path / "target/LICENSE.txt").read_text() == "terms" and "LICENSE.txt" in card.text
    for text in (
        "`coca_llama` model, made from `source`",
        "| attention | CoCA, strict, full cache; 4 heads of 8, 2 for keys and values |",
        ": lg (l sees the last 8 tokens, g all) |",
        "turning_pairs 0, temperature 64, decay 1.0, decay_length 8.0",
        "| context | 64 tokens |",
        "[CoCA](https://arxiv.org/abs/2309.08646), [HWFA](https://kexue.fm/archives/9603), [log n",
        f"This needs the package coca-attention, version {__version__} or later.\n",
        "train it further",
    ):
        assert text in card.text, text
    monkeypatch.chdir(tmp_path)
    loaded = run_python(card)["model"]
    assert torch.equal(logits(loaded, some_tokens(loaded)), logits(model, some_tokens(loaded)))


def test_a_folder_without_a_tokenizer_is_copied_with_a_warning(source, tmp_path, caplog):
    for path in source.glob("tokenizer*"):
        path.unlink()
    convert_folder(source, tmp_path / "target", form="strict")
    assert any("the folder has no tokenizer: copy" in text for text in caplog.messages)


def test_a_card_says_where_the_package_is_published(source, tmp_path, monkeypatch):
    told = {"Project-URL": ["Paper, https://a.b", "Source, https://c.d/e"]}
    monkeypatch.setattr("coca_attention.errors.metadata", lambda name: Values(told))
    convert_folder(source, tmp_path / "target", form="strict")
    text = (tmp_path / "target/README.md").read_text()
    assert "[coca-attention](https://c.d/e)" in text
    assert "`pip install 'coca-attention @ git+https://c.d/e'`.\n" in text
    assert install("ray") == "pip install 'coca-attention[ray] @ git+https://c.d/e'"


def test_the_card_of_rotary_attention_does_not_call_it_coca(source, tmp_path):
    convert_folder(source, tmp_path / "limited", form="rope")
    text = (tmp_path / "limited/README.md").read_text()
    assert "[CoCA]" not in text and "[ReRoPE]" in text and "train it further" not in text


def test_a_run_has_a_card(base, staged, monkeypatch):
    _, folder = staged
    card = ModelCard.load(folder / "README.md")
    assert "1,088 tokens in 17 steps" in card.text and "No license is named" in card.text
    perplexity = r"Perplexity on blocks of `text\d`: \d+\.\d\d\.\n"
    assert re.search(perplexity, card.text)
    # The rotary base of the run is a model of Transformers itself.
    theirs = (base / "README.md").read_text()
    assert "coca" not in theirs.lower().replace(base.name, "")
    monkeypatch.chdir(folder.parent)
    assert type(run_python(card)["model"]).__name__ == "CoCALlamaForCausalLM"


def test_terms_are_copied_from_the_model_and_from_nowhere_else(source, tmp_path, caplog):
    """A folder of the REUSE layout, with what else may be there, and as in the Hub's cache."""
    secret = tmp_path / "secret"
    secret.write_text("a key")
    (source / "LICENSES").mkdir()
    (source / "LICENSES/MIT.txt").write_text("MIT")
    (source / "LICENSES/deep").mkdir()
    (source / "LICENSE").symlink_to(secret)
    (source / "LICENSE-2").symlink_to("LICENSE.txt")
    (source / "NOTICE.txt").symlink_to("nowhere")
    (source / os.fsdecode(b"NOTICE-\xe9")).write_text("a name of another encoding")
    os.mkfifo(source / "NOTICE")
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    shutil.move(source / "config.json", cache / "blobs/0")
    shutil.move(source / "LICENSE.txt", cache / "blobs/1")
    (source / "config.json").symlink_to("../../blobs/0")
    (source / "LICENSE.txt").symlink_to("../../blobs/1")
    snapshot = shutil.move(source, cache / "snapshots/abc")
    convert_folder(snapshot, tmp_path / "target", form="strict")
    terms = {"LICENSE-2": "terms", "LICENSE.txt": "terms", "LICENSES/MIT.txt": "MIT"}
    copied = [path for path in (tmp_path / "target").rglob("*") if not path.is_dir()]
    copied = {path.relative_to(tmp_path / "target").as_posix(): path for path in copied}
    found = {name: path for name, path in copied.items() if name.startswith(("LICENSE", "NOTICE"))}
    assert {name: path.read_text() for name, path in found.items()} == terms
    assert not any(path.is_symlink() for path in copied.values())
    assert ", ".join(terms) in (tmp_path / "target/README.md").read_text()
    said = [text for text in caplog.messages if "is not copied" in text]
    assert len(said) == 4 and sum("a link out of the model's folder" in each for each in said) == 1


@pytest.mark.parametrize(
    ("kind", "head", "auto", "pipeline"),
    [
        *((kind, None, "AutoModelForCausalLM", "text-generation") for kind in CONFIGS),
        ("llama-strict", "Model", "AutoModel", None),
        ("llama-strict", "ForTokenClassification", "AutoModelForTokenClassification",
         "token-classification"),
    ],
)  # fmt: skip
def test_every_kind_of_model_and_head_has_a_readable_card(kind, head, auto, pipeline, tmp_path):
    config = CONFIGS[kind]()
    config.architectures = head and [f"CoCALlama{head}"]
    write_card(tmp_path, config)
    card = ModelCard.load(tmp_path / "README.md")
    assert f"\nmodel = {auto}.from_pretrained(" in card.text
    assert card.data.pipeline_tag == pipeline
    assert not re.search(r"[{}\[]|None", card.text.partition("| methods")[0])


def test_the_source_may_be_damaged_a_name_or_gone(source, tmp_path):
    (source / "README.md").write_bytes(b"---\n- no: [mapping\n---\n\xff")
    gone = tmp_path / "a/b/gone"
    for name, base_model in ((source, None), ("lab/first", "lab/first"), (gone, None)):
        write_card(tmp_path, CONFIGS["llama-strict"](), source=name)
        data = ModelCard.load(tmp_path / "README.md").data
        assert (data.base_model, data.license) == (base_model, None)
