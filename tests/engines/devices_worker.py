"""ExecuTorch, DeepSpeed, bitsandbytes and torchao, in an environment of `make test-engines`.

python devices_worker.py executorch FOLDER IDS       writes FOLDER/read.pt, the logits
python devices_worker.py deepspeed LLAMA CONVERTED   prints why ZeRO-3 is refused, a line each
python devices_worker.py quantised LLAMA CONVERTED   writes LLAMA-4bit, and prints by quantiser
    what T is, the errors of both models' logits, and why a quantised Llama is not converted
python devices_worker.py extended 4BIT OTHER         prints how far YaRN changes a 4-bit folder's
    logits in memory, and how far these differ from another folder's
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coca_attention import convert, extend_context
from coca_attention.errors import UserError
from coca_attention.models.layer_pass import halve_static_keys


def read_by_executorch(folder, ids):
    """Logits of a decoding step that is exported, lowered to XNNPACK and run, (T, vocabulary)."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=len(ids) + 4)
    if model.config.kv_cache == "half":
        module = halve_static_keys(module)
    example = {"input_ids": torch.tensor([ids[:1]]), "cache_position": torch.tensor([0])}
    program = torch.export.export(module, (), example, strict=True)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    written = Runtime.get().load_program(lowered.to_executorch().buffer)  # which owns the memory
    step = written.load_method("forward")
    # An output is overwritten by the next step.
    read = [
        step.execute([torch.tensor([[x]]), torch.tensor([i])])[0][0].clone()
        for i, x in enumerate(ids)
    ]
    torch.save(torch.cat(read), Path(folder) / "read.pt")


def refused_by_zero_3(llama, converted):
    """Load a Llama and a converted one under ZeRO-3, and print what is said."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # a free one
    os.environ.update(address, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    # Otherwise it compiles code for CPUs that share memory, which one process does not need.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    settings = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    kept = HfDeepSpeedConfig(settings)
    model = AutoModelForCausalLM.from_pretrained(llama)
    assert next(model.parameters()).ds_id is not None and kept
    config = AutoConfig.from_pretrained(converted)
    for attempt in (
        lambda: convert(model, "slack"),
        lambda: AutoModelForCausalLM.from_pretrained(converted),
        lambda: AutoModelForCausalLM.from_config(config),
    ):
        try:
            attempt()
        except UserError as error:
            print(error)
        else:
            print("not refused")


@torch.no_grad()
def read(folder, **options):
    """A model of a folder, and its logits of a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    return model, model(torch.arange(200)[None] % model.config.vocab_size).logits


def quantised(llama, converted):
    """Quantise a Llama and a converted one by every library."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import BitsAndBytesConfig, TorchAoConfig

    ways = {
        "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        "8bit": BitsAndBytesConfig(load_in_8bit=True),
        "torchao": TorchAoConfig(quant_type=Int8WeightOnlyConfig()),
    }
    for name, how in ways.items():
        errors = []
        for folder in (converted, llama):
            whole = read(folder)[1]
            model, logits = read(folder, quantization_config=how)
            errors.append(((logits - whole).norm() / whole.norm()).item())
            if folder == converted:
                weight = model.model.layers[0].self_attn.t_proj.weight
                kind = type(weight).__name__
        if name == "4bit":
            model.save_pretrained(f"{llama}-4bit")
        print(name, kind, *errors, why_not(model))
    model, _ = read(llama)
    quantize_(model, Int8WeightOnlyConfig())  # without Transformers, whose configuration says so
    print("quantize_", why_not(model))


def why_not(model):
    """Why a model is not converted."""
    try:
        convert(model, "strict")
    except UserError as error:
        return error


@torch.no_grad()
def extended(packed, other):
    """Compare YaRN in memory with what ``coca extend`` wrote of the same folder."""
    from bitsandbytes.nn import modules

    # With AVX512-BF16 its products round to bfloat16, which turns the last bit of an angle into one
    # of theirs.
    modules.has_avx512bf16 = lambda: False
    model, before = read(packed)
    after = extend_context(model, "yarn")(torch.arange(200)[None] % 512).logits
    print((after - before).norm().item(), (after - read(other)[1]).norm().item())


WORK = {
    "executorch": lambda folder, ids: read_by_executorch(folder, json.loads(ids)),
    "deepspeed": refused_by_zero_3,
    "quantised": quantised,
    "extended": extended,
}

if __name__ == "__main__":
    kind, first, second = sys.argv[1:]
    WORK[kind](first, second)
