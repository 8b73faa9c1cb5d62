"""The angle analysis: from a model, token ids and settings to plain JSON values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.errors import UserError
from coca_attention.models import training_length
from coca_attention.models.fields import rope_parameters
from coca_attention.ops import get_form
from coca_lab.analysis.capture import VANILLA, LayerHeads, form_of, visit_layers
from coca_lab.analysis.keys import draw_pairs, pairs_by_distance, seen_keys
from coca_lab.analysis.settings import AnalysisSettings, check_settings
from coca_lab.analysis.shift import ScoreShift, part_energies, score_rows, visible_keys
from coca_lab.analysis.summary import AngleSums, DecaySums, numbers
from coca_lab.analysis.sums import Sums
from coca_lab.data import SourceSettings, encode_documents

DEFAULT_TOKENS = 2048


def read_token_ids(
    source: SourceSettings, tokenizer: PreTrainedTokenizerBase, settings: AnalysisSettings
) -> list[list[int]]:
    """Token ids of the first documents of a source, skipping those with fewer than two tokens.

    Raises:
        UserError: If a setting is out of range or there is no document.
    """
    check_settings(settings)
    encoded = encode_documents(source.documents(), tokenizer, batch=8)
    long_enough = (ids for _, ids in encoded if len(ids) >= 2)
    found = list(islice(long_enough, settings.max_documents))
    if not found:
        raise UserError(f"{source.source}: no document of at least 2 tokens")
    return found


def analyze(
    model: PreTrainedModel,
    token_ids: Sequence[Sequence[int] | Tensor],
    settings: AnalysisSettings | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
    *,
    name: str = "model",
) -> dict[str, Any]:
    """Angles between queries and keys, anomalous tokens, borders, bounds and shifts.

    docs/analysis.md describes what is measured. Each text is read once, and once more for every
    shift; memory is linear in its length.

    Args:
        model: A causal language model of a supported family or a CoCA model, in evaluation mode.
        token_ids: Documents, each at least 2 token ids.
        settings: What to measure.
        progress: Called with a label, the tokens read so far and the tokens to read.
        name: Name of the model in the result.

    Returns:
        Plain JSON values; None for values that are not finite.

    Raises:
        UserError: If a setting is out of range, a document is too short, the model's family is not
            supported, its activations are not finite, or its rotary angles differ from its
            configuration.
    """
    settings = settings if settings is not None else AnalysisSettings()
    documents, settings = cut_documents(model, token_ids, settings)
    done, total = 0, sum(map(len, documents)) * (1 + len(settings.shifts))

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(f"{name} angles", done, total)

    every = (
        read_document(model, document, index, settings, advance)
        for index, document in enumerate(documents)
    )
    return angle_cell(model, documents, settings, every, name)


def cut_documents(
    model: PreTrainedModel, token_ids: Sequence[Sequence[int] | Tensor], settings: AnalysisSettings
) -> tuple[list[Tensor], AnalysisSettings]:
    """The texts that `analyze` reads, and the settings with every default filled in.

    Raises:
        UserError: If a setting is out of range or a document is too short.
    """
    check_settings(settings)
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
    lengths = sorted(settings.lengths) or [base, 4 * base, 16 * base]
    limit = rope_parameters(config).get("max_distance")
    if limit is not None and max(*lengths, *map(len, documents)) > limit:
        raise UserError(
            f"angles of this model stop growing at {limit:,} tokens (max_distance), which figures "
            "by distance do not follow: read shorter texts (--max-tokens, --lengths), analyze the "
            "model without the limit, or see where attention goes with --passkeys"
        )
    return documents, replace(settings, max_tokens=cut, lengths=lengths)


class TextSums:
    """What some texts contribute to the figures of a model: sums that add up over texts."""

    def __init__(self, settings: AnalysisSettings) -> None:
        self.layers: dict[int, _LayerSums] = {}
        self.predictions = [_Predictions() for _ in settings.shifts]

    def merge(self, other: "TextSums") -> None:
        """Add the sums over other texts."""
        for index, layer in other.layers.items():
            if index in self.layers:
                self.layers[index].merge(layer)
            else:
                self.layers[index] = layer
        for mine, theirs in zip(self.predictions, other.predictions, strict=True):
            mine.merge(theirs)

    def pack(self) -> dict[str, Any]:
        """The sums as JSON values, to the last bit."""
        layers = [{"facts": layer.facts, "sums": layer.pack()} for layer in self.layers.values()]
        return {"layers": layers, "predictions": [change.pack() for change in self.predictions]}


def unpack(content: dict[str, Any], settings: AnalysisSettings) -> TextSums:
    """The sums that `TextSums.pack` gave, under the same settings."""
    sums = TextSums(settings)
    for each in content["layers"]:
        layer = _LayerSums(each["facts"], settings)
        sums.layers[each["facts"]["layer"]] = layer.unpack(each["sums"])
    for change, packed in zip(sums.predictions, content["predictions"], strict=True):
        change.unpack(packed)
    return sums


def read_document(
    model: PreTrainedModel,
    document: Tensor,
    index: int,
    settings: AnalysisSettings,
    advance: Callable[[int], Any],
) -> TextSums:
    """Read one text, and again at shifted positions.

    Args:
        model: As for `analyze`.
        document: Token ids from `cut_documents`, (T,).
        index: Its number, which the samples drawn from it depend on.
        settings: From `cut_documents`.
        advance: Called with the tokens read since its last call.

    Raises:
        UserError: As `analyze`.
    """
    sums = TextSums(settings)
    rng = np.random.default_rng([settings.seed, index])
    length = len(document)
    # The last position has no target.
    sampled = np.sort(rng.choice(length - 1, min(settings.judged, length - 1), replace=False))
    keep = torch.from_numpy(sampled).to(model.device)
    seed = int(rng.integers(2**31))

    def visit(heads: LayerHeads) -> None:
        if heads.theta.any():  # without positions there are no angles
            sums.layers[heads.layer] = layer = _LayerSums(_facts(heads), settings)
            layer.add(heads, settings, np.random.default_rng([seed, heads.layer]))

    rows = document.unsqueeze(0)
    before = visit_layers(model, rows, visit, logits_to_keep=keep).logits[0]
    advance(length)
    targets = document[sampled + 1].to(model.device)
    for shift, change in zip(settings.shifts, sums.predictions, strict=True):
        positions = torch.arange(length, device=model.device).unsqueeze(0) + shift
        with torch.no_grad():
            after = model(
                input_ids=rows.to(model.device),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=keep,
            ).logits[0]
        change.add(before, after, targets)
        advance(length)
    return sums


def angle_cell(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    settings: AnalysisSettings,
    every: Iterable[TextSums],
    name: str,
) -> dict[str, Any]:
    """The result of `analyze`, which describes it.

    Args:
        model: The model; its weights are not needed.
        documents: From `cut_documents`.
        settings: From `cut_documents`.
        every: What `read_document` found in every document, in order.
        name: Name of the model in the result.

    Raises:
        UserError: As `analyze`.
    """
    form = form_of(model)
    config: Any = model.config.get_text_config()
    sums = TextSums(settings)
    for each in every:
        sums.merge(each)
    if not sums.layers:
        raise UserError(f"{name}: no layer has pairs that turn, so there are no angles")
    return {
        "task": "angles",
        "model": name,
        "form": form,
        "training_length": training_length(config),
        "rope_parameters": getattr(config, "rope_parameters", None),
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "longest": max(len(document) for document in documents),
        "settings": asdict(settings),
        "layers": [sums.layers[index].values(settings) for index in sorted(sums.layers)],
        "shifts": [
            {"shift": shift, **change.values()}
            for shift, change in zip(settings.shifts, sums.predictions, strict=True)
        ],
    }


def _is_shift_invariant(form: str) -> bool:
    return form == VANILLA or get_form(form).shift_invariant


def _facts(heads: LayerHeads) -> dict[str, Any]:
    """What the result says about a layer besides its sums."""
    return {
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


class _LayerSums(Sums):
    """All statistics of one layer."""

    FIXED = ("theta", "facts")

    def __init__(self, facts: dict[str, Any], settings: AnalysisSettings) -> None:
        self.facts = facts
        self.theta = torch.tensor(facts["frequencies"], dtype=torch.float64)
        arguments = (self.theta, settings.lengths, facts["window"], settings.bins)
        self.angles = AngleSums(*arguments)
        self.effective = None if _is_shift_invariant(facts["form"]) else AngleSums(*arguments)
        self.decay = DecaySums(self.theta)
        self.shifts = [ScoreShift() for _ in settings.shifts]
        self.energies = torch.zeros(2, dtype=torch.float64)  # of relative and absolute scores

    def add(self, heads: LayerHeads, settings: AnalysisSettings, rng: np.random.Generator) -> None:
        """Add one text."""
        length = heads.query.shape[-2]
        pairs = draw_pairs(length, settings.pairs, heads.window, rng)
        seen = seen_keys(heads, pairs)
        self.angles.add(seen.query, seen.built, pairs.distances)
        if self.effective is not None:
            self.effective.add(seen.query, seen.effective, pairs.distances)
        self.energies += part_energies(heads, pairs)
        pairs = pairs_by_distance(length, settings.pairs_per_distance, heads.window, rng)
        self.decay.add(seen_keys(heads, pairs), pairs.distances)
        if settings.shifts:
            count = min(settings.shift_queries, length - 1)
            queries = torch.from_numpy(1 + rng.choice(length - 1, count, replace=False))
            visible = visible_keys(queries, length, heads.window)
            before = score_rows(heads, queries)
            for shift, change in zip(settings.shifts, self.shifts, strict=True):
                change.add(before, score_rows(heads, queries, shift), visible)

    def merge(self, other: Self) -> None:
        """Add the sums over other texts."""
        if not torch.equal(other.theta, self.theta):
            raise UserError(
                "the rotary angles depend on the text length (rope_type dynamic or longrope): "
                "analyze texts of one length, or of at most the training length"
            )
        super().merge(other)

    def values(self, settings: AnalysisSettings) -> dict[str, Any]:
        """The layer's part of the result."""
        return {
            **self.facts,
            "angles": self.angles.values(),
            "effective_angles": None if self.effective is None else self.effective.values(),
            "decay": self.decay.values(),
            "absolute_share": numbers(self.energies / self.energies.sum())[1],
            "shifts": [
                {
                    "shift": shift,
                    "score_change": numbers([change.score_change])[0],
                    "attention_change": numbers([change.attention_change])[0],
                }
                for shift, change in zip(settings.shifts, self.shifts, strict=True)
            ],
        }


class _Predictions(Sums):
    """Change of the predictions under one shift, accumulated over texts."""

    def __init__(self) -> None:
        self.changed = self.spread = self.before = self.after = self.divergence = 0.0
        self.count = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Compare logits (positions, vocabulary); targets are the next tokens."""
        wide = torch.promote_types(before.dtype, torch.float32)
        before, after = (x.cpu().to(wide) for x in (before, after))
        if not (before.isfinite().all() and after.isfinite().all()):
            raise UserError(
                "the model's logits are not finite; its weights are damaged, or its dtype "
                "overflows (try float32)"
            )
        centred = [x - x.mean(-1, keepdim=True) for x in (before, after)]
        self.changed += float((centred[1] - centred[0]).double().square().sum())
        self.spread += float(centred[0].double().square().sum())
        first, second = (x.log_softmax(-1) for x in (before, after))
        self.divergence += float((first.exp() * (first - second)).double().sum())
        targets = targets.cpu()
        self.before += float(F.nll_loss(first, targets, reduction="sum"))
        self.after += float(F.nll_loss(second, targets, reduction="sum"))
        self.count += len(targets)

    def values(self) -> dict[str, Any]:
        """Means over the sampled positions, in nats per token."""
        change = (self.changed / self.spread) ** 0.5 if self.spread > 0 else None
        return {
            "logit_change": numbers([change])[0],
            "nats": self.before / self.count,
            "nats_shifted": self.after / self.count,
            "divergence": max(self.divergence / self.count, 0.0),
            "judged": self.count,
        }
