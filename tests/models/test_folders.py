"""From folder to folder: a model that was loaded, converted, saved and loaded is one in memory."""

import copy

import pytest
import torch

from coca_attention import convert
from coca_attention.models import Roles
from coca_attention.models.families import FAMILIES as TABLE
from coca_attention.testing import logits, some_tokens
from covering import mostly_slow
from families import ENCODERS, FAMILIES, VARIED, vanilla
from public_models import loaded

WAYS = {
    "strict": ("strict", {}),
    "half of the pairs": ("slack", {"free_pairs": 2}),
    "limited": ("rope", {"max_distance": 11}),
    "roles": ("rope", {"roles": Roles("lg", window=6)}),
}
# Whose weights have other names on disk, or whose norms have an offset.
RENAMED = ["Mixtral", "Qwen3 MoE", "Granite MoE", "Gemma 3", "Phi-3"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_row_of_the_table_is_among_the_tests_families():
    tested = {kind for kind, _ in (FAMILIES | ENCODERS).values()}
    assert {family.vanilla.config_class.model_type for family in TABLE} == tested


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, [*VARIED, *RENAMED]))
def test_a_converted_folder_is_the_model_in_memory(family, tied, tmp_path):
    """Whatever the names of its weights in the folder (experts, an untied head of GPT-NeoX)."""
    number = list(FAMILIES).index(family)
    dtype, size = DTYPES[(number + tied) % 3], ("1GB", "20KB")[number % 2]
    source = vanilla(family, tie_word_embeddings=tied).to(dtype)
    source.save_pretrained(tmp_path / "vanilla", max_shard_size=size)
    kept = {"experts_implementation": source.config._experts_implementation}
    ids = some_tokens(source)
    for way, (form, changes) in WAYS.items():
        if way == "roles" and "full_attention" in source.config.rope_parameters:
            continue  # which is refused: rotary parameters per layer type
        expected = logits(convert(copy.deepcopy(source), form, **changes), ids)
        model = convert(loaded(tmp_path / "vanilla", dtype="auto", **kept), form, **changes)
        assert torch.equal(logits(model, ids), expected), way
        model.save_pretrained(tmp_path / way, max_shard_size=size)
        again = loaded(tmp_path / way, dtype="auto", **kept)
        assert again.dtype == dtype and torch.equal(logits(again, ids), expected), way


def test_pairs_that_stay_keep_the_norm_of_their_keys_to_the_last_bit():
    """In bfloat16, where 1 + w - 1 has lost the smaller weights."""
    source = vanilla("Gemma 3").bfloat16()
    small = 1e-3 * torch.randn(8, generator=torch.Generator().manual_seed(0)).bfloat16()
    source.model.layers[1].self_attn.k_norm.weight.data = small
    convert(source, "rope")
    norm = source.model.layers[1].self_attn.t_norm.weight
    assert torch.equal(norm, small)
