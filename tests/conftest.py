"""Shared fixtures: a tiny tokenizer and tiny models, created offline."""

import gc
import os
import shutil
import tempfile

# Set before Transformers is imported: tests must not access the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests must not leave files in the user's cache either.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="coca-cache-")

import pytest
import torch

if not torch.cuda.is_available():
    # Run Triton kernels in Triton's interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from coca_attention.models import AlibiGPTNeoXConfig, CoCAGPTNeoXConfig, CoCALlamaConfig
from coca_lab.data import Document, train_tokenizer

try:
    import hypothesis
except ImportError:  # `make gpu-check` may run with little more than PyTorch installed
    pass
else:
    # A slow, shared machine must not fail tests.
    hypothesis.settings.register_profile("project", deadline=None)
    hypothesis.settings.load_profile("project")

CACHE = os.environ["XDG_CACHE_HOME"]


def pytest_collection_finish():
    # What is imported stays: the collections after every training need not walk through it.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    shutil.rmtree(CACHE, ignore_errors=True)


VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WHOLE_HEAD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
CONFIGS = {
    "slack": lambda: CoCAGPTNeoXConfig(**SIZES, coca_form="slack"),
    "strict": lambda: CoCAGPTNeoXConfig(**SIZES, coca_form="strict"),
    "llama-slack": lambda: CoCALlamaConfig(**SIZES, coca_form="slack", num_key_value_heads=2),
    "llama-strict": lambda: CoCALlamaConfig(**SIZES, coca_form="strict", num_key_value_heads=1),
    "alibi": lambda: AlibiGPTNeoXConfig(**SIZES),
    "rope": lambda: GPTNeoXConfig(**SIZES, rope_parameters=dict(WHOLE_HEAD)),
    "llama-rope": lambda: LlamaConfig(**SIZES, num_key_value_heads=2),
}


def tiny_model(kind: str, seed: int = 0):
    """A small random model whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("weight") and weight.dim() == 2:
                weight.mul_(8.0)
    return model


def some_text(words: int, seed: int = 0) -> str:
    """Deterministic text with some structure."""
    generator = torch.Generator().manual_seed(seed)
    stems = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    picks = torch.randint(len(stems), (words,), generator=generator).tolist()
    return " ".join(stems[a] + str(a * b % 7) for a, b in zip(picks, [*picks[1:], 0], strict=True))


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([Document("a", some_text(3000))], VOCABULARY)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A folder of .txt files, one per document."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(12):
        (folder / f"{index:02}.txt").write_text(some_text(300, seed=index))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A tiny CoCA model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("slack").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def trained(text_folder, tmp_path_factory):
    """The folder of a finished run of `runs.recipe`, with validation and all its checkpoints."""
    import runs
    from coca_lab.training import train

    return train(runs.recipe(text_folder), tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def base(text_folder, tmp_path_factory):
    """The folder of a finished run of a rotary Llama with grouped heads, to start stages from."""
    import runs
    from coca_lab.training import train

    recipe = runs.recipe(text_folder, **runs.BASE)
    return train(recipe, tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="session")
def staged(base, text_folder, tmp_path_factory):
    """The recipe file and the folder of a finished run of the paper's three stages."""
    import runs
    from coca_lab.training import load_recipe, train

    folder = tmp_path_factory.mktemp("staged")
    path = runs.write_recipe(base, text_folder, folder / "recipe.yaml", runs.PAPER)
    return path, train(load_recipe(path), folder / "run")


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without their pictures, which take most of the time."""
    monkeypatch.setattr("coca_lab.report.drawing.specification", lambda *_: {})
    monkeypatch.setattr("coca_lab.report.drawing.static_svg", lambda *_: "<svg></svg>")


@pytest.fixture(scope="session")
def ray():
    """Ray on this machine, small."""
    ray = pytest.importorskip("ray", reason="Ray is an extra")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=10**8,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
