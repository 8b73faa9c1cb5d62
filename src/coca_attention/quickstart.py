"""Train short, test long: four small models, one text and one page of figures."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coca_attention.data import held_out, load_or_train_tokenizer, read_documents
from coca_attention.environment import describe_environment, write_json
from coca_attention.errors import UserError
from coca_attention.evaluation.perplexity import (
    TextSettings,
    WindowSettings,
    evaluate_perplexity,
    load_text,
    tokens_needed,
)
from coca_attention.evaluation.task import Progress, Session, Subject
from coca_attention.models import load_model
from coca_attention.report import write_report
from coca_attention.training import Recipe, read_summary, train
from coca_attention.training.sections import DataRecipe, ModelRecipe, TrainingRecipe

# The models by their names in the paper, in the order of its tables.
MODELS = {"ALiBi": "alibi", "RoFormer": "rope", "CoCA-Slack": "slack", "CoCA-Strict": "strict"}
NTK_FACTOR = 4.0


@dataclass
class Sizes:
    """Sizes of the models and length of their training."""

    block_length: int = 64
    """Training length in tokens."""
    num_layers: int = 2
    """Decoder layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_heads: int = 2
    """Attention heads."""
    vocab_size: int = 1024
    """Vocabulary size of the tokenizer."""
    steps: int = 2600
    """Optimizer steps of each model."""
    batch_size: int = 16
    """Blocks per step."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    longest: int = 32
    """Longest window as a multiple of the training length."""
    judged: int = 4
    """Blocks scored per test document."""
    seed: int = 0
    """Random seed of the weights, the order of the blocks and the bootstrap."""

    @property
    def windows(self) -> list[int]:
        """Training length times 1, 2, 4 … longest."""
        return [
            self.block_length * 2**power
            for power in range(self.longest.bit_length())
            if 2**power <= self.longest
        ]


@dataclass
class QuickstartSettings:
    """Settings of the quickstart."""

    output: str = "runs/quickstart"
    """Folder for the models, results.json and report.html."""
    source: str = "stdlib"
    """Text to train on: stdlib, files, or hf:NAME, as for coca train."""
    sizes: Sizes = field(default_factory=Sizes)
    """Sizes of the models and length of their training."""


HELD_OUT = 0.1


def quickstart(settings: QuickstartSettings, *, progress: Progress | None = None) -> dict[str, Any]:
    """Train ALiBi, RoFormer and slack and strict CoCA on one text; compare them on long windows.

    Finished models and evaluations in the output folder are reused.

    Args:
        settings: Text, sizes and output folder.
        progress: Called with a label, the tokens scored so far and the tokens to score.

    Returns:
        The content of ``results.json``: results, training summaries, environments.
    """
    output, sizes = Path(settings.output), settings.sizes
    if sizes.longest < 1 or sizes.judged < 1:
        raise UserError(
            f"longest and judged must be at least 1, got {sizes.longest} and {sizes.judged}"
        )
    tokenizer_folder = output / "tokenizer"
    tokenizer = load_or_train_tokenizer(
        tokenizer_folder,
        lambda: (d for d in read_documents(settings.source) if not held_out(d, HELD_OUT)),
        sizes.vocab_size,
    )
    text = TextSettings(
        source=settings.source,
        held_out=HELD_OUT,
        max_tokens=sizes.windows[-1] + sizes.judged * sizes.block_length,
        skip_short=True,
    )
    windows = WindowSettings(
        windows=sizes.windows,
        stride=sizes.block_length,
        attend_last=sizes.block_length,
        seed=sizes.seed,
    )
    measured = {**asdict(text), **asdict(windows), "ntk_factor": NTK_FACTOR}
    documents = None
    results: list[dict[str, Any]] = []
    training: list[dict[str, Any]] = []
    environments: list[dict[str, Any]] = []
    for name, attention in MODELS.items():
        folder = train(_recipe(settings, attention, tokenizer_folder), output / name)
        training.append({"name": name, **read_summary(folder)})
        cells_file = output / "evaluation" / f"{name}.json"
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        measurement = {**measured, "weights": weights}
        found = _finished(cells_file, measurement)
        if found is None:
            if documents is None:
                documents = load_text(text, tokenizer, at_least=tokens_needed(windows))
            subject = Subject(load_model(folder), tokenizer, name)
            session = Session(progress=progress) if progress is not None else Session()
            cells = evaluate_perplexity(subject, documents, windows, session)
            if attention != "alibi":
                plain = replace(windows, attend_last=None)
                scaled = replace(session, scaling="ntk", factor=NTK_FACTOR)
                cells += evaluate_perplexity(subject, documents, plain, scaled)
            found = {
                "measured": measurement,
                "results": cells,
                "environment": describe_environment(),
            }
            write_json(cells_file, found)
        results += found["results"]
        if found["environment"] not in environments:
            environments.append(found["environment"])
    content = {
        "results": results,
        "training": training,
        "environments": environments,
    }
    write_json(output / "results.json", content)
    write_report(
        [output / "results.json"],
        output / "report.html",
        title=f"Trained on {sizes.block_length} tokens, read up to {sizes.windows[-1]:,}",
    )
    return content


def _recipe(settings: QuickstartSettings, attention: Any, tokenizer: Path) -> Recipe:
    sizes = settings.sizes
    return Recipe(
        model=ModelRecipe(
            attention=attention,
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
        ),
        data=DataRecipe(
            source=settings.source,
            held_out=HELD_OUT,
            tokenizer=str(tokenizer),
            vocab_size=sizes.vocab_size,  # so that another size is recognised as another run
            block_length=sizes.block_length,
            cache=str(Path(settings.output) / "cache"),
        ),
        training=TrainingRecipe(
            steps=sizes.steps,
            global_batch_size=sizes.batch_size,
            micro_batch_size=sizes.batch_size,
            learning_rate=sizes.learning_rate,
            warmup_share=0.02,
            precision="float32",  # bfloat16 is slow on processors without support for it
            seed=sizes.seed,
            save_every=max(sizes.steps // 4, 1),
            keep_checkpoints=1,
        ),
    )


def _finished(path: Path, measurement: dict[str, Any]) -> dict[str, Any] | None:
    """The content of an evaluation file if it is of the same measurement, or None."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged; remove the file to evaluate again") from error
    same = isinstance(content, dict) and content.get("measured") == measurement
    return content if same else None
