"""The command that writes a model for engines without this package."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from coca_attention.errors import UserError
from coca_attention.models.configuration import training_length
from coca_lab.cli.console import parse
from coca_lab.data import load_tokenizer
from coca_lab.evaluation.perplexity import TextSettings, load_text
from coca_lab.export import Cost, export_native
from coca_lab.loading import model_without_weights


@dataclass
class ExportSettings:
    """What is written."""

    context: Annotated[int, Field(ge=1)] | None = None
    """N, the tokens among which the model is to find something: scores of global layers are
    multiplied by ln(N + 1) / ln(L + 1), for L the training length. By default they stay."""
    gguf: bool = False
    """Write NAME.gguf for llama.cpp into the folder, too, for NAME its name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto keeps it."""


@dataclass
class CostSettings(TextSettings):
    """Text on which to measure what a context costs within the training length."""

    source: str = ""
    """Text with the same values as in coca eval perplexity; by default nothing is measured."""
    max_documents: int | None = 20
    """Maximum number of documents."""
    skip_short: bool = True
    """Skip documents shorter than the training length instead of reporting an error."""


def run_export(words: list[str]) -> None:
    """Write a model with layers with roles as Transformers' GraniteSWA, for other engines."""
    path, target, wanted, text = parse(
        "coca export", run_export, words, [ExportSettings, CostSettings], ["model", "target"]
    )
    if text.source and wanted.context is None:
        raise UserError("--source is the text on which the cost of --context is measured")
    documents = []
    if text.source:
        length = training_length(model_without_weights(path).config) or 0
        documents = load_text(text, load_tokenizer(path), at_least=length + 1)
    model, cost = export_native(path, target, **vars(wanted), documents=documents)
    print(f"{target}: {model.config.model_type}, {model.num_parameters():,} parameters")
    if wanted.context is not None:
        print(_describe(wanted.context, cost))


def _describe(context: int, cost: Cost | None) -> str:
    if cost is None:
        return "what the context costs within the training length was not measured: give --source"
    return (
        f"for {context:,} tokens: perplexity within {cost.length:,} {cost.before:.2f} -> "
        f"{cost.after:.2f} ({cost.after / cost.before - 1:+.1%}, {cost.tokens:,} tokens)"
    )
