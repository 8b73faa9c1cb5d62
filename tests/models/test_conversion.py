"""Conversion: errors, what stays unchanged, and folders."""

import json
import os
import signal
import stat
from pathlib import Path

import accelerate
import peft
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    modeling_utils,
)

from coca_attention import convert
from coca_attention.errors import UserError
from coca_attention.models import Conversion, Roles
from coca_attention.models.decoder import CollinearModel
from coca_attention.models.families import decoders
from coca_attention.testing import logits, some_tokens
from coca_lab import folders
from coca_lab.cli import main
from coca_lab.folders import convert_folder
from commands import run
from families import FAMILIES, SIZES, configuration, reloaded, vanilla


def test_a_configuration_says_what_loads_it(tmp_path):
    """Transformers alone does not know the type, and says so without the reason."""
    convert(vanilla("Llama"), "strict").config.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert '"requires": "import coca_attention.models' in saved


def test_an_unsupported_model_lists_the_families():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SIZES))
    with pytest.raises(ValueError, match="StableLmForCausalLM cannot be converted") as caught:
        convert(model, "slack")
    assert all(name in str(caught.value) for name, _ in FAMILIES.values())
    with pytest.raises(ValueError, match=r"expected a Transformers model, got Linear.*CoCAAtt"):
        convert(torch.nn.Linear(4, 4), "rope")
    own = torch.nn.Linear(4, 4)
    own.config = AutoConfig.for_model("llama", **SIZES)
    with pytest.raises(ValueError, match="Linear cannot be converted: supported are the models of"):
        convert(own, "rope")


LENGTH = "must be a whole number of at least 1, got"
REFUSED = [
    ("Llama", {"form": "slak"}, "`form` must be one of .* got 'slak'; did you mean slack?"),
    ("Llama", {"kv_cache": "third"}, "'kv_cache' expected one of"),
    ("Llama", {"roles": "llg"}, "roles must be a Roles, such as .*, got 'llg'"),
    ("Gemma 3", {"roles": Roles("lg")}, "has rotary parameters per layer type"),
    ("Llama", {"roles": Roles("lg"), "free_pairs": 2}, "roles determine the free pairs"),
    ("Llama", {"roles": Roles("lg"), "near": 9}, "roles limit no distances: leave out"),
    ("Llama", {"roles": Roles("llg")}, "needs a model of at least 3 layers, got 2"),
    ("Llama", {"form": "slack", "near": 9}, "form slack depend on both positions"),
    ("Llama", {"form": "rope", "free_pairs": 2}, "all pairs are free with form rope"),
    ("Llama", {"form": "rope", "length": 0}, f"`length` {LENGTH} 0"),
    ("Llama", {"form": "rope", "near": 2.5}, f"`near` {LENGTH} 2.5"),
    ("Llama", {"form": "rope", "near": 65}, "the training length of 64 tokens, got 65"),
    ("Llama", {"form": "rope", "length": 8, "near": 9}, "length of 8 tokens, got 9"),
    ("Llama", {"form": "slack", "length": 8}, "is for roles and limits of distances, got 8"),
]


OBSTACLES = [
    ("gpt2", {}, "has no rotary positions"),
    (
        "falcon",
        {"alibi": True, "head_dim": None},
        "has biases in place of rotary",
    ),
    ("gemma2", {"attn_logit_softcapping": 50.0}, r"caps its attention scores \(attn_logit_soft"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "caps its attention scores"),
    ("olmo", {"clip_qkv": 8.0}, r"clips queries, keys and values \(clip_qkv\)"),
    ("phi", {"qk_layernorm": True}, "applies layer norms to queries and keys"),
    ("deepseek_v2", {"kv_lora_rank": 8}, "computes keys from a latent vector"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "has layers without positions"),
    (
        "cohere2",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "has layers without positions",
    ),
    ("gpt_oss", {"num_local_experts": 4}, "has sinks, learned scores for attending to nothing"),
    ("granite_swa", {}, "has sinks"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "has layers of other types than atten"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), OBSTACLES, ids=[x[0] for x in OBSTACLES])
def test_what_an_attention_does_beyond_a_coca_model_is_named(kind, fields, reason):
    sizes = {name: x for name, x in (SIZES | fields).items() if x is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(UserError, match=f"{type(model).__name__} cannot be converted: it {reason}"):
        convert(model, "slack")
    if kind in decoders():
        with pytest.raises(StrictDataclassError, match=reason):
            decoders()[kind].config(**sizes)


@pytest.mark.parametrize(("family", "arguments", "message"), REFUSED)
def test_a_refused_conversion_does_not_change_the_model(family, arguments, message):
    model = vanilla(family)
    kind, config, ids = type(model), model.config, some_tokens(model)
    before = logits(model, ids)
    with pytest.raises(UserError, match=message):
        convert(model, **{"form": "slack", **arguments})
    assert type(model) is kind and model.config is config
    assert torch.equal(logits(model, ids), before)


def test_converted_adapted_and_unloaded_models_are_refused():
    with pytest.raises(ValueError, match="start from the model that it was made"):
        convert(convert(vanilla("Llama"), "slack"), "slack")
    adapted = peft.get_peft_model(vanilla("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge the adapters first"):
        convert(adapted, "slack")
    with pytest.raises(
        ValueError, match=r"layer 0: expected q_proj to be a torch.nn.Linear, got peft"
    ):
        convert(adapted.base_model.model, "slack")
    offloaded = accelerate.cpu_offload(vanilla("Llama"))
    with pytest.raises(ValueError, match="not in memory: load the model without offloading"):
        convert(offloaded, "slack")


def test_weights_that_zero_3_has_split_are_refused(monkeypatch):
    """Its mark on a parameter is an attribute; those of modules are split as they are made."""
    model = vanilla("Llama")
    for parameter in model.parameters():
        parameter.ds_id = 0
    with pytest.raises(UserError, match="load the model without offloading or DeepSpeed ZeRO-3"):
        convert(model, "slack")
    assert type(model) is LlamaForCausalLM and "k_proj" in str(model)
    config = convert(vanilla("Llama"), "slack").config
    monkeypatch.setattr(torch.nn.Parameter, "ds_id", 0, raising=False)
    with pytest.raises(UserError, match="use ZeRO-2, or FSDP2"):
        AutoModelForCausalLM.from_config(config)


def test_settings_are_an_object_or_keywords():
    more = {"free_pairs": 2, "kv_cache": "half"}
    ways = ((Conversion("strict", **more), {}), (Conversion("strict"), more), ("strict", more))
    models = [convert(vanilla("Llama"), wanted, **options) for wanted, options in ways]
    ids = some_tokens(models[0])
    for model in models:
        assert model.config.kv_cache == "half"
        assert torch.equal(logits(model, ids), logits(models[0], ids))
    with pytest.raises(TypeError, match="unexpected keyword argument 'free_pair'"):
        convert(vanilla("Llama"), "strict", free_pair=2)
    with pytest.raises(UserError, match=r"`form` must be one of .*, got Roles\("):
        convert(vanilla("Llama"), Roles("llg"))


def test_unsupported_models_are_not_changed():
    model = vanilla("Llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="layers share an attention module"):
        convert(model, "slack")
    logits(model, some_tokens(model))
    model = vanilla("Llama")
    with torch.inference_mode(), pytest.raises(ValueError, match="convert outside of it"):
        convert(model, "slack")
    convert(model.model, "slack")
    with pytest.raises(ValueError, match="convert the language model instead"):
        convert(model, "slack")


def test_configurations_print_all_fields_and_name_no_code():
    model = vanilla("Phi-3")
    model.config.auto_map = {"AutoConfig": "configuration_phi3.Phi3Config"}
    config = convert(model, "slack").config
    assert not hasattr(config, "auto_map")
    assert "rope_parameters" in repr(config) and "coca_form" in repr(config)


def test_a_decoder_without_head_is_converted():
    whole = vanilla("GPT-NeoX")
    body = type(whole.base_model)(whole.config).eval()
    body.load_state_dict(whole.base_model.state_dict())
    ids = some_tokens(whole)
    convert(body, "slack")
    assert isinstance(body, CollinearModel)
    assert type(body) is type(AutoModel.from_config(body.config))
    expected = convert(whole, "slack").base_model(ids).last_hidden_state
    assert torch.equal(body(ids).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])  # and experts have other names on disk
def test_the_language_model_of_a_llava_is_converted(family, tmp_path, capsys):
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=configuration(family),
        vision_config=CLIPVisionConfig(**vision, num_hidden_layers=2, image_size=28, patch_size=14),
        image_token_id=5,
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "vanilla")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "vanilla")
    words = ["convert", str(tmp_path / "vanilla"), str(tmp_path / "target"), "--form", "strict"]
    assert main(words) == 2
    assert "llava is no causal language model: it has one." in capsys.readouterr().err
    with pytest.raises(UserError, match=r"convert\(model.get_decoder\(\)\) converts its language"):
        convert(model, "slack")
    model.config.text_config = convert(model.get_decoder(), "strict", kv_cache="half").config
    ids, pixels = some_tokens(model), torch.randn(2, 3, 28, 28)
    ids[ids == 5] += 1
    ids[:, 3:7] = 5  # four patches
    loaded = reloaded(model, tmp_path, LlavaForConditionalGeneration)
    expected = logits(model, ids, pixel_values=pixels)
    assert torch.equal(logits(loaded, ids, pixel_values=pixels), expected)


def test_settings_of_the_model_are_kept():
    model = vanilla("Gemma 3")  # whose head is tied to the embedding
    model.set_attn_implementation("eager")
    model.generation_config.max_new_tokens = 7
    model.config.name_or_path = "lab/first"
    model.half().train()
    model.model.layers[0].requires_grad_(False)
    convert(model, "slack")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "eager"
    assert model.generation_config.max_new_tokens == 7
    assert model.config.name_or_path == "lab/first"
    assert model.training and model.dtype == torch.float16
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert "model.layers.0.self_attn.t_proj.weight" in frozen
    assert not any("layers.1" in name for name in frozen)
    assert "model.layers.*.self_attn.t_proj" in model.tp_plan
    assert not any("k_proj" in name for name in model.tp_plan)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "ModernBERT"])
def test_a_separate_head_that_the_configuration_calls_tied_is_kept(family, tmp_path):
    model = vanilla(family, tie_word_embeddings=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    head, ids = model.get_output_embeddings().weight.clone(), some_tokens(model)
    converted = reloaded(convert(reloaded(model, tmp_path / "start"), "rope"), tmp_path / "made")
    assert not converted.config.tie_word_embeddings
    converted.tie_weights()  # as PEFT and Accelerate call it
    assert torch.equal(converted.get_output_embeddings().weight, head)
    assert torch.allclose(logits(converted, ids), logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "auto"), [("Qwen2", AutoModelForCausalLM), ("ModernBERT", AutoModelForMaskedLM)]
)
def test_convert_from_folder_to_folder(family, auto, tmp_path, capsys, tokenizer):
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    model = vanilla(family, auto=auto, vocab_size=300).bfloat16()
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    words = ["--form", "strict", "--kv-cache", "half"]
    code, output, _ = run(capsys, "convert", source, target, *words)
    assert code == 0 and f"coca_{family.lower()}, strict" in output
    loaded = auto.from_pretrained(target).eval()
    assert loaded.dtype == torch.bfloat16
    assert (loaded.config.coca_form, loaded.config.kv_cache) == ("strict", "half")
    assert (target / "tokenizer.json").is_file()
    ids = some_tokens(loaded)
    assert torch.equal(logits(loaded, ids), logits(convert(model, "strict"), ids))
    assert sorted(p.name for p in target.parent.iterdir()) == ["target"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "target"], "there is no such folder here"),
        (
            ["source", "target", "--from-original", "--form", "strict"],
            "omit --form, --free-pairs, --roles, --near and",
        ),
        (["bare", "target", "--from-original"], "no weights could be loaded"),
        (["source", "source/inside"], "is inside the source"),
        (["source", "source"], "is a file or has content"),
        (["source", "."], "is or contains the current folder"),
    ],
)
def test_a_failed_conversion_writes_nothing(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vanilla("Llama").save_pretrained("source")
    vanilla("Llama").config.save_pretrained("bare")
    config = json.loads(Path("bare/config.json").read_text())
    del config["rope_parameters"]  # which the authors' files lack
    Path("bare/config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.rglob("*"))
    form = [] if "--from-original" in words else ["--form", "slack"]
    code, _, error = run(capsys, "convert", *words, *form)
    assert code == 2 and message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_target_may_be_an_empty_folder_behind_a_link(tmp_path):
    """And its files have the mode of any new file."""
    target = tmp_path / "link"
    vanilla("Llama").save_pretrained(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    target.symlink_to(tmp_path / "empty")
    usual = os.umask(0o027)
    try:
        convert_folder(tmp_path / "source", target)
    finally:
        os.umask(usual)
    AutoModelForCausalLM.from_pretrained(target)
    for name in ("model.safetensors", "config.json"):
        assert stat.S_IMODE((target / name).stat().st_mode) == 0o640


def test_a_kill_while_writing_leaves_no_model(tmp_path):
    """Killed while writing the weights; then the same command succeeds."""
    source, target, save = tmp_path / "source", tmp_path / "target", modeling_utils.safe_save_file
    vanilla("Llama").save_pretrained(source)

    def half(tensors, path, **options):
        save(tensors, path, **options)
        os.truncate(path, 100)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        modeling_utils.safe_save_file = half
        main(["convert", str(source), str(target), "--form", "slack"])
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not target.exists()
    assert main(["convert", str(source), str(target), "--form", "slack"]) == 0
    AutoModelForCausalLM.from_pretrained(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize(
    ("owner", "moment", "winner", "message"),
    [
        (PreTrainedModel, "save_pretrained", "magnitude", "target is in use by another process"),
        (folders, "convert", "strict", "target is a file or has content"),
    ],
)
def test_of_two_conversions_to_one_target_the_first_to_write_wins(
    owner, moment, winner, message, tmp_path, monkeypatch
):
    """The other one begins while the first writes; or writes all while the first converts."""
    source, target, refused = tmp_path / "source", tmp_path / "target", []
    vanilla("Llama").save_pretrained(source)
    usual = getattr(owner, moment)

    def attempt(form):
        try:
            convert_folder(source, target, form=form)
        except UserError as error:
            refused.append(str(error))

    def with_another(*args, **kwargs):
        found = usual(*args, **kwargs)
        monkeypatch.setattr(owner, moment, usual)
        attempt("strict")
        return found

    monkeypatch.setattr(owner, moment, with_another)
    attempt("magnitude")
    assert len(refused) == 1 and message in refused[0]
    assert AutoModelForCausalLM.from_pretrained(target).config.coca_form == winner
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]
