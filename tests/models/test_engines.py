"""What serving engines ask of a model: imitations of the backends of vLLM 0.33 and SGLang 0.5.23.

An engine makes the decoder by ``AutoModel.from_config`` and an attention of its own for every
layer, which keeps the keys and values of every text and applies the window of the layer. A pass
holds pieces of several texts in one row, told apart by their positions, without a mask. vLLM finds
the one attention call in the source of the attention class and evaluates its ``scaling=`` on each
module beforehand; SGLang passes its attentions as an argument and takes the scaling from the call.
"""

import ast
import importlib
import inspect
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coca_attention import convert
from coca_attention.models import Roles
from coca_attention.models.configuration import head_width
from coca_attention.models.families import FAMILIES as RECORDS
from coca_attention.ops import attend
from coca_attention.testing import difference, some_tokens
from families import FAMILIES, vanilla

# Tokens of each text that a pass reads: prompts together, a prompt in pieces, single tokens.
PASSES = [(5, 9), (7, 1), (0, 6), (1, 1), (1, 1)]


def scaling_of(cls):
    """The attribute of self that the one attention call in a class passes as its scaling."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    assigned = [node for node in assigned if "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)]
    functions = {ast.unparse(target) for node in assigned for target in node.targets}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) in functions)
    (scaling,) = (ast.unparse(word.value) for word in call.keywords if word.arg == "scaling")
    owner, _, name = scaling.partition(".")
    assert owner == "self" and name.isidentifier()
    return name


class PagedAttention:
    """Attention of one layer, with the keys and values of all texts."""

    def __init__(self, config, index, engine):
        self.width = head_width(config)
        kinds = getattr(config, "layer_types", None)
        local = engine == "vllm" if kinds is None else kinds[index] == "sliding_attention"
        self.window = getattr(config, "sliding_window", None) if local else None
        self.cache = {}

    def __call__(self, query, key, value, scale, sizes):
        """Tensors (1, heads, tokens, width) to (tokens, heads * width); sizes: of each text."""
        assert {x.shape[-1] for x in (query, key, value)} == {self.width}
        pieces, outputs = [x.split(sizes, dim=2) for x in (query, key, value)], []
        for text, (q, *new) in enumerate(zip(*pieces, strict=True)):
            past = self.cache.get(text, [x[:, :, :0] for x in new])
            k, v = (torch.cat(pair, 2) for pair in zip(past, new, strict=True))
            self.cache[text] = k, v
            outputs.append(attend(q, k, v, window=self.window, scale=scale))
        return torch.cat(outputs, 2)[0].transpose(0, 1).flatten(1)


class Engine:
    def __init__(self, model, engine):
        model.config._attn_implementation = engine
        self.body = AutoModel.from_config(model.config, dtype=torch.float32).double().eval()
        self.body.load_state_dict(model.base_model.state_dict())
        modules = self.body.attention_class.layout.modules(self.body)
        attentions = {i: PagedAttention(self.body.config, i, engine) for i in range(len(modules))}
        self.arguments = {"attention_instances": attentions} if engine == "sglang" else {}
        for attention, module in zip(attentions.values(), modules, strict=True):
            if engine == "vllm":
                module.attn = attention
                module.attn_scale = float(getattr(module, scaling_of(type(module))))

    @torch.no_grad()
    def read(self, texts):
        """Hidden states of texts, read in `PASSES`."""
        done, found = [0] * len(texts), [[] for _ in texts]
        for sizes in PASSES:
            spans = [range(start, start + n) for start, n in zip(done, sizes, strict=True)]
            ids = torch.cat([text[list(span)] for text, span in zip(texts, spans, strict=True)])
            Engine.sizes = list(sizes)
            states = self.body(
                input_ids=ids[None],
                position_ids=torch.tensor([[place for span in spans for place in span]]),
                use_cache=False,
                return_dict=False,
                **self.arguments,
            )[0][0]
            for rows, piece in zip(found, states.split(list(sizes)), strict=True):
                rows.append(piece)
            done = [start + n for start, n in zip(done, sizes, strict=True)]
        return [torch.cat(rows) for rows in found]


def vllm_attention(module, query, key, value, attention_mask, **_):
    assert attention_mask is None
    return module.attn(query, key, value, module.attn_scale, Engine.sizes), None


def sglang_attention(module, query, key, value, attention_mask, scaling, attention_instances, **_):
    assert attention_mask is None
    attention = attention_instances[module.layer_idx]
    return attention(query, key, value, scaling, Engine.sizes), None


ALL_ATTENTION_FUNCTIONS.register("vllm", vllm_attention)
ALL_ATTENTION_FUNCTIONS.register("sglang", sglang_attention)


def assert_same_in_an_engine(model, engine):
    model = model.double().eval()
    lengths = [sum(sizes) for sizes in zip(*PASSES, strict=True)]
    texts = [some_tokens(model, batch=1, length=n, seed=n)[0] for n in lengths]
    with torch.no_grad():
        wanted = [model.base_model(text[None]).last_hidden_state[0] for text in texts]
    for ours, theirs in zip(Engine(model, engine).read(texts), wanted, strict=True):
        assert difference(ours, theirs) < 1e-10


ROLES = {"roles": Roles("lg", window=4, turning_pairs=2, temperature=True, decay=0.0)}
# SGLang applies a window to the layers that `layer_types` names, and Mistral and Phi-3 have none.
SGLANG = sorted(set(FAMILIES) - {"Mistral", "Phi-3"})


@pytest.mark.parametrize(
    ("family", "form", "changes", "engine"),
    [
        *((family, "slack", {}, "vllm") for family in FAMILIES),
        *((family, "slack", {}, "sglang") for family in SGLANG),
        ("Llama", "strict", {"free_pairs": 1}, "vllm"),
        ("GPT-NeoX", "magnitude", {"free_pairs": 1}, "vllm"),
        ("Llama", "rope", ROLES, "vllm"),
        ("Qwen2", "rope", ROLES, "vllm"),
        ("Llama", "slack", {"kv_cache": "half"}, "vllm"),
    ],
)
def test_every_family_form_and_roles_in_an_engine(family, form, changes, engine):
    assert_same_in_an_engine(convert(vanilla(family), form, **changes), engine)


@pytest.mark.parametrize(
    ("engine", "form", "changes"),
    [
        ("vllm", "rope", {"roles": Roles("lg", window=4)}),
        # Also in texts within the limit, where a longer one could follow.
        ("vllm", "rope", {"max_distance": 64}),
        ("sglang", "strict", {"max_distance": 64}),
    ],
)
def test_decays_and_limited_distances_are_refused_by_an_engine(engine, form, changes):
    model = convert(vanilla("Llama"), form, **changes)
    with pytest.raises(ValueError, match=f"eager or flex_attention; got {engine}"):
        assert_same_in_an_engine(model, engine)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.config.model_type)
def test_engines_take_the_classes_for_compatible(record):
    assert record.causal_lm.is_backend_compatible()
    assert record.causal_lm._can_set_attn_implementation()
    assert scaling_of(record.body.attention_class) == "kernel_scale"


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_engines_register_the_models_by_an_entry_point(group):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((_, value),) = project["entry-points"][group].items()
    module, _, name = value.partition(":")
    getattr(importlib.import_module(module), name)()
    assert AutoConfig.for_model("coca_llama").model_type == "coca_llama"
