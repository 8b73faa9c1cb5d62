"""Model cards: the README.md of a model folder, in the format of the Hugging Face Hub."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.utils import cached_file

from coca_attention.errors import install
from coca_attention.models.fields import (
    GLOBAL,
    attention_of,
    free_pairs,
    head_width,
    rope_parameters,
    training_length,
)

TEMPLATE = Path(__file__).with_name("card.md")
CARD = "README.md"
PACKAGE = __name__.partition(".")[0] + "."
SOURCE_CARD = "SOURCE_README.md"
PIPELINES = {
    "CausalLM": "text-generation",
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "ImageTextToText": "image-text-to-text",
}
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# By score form or rotary parameter, where its idea is from (docs/related-work.md).
SOURCES = {
    "magnitude": "[PoPE](https://arxiv.org/abs/2509.10534)",
    "turning_pairs": "[p-RoPE](https://arxiv.org/abs/2410.06205) (with 0 pairs: "
    "[HWFA](https://kexue.fm/archives/9603))",
    "temperature": "[log n scaling](https://kexue.fm/archives/8823)",
    "decay": "[KERPLE](https://arxiv.org/abs/2205.09921)",
    "max_distance": "[ReRoPE](https://github.com/bojone/rerope)",
}


def write_card(
    folder: str | Path,
    config: Any,
    *,
    name: str | None = None,
    source: str | Path | None = None,
    training: dict[str, Any] | None = None,
    perplexity: float | None = None,
    untrained: bool = False,
    report: str = "",
) -> None:
    """Write the card of a model, and carry over card and license of the model that it is made from.

    Args:
        folder: Folder of the model.
        config: Configuration of the model.
        name: Name of the model; default: that of the folder.
        source: Folder or name of the model that it was made from.
        training: What to say about the training, by label.
        perplexity: On the validation blocks of the run.
        untrained: Whether the model was converted and not trained since.
        report: How the limit of distances was chosen, in Markdown.
    """
    folder = Path(folder)
    name, copied, base, data = name or folder.resolve().name, [], None, ModelCardData()
    if source is not None:
        copied = carry_over(source, folder)
        data = _inherited(source, folder)
        base = f"`{Path(source).resolve().name}`"
        if data.base_model == str(source):
            base = f"[{source}](https://huggingface.co/{source})"
    if perplexity is not None:
        data.model_name = name
        data.eval_results = [
            EvalResult(
                task_type="text-generation",
                dataset_type="held-out",
                dataset_name="held-out blocks of the training text",
                metric_type="perplexity",
                metric_value=round(perplexity, 4),
            )
        ]
    card = _card(
        config,
        name,
        data,
        base=base,
        training=list((training or {}).items()),
        results=None if perplexity is None else f"{perplexity:.2f}",
        untrained=untrained,
        report=report,
        source_files=", ".join(f"[{x}]({x})" for x in copied if x not in PROCESSORS),
    )
    card.save(folder / CARD)


def push_card(model: Any, repo_id: str, *, token: Any = None, private: bool | None = None) -> None:
    """Upload a model's card to the Hub unless there is one: that of its folder, or a new one.

    Transformers' own ``push_to_hub`` keeps a card that is there, or else writes a generic one.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if api.file_exists(repo_id, CARD):
        return
    path = Path(str(model.name_or_path or "")) / CARD
    if model.name_or_path and path.is_file():
        content = path.read_text(encoding="utf-8")
    else:
        model.config.architectures = [type(model).__name__]  # as saving does
        content = str(_card(model.config, repo_id, ModelCardData()))
    api.upload_file(
        path_or_fileobj=content.encode(),
        path_in_repo=CARD,
        repo_id=repo_id,
        commit_message="Model card",
    )


def _card(config: Any, name: str, data: ModelCardData, **about: Any) -> ModelCard:
    decoder = config.get_text_config()
    ours, composite = type(decoder).__module__.startswith(PACKAGE), decoder is not config
    head = (config.architectures or ["ForCausalLM"])[0].rpartition("For")[2]
    if composite and head == "ConditionalGeneration":
        head = "ImageTextToText"
    data.library_name = "transformers"
    data.pipeline_tag = PIPELINES.get(head)
    data.tags = [*(data.tags or []), *(["coca-attention"] if ours else [])]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        type=config.model_type,
        decoder=decoder.model_type,
        composite=composite,
        auto=f"AutoModelFor{head}" if head in PIPELINES else "AutoModel",
        ours=ours,
        collinear=ours and attention_of(decoder) not in ("rope", "alibi"),
        install=install(),
        facts=_facts(decoder),
        **about,
    )


def _facts(config: Any) -> dict[str, Any]:
    """What a decoder's configuration says about attention and positions, by label."""
    rope, form = dict(rope_parameters(config)), attention_of(config)
    sources = [link for name, link in SOURCES.items() if name == form or rope.get(name) is not None]
    kind = rope.pop("rope_type", "default")
    numbers = [f"{n} {x}" for n, x in rope.items() if not isinstance(x, list | dict | None)]
    facts: dict[str, Any] = {"attention": form}
    if hasattr(config, "coca_form"):
        if form != "rope" and free_pairs(config):
            count = f"{free_pairs(config)} of {head_width(config) // 2}"
            facts["free rotary pairs"] = f"{count} in layers that see all"
        facts["cache"] = config.kv_cache
    if rope and form != "alibi":
        facts["rotation"] = ", ".join((kind, *numbers))
    kinds = getattr(config, "layer_types", None)
    if kinds:
        roles = "".join("g" if kind == GLOBAL else "l" for kind in kinds)
        facts["layers"] = f"{roles} (g: sees the whole text, l: a window)"
    if getattr(config, "sliding_window", None):
        facts["window"] = f"{config.sliding_window:,} tokens"
    if length := training_length(config):
        facts["training length"] = f"{length:,} tokens"
    if sources:
        facts["methods"] = ", ".join(sources)
    return facts


def carry_over(source: str | Path, folder: Path) -> list[str]:
    """Copy what a model's folder has beside weights and tokenizer; the names of what there was.

    These are its card, as `SOURCE_CARD`, its licenses, and how its images are prepared.
    """
    optional: dict[str, Any] = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    copied: list[str] = []
    for name in (CARD, *LICENSES, *PROCESSORS):
        path = None
        with suppress(OSError):  # a folder that is gone, or no connection
            path = cached_file(str(source), name, **optional)
        if path is not None:
            copied.append(SOURCE_CARD if name == CARD else name)
            shutil.copyfile(path, folder / copied[-1])
    return copied


def _inherited(source: str | Path, folder: Path) -> ModelCardData:
    """Metadata from the card of the source, which `carry_over` has copied to the folder."""
    theirs: dict[str, Any] = {}
    with suppress(OSError, ValueError, yaml.YAMLError):  # no card, or no readable metadata
        text = (folder / SOURCE_CARD).read_text(encoding="utf-8", errors="replace")
        theirs = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    names = ("license", "license_name", "license_link", "language", "base_model")
    kept = {name: theirs[name] for name in names if name in theirs}
    with suppress(HFValidationError):
        if not Path(source).exists():
            validate_repo_id(str(source))
            kept["base_model"] = str(source)
    return ModelCardData(**kept)
