"""llama.cpp as its authors publish it, to read an exported file as its users do."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coca_attention.errors import UserError, install


def package(name: str) -> ModuleType:
    """A package of the extra gguf; UserError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--gguf needs {name}: gguf writes the file, and llama.cpp (xllamacpp) reads what was "
            f"written: {install('gguf')}"
        ) from error


def serve(file: Path, context: int) -> Any:
    """A running server for texts of `context` tokens on one core, as exact as it can be made."""
    llama = package("xllamacpp")
    parameters = llama.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = context, 1, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.verbosity = 1  # errors alone
    # Its flash attention is less exact on a CPU (docs/integrations.md).
    parameters.flash_attn_type = llama.llama_flash_attn_type(0)
    parameters.cache_type_k = parameters.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    try:
        return llama.Server(parameters)
    except RuntimeError as error:
        raise UserError(
            f"llama.cpp cannot load {file.name}, and says why above: export without --gguf"
        ) from error


def log_probabilities(server: Any, ids: list[int], vocabulary: int, letter: int) -> Tensor:
    """Of the token after a prompt, (vocabulary,), NaN where llama.cpp says none.

    `letter` is a token that is a whole character: the server is made to answer with it, because it
    has no probabilities for an answer that ends within a character. They are those without bias.
    """
    answer = server.handle_completions(
        {
            "prompt": ids,
            "n_predict": 1,
            "n_probs": vocabulary,
            "logit_bias": [[letter, 1e4]],
            "temperature": 0,
            "cache_prompt": False,
        }
    )
    (found,) = answer["choices"][0]["logprobs"]["content"]
    values = torch.full((vocabulary,), torch.nan)
    for each in found["top_logprobs"]:
        values[each["id"]] = each["logprob"]
    return values
