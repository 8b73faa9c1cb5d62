"""The angle analysis: from a model, token ids and settings to plain JSON values."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_attention.models.configuration import rope_parameters
from coca_attention.ops import get_form
from coca_lab.analysis.angles import (
    Findings,
    Sums,
    angle_sums,
    angle_values,
    decay_sums,
    decay_values,
    numbers,
)
from coca_lab.analysis.capture import VANILLA, LayerHeads, form_of, read_text, visit_layers
from coca_lab.analysis.scores import (
    change_values,
    draw_pairs,
    pairs_by_distance,
    part_energies,
    seen_keys,
    shift_sums,
)
from coca_lab.data import SourceSettings
from coca_lab.engine import Engine, Item, Progress
from coca_lab.evaluation.perplexity import load_text
from coca_lab.evaluation.task import Cell, Measurement, MethodSettings, Model, Task
from coca_lab.settings.evaluations import ANALYSIS_OPTIONS, AnalysisSettings, AnalyzeSettings
from coca_lab.settings.sources import TextSettings

DEFAULT_TOKENS = 2048


def read_token_ids(
    source: SourceSettings, tokenizer: PreTrainedTokenizerBase, settings: AnalysisSettings
) -> list[list[int]]:
    """Token ids of the first documents of a source, skipping those with fewer than two tokens.

    Raises:
        UserError: If there is no document.
    """
    text = TextSettings(source.source, source.text_field, source.bad_lines, skip_short=True)
    text.max_documents = settings.max_documents
    return [each.tokens.tolist() for each in load_text(text, tokenizer, at_least=2)]


def analyze(
    model: PreTrainedModel,
    token_ids: Sequence[Sequence[int] | Tensor],
    settings: AnalysisSettings | None = None,
    progress: Progress = lambda line, done, total: None,
    *,
    name: str = "model",
) -> Findings:
    """Angles between queries and keys, anomalous tokens, borders, bounds and shifts.

    docs/analysis.md describes what is measured. Each text is read once, and once more for every
    shift; memory is linear in its length.

    Args:
        model: A causal language model of a supported family or a CoCA model, in evaluation mode.
        token_ids: Documents, each at least 2 token ids.
        settings: What to measure.
        progress: Called with a line of text, the tokens read so far and the tokens to read.
        name: Name of the model in the result.

    Returns:
        Plain JSON values; None for values that are not finite.

    Raises:
        UserError: If a document is too short, the model's family is not supported, its activations
            are not finite, or its rotary angles differ from its configuration.
    """
    alone = Model(model, cast(Any, None), name)  # nothing is left to encode
    items, cells = measure_angles(alone, token_ids, settings or AnalysisSettings())
    return cells(Engine(progress=progress).run(items))[0]


def measure_angles(
    model: Model, token_ids: Sequence[Sequence[int] | Tensor], settings: AnalysisSettings
) -> Measurement:
    """The work of `analyze`, a document an item."""
    documents, settings = cut_documents(model.module, token_ids, settings)

    def work(indices: list[int]) -> list[Sums]:
        module = model.loaded()
        return [read_document(module, documents[index], index, settings) for index in indices]

    def cells(values: list[Sums]) -> list[Cell]:
        return [angle_cell(model, documents, settings, values)]

    items = []
    for index, document in enumerate(documents):
        key = {
            "settings": asdict(settings),
            "document": [index, sha256(document.numpy().tobytes()).hexdigest()],
        }
        cost = len(document) * (1 + len(settings.shifts))
        items.append(Item([key], work, [index], cost, label=f"{model.name} angles"))
    return Measurement(items, cells)


def cut_documents(
    model: PreTrainedModel, token_ids: Sequence[Sequence[int] | Tensor], settings: AnalysisSettings
) -> tuple[list[Tensor], AnalysisSettings]:
    """The texts that `analyze` reads, and the settings with every default filled in."""
    config: Any = model.config.get_text_config()
    trained = training_length(config)
    cut = settings.max_tokens or min(trained or DEFAULT_TOKENS, DEFAULT_TOKENS)
    documents = [
        torch.as_tensor(ids, dtype=torch.long)[:cut] for ids in token_ids[: settings.max_documents]
    ]
    if not documents:
        raise UserError("no documents to analyze")
    for index, document in enumerate(documents):
        if document.dim() != 1 or len(document) < 2:
            raise UserError(
                f"document {index} must be a sequence of at least 2 token ids (max_tokens {cut}), "
                f"got shape {tuple(document.shape)}"
            )
    base = trained or max(len(document) for document in documents)
    lengths = sorted(set(settings.lengths)) or [base, 4 * base, 16 * base]
    found = rope_parameters(config).get("distance_map")
    if found is not None and max(*lengths, *map(len, documents)) > found["near"]:
        raise UserError(
            f"distances of {found['near']:,} tokens and more count as others in this model "
            "(distance_map), which figures by distance do not follow: read shorter texts "
            "(--max-tokens, --lengths), or analyze the model without the map"
        )
    shifts = list(dict.fromkeys(settings.shifts))
    return documents, replace(settings, max_tokens=cut, lengths=lengths, shifts=shifts)


def read_document(
    model: PreTrainedModel, document: Tensor, index: int, settings: AnalysisSettings
) -> Sums:
    """Read one text from `cut_documents`, and again at shifted positions; errors as `analyze`."""
    rng = np.random.default_rng([settings.seed, index])
    length = len(document)
    # The last position has no target.
    sampled = np.sort(rng.choice(length - 1, min(settings.judged, length - 1), replace=False))
    keep = torch.from_numpy(sampled).to(model.device)
    seed = int(rng.integers(2**31))
    layers: Sums = {}

    def visit(heads: LayerHeads) -> None:
        if heads.theta.any():  # without positions there are no angles
            rng = np.random.default_rng([seed, heads.layer])
            facts = {
                "layer": heads.layer,
                "form": heads.form,
                "kind": heads.kind,
                "window": heads.window,
                "heads": heads.query.shape[1],
                "key_value_heads": heads.key.shape[1],
                "head_width": heads.query.shape[-1],
                "pairs": len(heads.theta),
                "frequencies": numbers(heads.theta),
            }
            sums = _layer_sums(heads, settings, rng)
            layers[str(heads.layer)] = {"facts": facts, "sums": sums}

    rows = document.unsqueeze(0)
    before = visit_layers(model, rows, visit, logits_to_keep=keep).logits[0]
    targets, shifts = document[sampled + 1], {}
    for shift in settings.shifts:
        positions = torch.arange(length, device=model.device).unsqueeze(0) + shift
        after = read_text(model, rows, position_ids=positions, logits_to_keep=keep).logits[0]
        shifts[str(shift)] = _prediction_sums(before, after, targets)
    return _plain({"layers": layers, "shifts": shifts})


def angle_cell(
    model: Model, documents: Sequence[Tensor], settings: AnalysisSettings, every: Sequence[Sums]
) -> Cell:
    """The result of `analyze` from what `read_document` made of every document, in order."""
    config: Any = model.module.config.get_text_config()
    layers = every[0]["layers"]
    if not layers:
        raise UserError(f"{model.name}: no layer has pairs that turn, so there are no angles")
    shifts = _added("shifts", [each["shifts"] for each in every])
    return {
        "task": "angles",
        "model": model.name,
        "form": form_of(model.module),
        "training_length": training_length(config),
        "rope_parameters": getattr(config, "rope_parameters", None),
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "longest": max(len(document) for document in documents),
        "settings": asdict(settings),
        "layers": [
            _layer_values([each["layers"][index] for each in every], settings)
            for index in sorted(layers, key=int)
        ],
        "shifts": [{"shift": s, **_prediction_values(shifts[str(s)])} for s in settings.shifts],
    }


def _plain(value: Any) -> Any:
    """Sums with lists in the place of tensors."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def _added(name: str, values: Sequence[Any]) -> Any:
    """Sums of all texts as float64 tensors; of those named largest… the maximum."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _added(key, [each[key] for each in values if key in each]) for key in keys}
    if name.startswith("largest"):
        return max((value for value in values if value is not None), default=None)
    return torch.stack([torch.tensor(value, dtype=torch.float64) for value in values]).sum(0)


def _layer_sums(heads: LayerHeads, settings: AnalysisSettings, rng: np.random.Generator) -> Sums:
    """All statistics of one layer on one text."""
    length = heads.query.shape[-2]
    pairs = draw_pairs(length, settings.pairs, heads.window, rng)
    seen = seen_keys(heads, pairs)
    about = heads.theta, settings.lengths, heads.window, settings.bins
    sums = {"angles": angle_sums(seen.query, seen.built, *about)}
    if heads.form != VANILLA and not get_form(heads.form).shift_invariant:
        sums["effective_angles"] = angle_sums(seen.query, seen.effective, *about)
    energies = part_energies(heads, pairs)
    pairs = pairs_by_distance(length, settings.pairs_per_distance, heads.window, rng)
    sums["decay"] = decay_sums(seen_keys(heads, pairs), pairs.distances, heads.theta)
    count = min(settings.shift_queries, length - 1)
    queries = torch.from_numpy(1 + rng.choice(length - 1, count, replace=False))
    return sums | {"energies": energies, "shifts": shift_sums(heads, queries, settings.shifts)}


def _layer_values(every: Sequence[Sums], settings: AnalysisSettings) -> Findings:
    """The layer's part of the result, from its part of every text."""
    facts = every[0]["facts"]
    if any(each["facts"] != facts for each in every):
        raise UserError(
            "the rotary angles depend on the text length (rope_type dynamic or longrope): "
            "analyze texts of one length, or of at most the training length"
        )
    sums = _added("sums", [each["sums"] for each in every])
    theta = torch.tensor(facts["frequencies"], dtype=torch.float64)
    about = theta, settings.lengths, facts["window"]
    effective = sums.get("effective_angles")
    return {
        **facts,
        "angles": angle_values(sums["angles"], *about),
        "effective_angles": effective and angle_values(effective, *about),
        "decay": decay_values(sums["decay"]),
        "absolute_share": numbers(sums["energies"] / sums["energies"].sum())[1],
        "shifts": [
            {"shift": shift, **change_values(sums["shifts"][str(shift)])}
            for shift in settings.shifts
        ],
    }


def _prediction_sums(before: Tensor, after: Tensor, targets: Tensor) -> Sums:
    """Nats of the next tokens by logits (positions, vocabulary), and by those under a shift."""
    wide = torch.promote_types(before.dtype, torch.float32)
    before, after = (x.cpu().to(wide) for x in (before, after))
    if not (before.isfinite().all() and after.isfinite().all()):
        raise UserError(
            "the model's logits are not finite; its weights are damaged, or its dtype "
            "overflows (try float32)"
        )
    before, after = (F.cross_entropy(x, targets, reduction="sum") for x in (before, after))
    return {"before": before, "after": after, "count": len(targets)}


def _prediction_values(sums: Sums) -> Findings:
    """Means over the sampled positions, in nats per token."""
    count = int(sums["count"])
    before, after = (float(sums[name] / count) for name in ("before", "after"))
    return {"nats": before, "nats_shifted": after, "judged": count}


def _measure(model: Model, settings: AnalyzeSettings, method: MethodSettings) -> list[Measurement]:
    names = AnalysisSettings.__dataclass_fields__
    analysis = AnalysisSettings(**{name: getattr(settings, name) for name in names})
    token_ids = read_token_ids(settings, model.tokenizer, settings)
    return [measure_angles(model, token_ids, analysis)]


ANALYSIS = Task(
    "analyze",
    ANALYSIS_OPTIONS.summary,
    AnalyzeSettings,
    measure=_measure,
    scaled=False,
)
