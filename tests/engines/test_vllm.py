"""CoCA models and exported ones in vLLM itself, which `make test-engines` installs."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from coca_attention import convert
from coca_attention.models import Roles, set_rotary_scaling
from coca_attention.testing import difference, logits
from coca_lab.export import as_native
from families import FAMILIES, vanilla
from natives import cohere

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "engines" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-engines"),
]

# vLLM's attention on a CPU takes heads of 32 values and more.
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024, "vocab_size": 300}
LENGTHS = (5, 40, 90, 300, 500)
TOKENS = 16
ROUND_OFF = 1e-4  # of log probabilities in float32


def prompts(lengths=LENGTHS, seed=1):
    """Random prompts as lists of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, log):
        self.log = log
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [PYTHON, Path(__file__).parent / "vllm_worker.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def read(self, folder, *rounds, tokens=TOKENS, prompt_scores=True, adapter=None, **options):
        """Per round of prompts, what vLLM says to each; RuntimeError with vLLM's own error."""
        options = {
            "model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8,
            "max_model_len": 600, "model_impl": "transformers", **options,
        }  # fmt: skip
        asked = {"options": options, "rounds": rounds, "tokens": tokens}
        asked |= {"prompt_scores": prompt_scores, "adapter": adapter}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["rounds"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("vllm") / "log")
    yield engine
    engine.process.stdin.close()
    assert engine.process.wait(timeout=60) == 0


def random_model(family="Llama", **changes):
    return vanilla(family, **SIZES, **changes)


def scores(model, ids, tokens):
    """Log probabilities of the tokens of a text and its continuation, but the first."""
    read = logits(model, torch.tensor([ids + tokens]))[0, :-1].double().log_softmax(-1)
    return read, read.gather(1, torch.tensor([*ids[1:], *tokens])[:, None])[:, 0]


def assert_same(model, given, answers, tolerance=ROUND_OFF):
    """The same greedy text, and the same log probabilities of every token that has any."""
    model = model.eval()
    for ids, answer in zip(given, answers, strict=True):
        read, expected = scores(model, ids, answer["tokens"])
        found = torch.tensor(answer["scores"], dtype=torch.float64)
        assert len(answer["tokens"]) == TOKENS
        assert (found - expected[-len(found) :]).abs().max() < tolerance
        assert read[len(ids) - 1 :].argmax(-1).tolist() == answer["tokens"]


def assert_runs(engine, model, folder, **options):
    """Saved, and read by vLLM with prompts of unequal length in a batch."""
    model.save_pretrained(folder)
    (answers,) = engine.read(folder, prompts(), **options)
    assert_same(model, prompts(), answers)


def native(**changes):
    """A GraniteSWA with random sinks."""
    roles = Roles("lg", window=16, temperature=False)
    model = as_native(convert(random_model(**changes), "rope", roles=roles))
    torch.manual_seed(0)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


MODELS = {
    "strict": ("strict", {"free_pairs": 1}),
    "magnitude": ("magnitude", {}),
    "half cache": ("slack", {"kv_cache": "half"}),
    "roles": ("rope", {"roles": Roles("lg", window=16)}),
    "roles with CoCA": ("slack", {"roles": Roles("lg", window=16, turning_pairs=2)}),
}


def some_model(name):
    """One of `MODELS` or "native", and vLLM's options for it."""
    if name == "native":
        return native(), {"model_impl": "vllm"}
    form, changes = MODELS[name]
    return convert(random_model(), form, **changes), {}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(engine, family, tmp_path):
    assert_runs(engine, convert(random_model(family), "slack"), tmp_path / "model")


@pytest.mark.parametrize("name", [*MODELS, "native"])
def test_every_form_roles_and_caches_compute_the_same(engine, name, tmp_path):
    made, own = some_model(name)
    assert_runs(engine, made, tmp_path / "model", **own)


def test_cohere2_with_a_window_that_is_one_smaller(engine, tmp_path):
    """As the card of an exported one says."""
    model = cohere(
        **{name: x for name, x in SIZES.items() if name != "head_dim"}, sliding_window=16
    )
    own = {"model_impl": "vllm", "hf_overrides": {"sliding_window": 15}}
    assert_runs(engine, model, tmp_path / "model", **own)
    with pytest.raises(AssertionError):  # the control
        assert_runs(engine, model, tmp_path / "other", model_impl="vllm")


@pytest.mark.parametrize("name", ["roles", "native"])
def test_the_same_compiled(engine, name, tmp_path):
    """As `vllm serve` does by default."""
    made, own = some_model(name)
    assert_runs(engine, made, tmp_path / "model", enforce_eager=False, **own)


@pytest.mark.parametrize(
    ("name", "every", "cached"),
    [
        ("half cache", 0, [256, 256, 256]),
        # Of layers with windows vLLM keeps the end of a prompt, and of a prefix that two share, so
        # that the third prompt is the first to find it; or an end every so many tokens.
        ("roles", 0, [0, 256, 256]),
        ("native", 0, [0, 256, 256]),
        ("native", 128, [256, 256, 256]),
    ],
)
def test_prefix_caching_and_prefill_in_chunks(engine, name, every, cached, tmp_path):
    made, own = some_model(name)
    made.save_pretrained(tmp_path / "model")
    (begun,) = prompts([400])
    rounds = [[begun], [begun[:330] + more for more in prompts([20, 90, 3], seed=2)], [begun]]
    answers = engine.read(
        tmp_path / "model",
        *rounds,
        prompt_scores=False,  # of cached tokens vLLM has none
        enable_prefix_caching=True,
        prefix_cache_retention_interval=every,
        max_num_batched_tokens=64,  # so that each prompt is read in pieces, beside others
        **own,
    )
    for given, found in zip(rounds, answers, strict=True):
        assert_same(made, given, found)
    # Whole blocks of 128 tokens, and never all of a prompt.
    assert [[answer["cached"] for answer in found] for found in answers] == [[0], cached, [384]]


@pytest.mark.parametrize("name", ["roles", "native"])
def test_bfloat16_is_as_exact_as_in_transformers(engine, name, tmp_path):
    made, own = some_model(name)
    made.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (answers,) = engine.read(tmp_path / "model", prompts(), dtype="bfloat16", **own)
    load = AutoModelForCausalLM.from_pretrained
    exact, rounded = (
        load(tmp_path / "model", dtype=x).eval() for x in (torch.float32, torch.bfloat16)
    )
    errors = []
    for ids, answer in zip(prompts(), answers, strict=True):
        expected = scores(exact, ids, answer["tokens"])[1]
        theirs = torch.tensor(answer["scores"], dtype=torch.float64)
        ours = scores(rounded, ids, answer["tokens"])[1]
        errors.append([(x - expected).square().mean() for x in (theirs, ours)])
    of_vllm, of_transformers = torch.tensor(errors).mean(0).sqrt()
    assert 0 < of_vllm < 1.5 * of_transformers


def scaled_dynamically():
    model = convert(random_model(), "slack")
    set_rotary_scaling(model, "dynamic", factor=2.0)
    return model


def linear():
    model = convert(random_model(), "strict")
    model.config.coca_linear, model.config.layer_types = True, ["hybrid"] * 2
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: convert(random_model(), "rope", roles=Roles("lg", window=16, decay=1.0)),
            "a decay or a distance map",
        ),
        # Also in texts within the limit, where a longer one could follow.
        (lambda: convert(random_model(), "rope", near=64), "a decay or a distance map"),
        (lambda: convert(random_model(), "strict", near=64), "a decay or a distance map"),
        (scaled_dynamically, "dynamic scaling"),
        (linear, "linear attention"),
    ],
)
def test_what_vllm_cannot_compute_is_refused_at_its_start(engine, make, reason, tmp_path):
    make().save_pretrained(tmp_path / "model")
    with pytest.raises(RuntimeError, match=f"does not support {reason}"):
        engine.read(tmp_path / "model")


def test_adapters_of_peft(engine, tmp_path):
    """LoRA on every projection, T among them, beside PEFT."""
    model = convert(random_model(), "slack")
    model.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    adapted = get_peft_model(
        model, LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    options = {"adapter": str(tmp_path / "adapter"), "enable_lora": True, "max_lora_rank": 8}
    (answers,) = engine.read(tmp_path / "model", prompts(), **options)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([prompts()[1]])
    assert difference(logits(adapted, ids), logits(plain, ids)) > 1e-2
    assert_same(adapted, prompts(), answers)
