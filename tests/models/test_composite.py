"""Decoders inside models of images and text."""

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3Model,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.testing import difference, logits, some_tokens
from coca_lab.folders import convert_folder
from families import SIZES

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE, PATCHES = 5, 4
IDS = torch.arange(6, 30).unsqueeze(0)


def llava():
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_id=IMAGE,
    )
    return LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("part", ["decoder", "whole"])
def test_a_converted_llava_is_saved_and_reloaded(part, tmp_path):
    model = llava()
    given = model.model.language_model if part == "decoder" else model
    assert convert(given, "strict", kv_cache="half") is given
    assert model.config.text_config is model.model.language_model.config
    assert model.config.text_config.model_type == "coca_llama"
    ids = some_tokens(model)
    ids[ids == IMAGE] += 1
    ids[:, 3 : 3 + PATCHES] = IMAGE
    pixels = torch.randn(2, 3, 28, 28)
    expected = logits(model, ids, pixel_values=pixels)
    model.save_pretrained(tmp_path)
    loaded, info = LlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(loaded.eval(), ids, pixel_values=pixels), expected)
    pads = torch.zeros(2, 3, dtype=torch.long)
    padded, mask = torch.cat((pads, ids), 1), torch.cat((pads, torch.ones_like(ids)), 1)
    ours = logits(model, padded, pixel_values=pixels, attention_mask=mask)[:, 3:]
    assert difference(ours, expected) < 1e-5
    for cached in (True, False):
        new = loaded.generate(
            ids, pixel_values=pixels, max_new_tokens=5, do_sample=False, use_cache=cached
        )
        if cached:
            tokens = new
    assert torch.equal(tokens, new)


def test_a_decoder_that_could_not_be_reloaded_is_refused():
    text = {**SIZES, "query_pre_attn_scalar": 8, "sliding_window": 8}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**text), vision_config=SiglipVisionConfig(**VISION)
    )
    model = Gemma3Model(config)
    for given in (model, model.language_model):
        with pytest.raises(UserError, match="part of a model of type gemma3, which always loads"):
            convert(given)
    assert type(model.language_model).__name__ == "Gemma3TextModel"


def test_a_llava_is_converted_from_folder_to_folder(tmp_path):
    source, target = tmp_path / "llava", tmp_path / "new"
    model = llava()
    model.save_pretrained(source)
    (source / "preprocessor_config.json").write_text('{"size": 28}')
    convert_folder(source, target, form="strict")
    assert (target / "preprocessor_config.json").read_text() == '{"size": 28}'
    card = (target / "README.md").read_text()
    assert "import coca_attention" in card and "AutoModelForImageTextToText" in card
    assert "AutoProcessor" in card
    loaded = AutoModelForImageTextToText.from_pretrained(target).eval()
    assert torch.equal(logits(loaded, IDS), logits(convert(model, "strict"), IDS))


def test_a_decoder_alone_shares_no_configuration():
    config = LlamaConfig(**SIZES)
    first, second = LlamaModel(config), LlamaModel(config)
    convert(first)
    assert second.config.model_type == config.model_type == "llama"
