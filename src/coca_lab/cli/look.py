"""The command that shows what there is: a model, or this machine."""

import torch

from coca_lab.environment import describe_environment
from coca_lab.folders import facts
from coca_lab.loading import model_without_weights

Rows = list[tuple[str, str]]


def info_command(path: str | None) -> None:
    """Print versions and hardware of this machine, or the configuration of a model."""
    rows = _model(path) if path else _machine()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")


def _machine() -> Rows:
    """Versions and hardware, as result files record them."""
    here = describe_environment()
    return [
        ("versions", ", ".join(f"{name} {number}" for name, number in here["versions"].items())),
        ("system", here["system"]),
        ("processor", f"{here['processor']}, {here['cores']} cores, {here['threads']} threads"),
        ("GPUs", ", ".join(here["gpus"]) or "none"),
        ("CUDA of torch", torch.version.cuda or "none"),
    ]


def _model(path: str) -> Rows:
    """What a model's configuration says, and its number of parameters; no weight is read."""
    model = model_without_weights(path, "auto", any_head=True)
    packed = getattr(model.config, "quantization_config", None) or {}
    kind = packed.get("quant_method") or str(model.dtype).removeprefix("torch.")
    return [
        ("model", type(model).__name__),
        *((name, text) for name, text in facts(model.config.get_text_config()).items() if text),
        ("parameters", f"{model.num_parameters():,} ({kind})"),
    ]
