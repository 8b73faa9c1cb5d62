"""Models that `coca export` takes, in folders with tokenizers."""

import json
import shutil
from pathlib import Path

import torch
from transformers import Cohere2Config, Cohere2ForCausalLM

from coca_attention import convert
from coca_attention.models import Roles
from coca_lab.cli import main
from coca_lab.data import Document, train_tokenizer
from coca_lab.export import as_native
from conftest import some_text
from families import SIZES, far_from_uniform, vanilla

LENGTH, VOCABULARY = 64, 300
ROLES = Roles("llg", window=6, temperature=False)
KINDS = ["roles", "roles with biases", "granite with sinks", "cohere2"]


def roles(**changes):
    """A Llama with roles whose vocabulary is that of the folder's tokenizer."""
    llama = vanilla("Llama", num_hidden_layers=3, vocab_size=VOCABULARY, **changes)
    return convert(llama, "rope", roles=ROLES)


def cohere(**changes):
    """A Cohere2, which has layers without positions and so is in no table of `families`."""
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in SIZES if name != "head_dim"} | {
        "vocab_size": VOCABULARY, "num_hidden_layers": 3, "sliding_window": 6, "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    return far_from_uniform(Cohere2ForCausalLM(Cohere2Config(**sizes | changes)).eval())


def made(kind: str):
    """One of `KINDS`."""
    if kind == "cohere2":
        return cohere()
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    model = roles(**(biased if "biases" in kind else {}))
    if "granite" in kind:
        model = as_native(model)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def saved(model, folder):
    """The folder of a model with a tokenizer."""
    model.save_pretrained(folder)
    text = some_text(3000) + " 12345 ünï,  '' \n\n\t don't 7"
    tokenizer = train_tokenizer([Document("a", text)], VOCABULARY, split_digits=True)
    tokenizer.save_pretrained(folder)
    return folder


def answered_passkeys(folder, length, samples, output, address=None):
    """Records of passkey prompts that a model answered, here or behind a server's address."""
    words = ["eval", "passkey", folder, "--lengths", length, "--samples", samples]
    words += ["--max-new-tokens", 32, "--output", output]
    if address:
        words += ["--endpoint", f"{address}/v1"]
    assert main([str(word) for word in words]) == 0
    (cell,) = json.loads(Path(output).read_text())["results"]
    return cell["samples"]


def penalised(source, folder):
    """A copy of a model's folder with settings of its own that would change greedy answers."""
    shutil.copytree(source, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.5}))
    return folder


def exported(folder, target, *options):
    assert main(["export", str(folder), str(target), *options]) == 0
    return target
