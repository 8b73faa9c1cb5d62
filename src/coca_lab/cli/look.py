"""The command that shows what there is: a model, or this machine."""

import torch

from coca_lab.environment import describe_environment
from coca_lab.folders import facts
from coca_lab.loading import model_without_weights


def info_command(path: str | None) -> None:
    """Print versions and hardware of this machine, or the configuration of a model."""
    if path:
        model = model_without_weights(path, "auto", any_head=True)  # no weight is read
        packed = getattr(model.config, "quantization_config", None) or {}
        kind = packed.get("quant_method") or str(model.dtype).removeprefix("torch.")
        rows = {
            "model": type(model).__name__,
            **{name: text for name, text in facts(model.config.get_text_config()).items() if text},
            "parameters": f"{model.num_parameters():,} ({kind})",
        }
    else:  # as result files record them
        here = describe_environment()
        versions = (f"{name} {number}" for name, number in here["versions"].items())
        rows = {
            "versions": ", ".join(versions),
            "system": here["system"],
            "processor": here["processor"],
            "cores": str(here["cores"]),
            "threads of torch": str(here["threads"]),
            "GPUs": ", ".join(here["gpus"]) or "none",
            "CUDA of torch": torch.version.cuda or "none",
        }
    width = max(len(name) for name in rows)
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")
