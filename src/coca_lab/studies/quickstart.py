"""Train short, test long: a few small models, one text and one page of figures."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from coca_attention.errors import UserError, error_prefix
from coca_lab.data import held_out, read_documents
from coca_lab.engine import Engine, Progress
from coca_lab.environment import available_cores, describe_environment, write_json
from coca_lab.evaluation.perplexity import (
    TextSettings,
    WindowSettings,
    evaluate_perplexity,
    load_text,
    tokens_needed,
)
from coca_lab.evaluation.task import Session, Subject
from coca_lab.extensions import import_extensions
from coca_lab.training import Recipe
from coca_lab.training.sections import DataRecipe, ModelRecipe, TrainingRecipe

# Fields of the model's recipe: the models of the paper by their names there, and layers with roles.
MODELS: dict[str, dict[str, Any]] = {
    "ALiBi": {"attention": "alibi"},
    "RoFormer": {"attention": "rope"},
    "CoCA-Slack": {"attention": "slack"},
    "CoCA-Strict": {"attention": "strict"},
    "Roles": {"attention": "rope", "layers": "lg"},
}
NTK_FACTOR = 4.0
# Models that rotary scaling applies to.
SCALED = ("RoFormer", "CoCA-Slack", "CoCA-Strict")


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
    """Random seed of the weights and the order of the blocks."""

    @property
    def windows(self) -> list[int]:
        """Training length times 1, 2, 4 … longest."""
        return [self.block_length * 2**power for power in range(self.longest.bit_length())]


@dataclass
class QuickstartSettings:
    """Settings of the quickstart."""

    output: str = "runs/quickstart"
    """Folder for the models, results.json and report.html."""
    source: str = "stdlib"
    """Text to train on: stdlib, files, or hf:NAME, as for coca train."""
    workers: int | None = None
    """Models that are trained at once, each in a process of its own; by default one per core,
    because tensors of this size gain little from threads."""
    sizes: Sizes = field(default_factory=Sizes)
    """Sizes of the models and length of their training."""


HELD_OUT = 0.1


def quickstart(settings: QuickstartSettings, *, progress: Progress | None = None) -> dict[str, Any]:
    """Train the `MODELS` on one text, and compare their perplexity on long windows.

    Finished models and evaluations in the output folder are reused. With several workers, what
    their processes print is in a log file next to each model.

    Args:
        settings: Text, sizes and output folder.
        progress: Called with a label, and the percentage done of 100.

    Returns:
        The content of ``results.json``: results, training summaries, environments.

    Raises:
        UserError: If a setting is out of range, or a folder has another run.
    """
    output, sizes = Path(settings.output), settings.sizes
    for name in ("longest", "judged", "workers"):
        value = getattr(settings if name == "workers" else sizes, name)
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    for name in MODELS:
        with error_prefix(f"{name}: "):
            _recipe(settings, name).check()

    from coca_lab.data import load_or_train_tokenizer
    from coca_lab.report import write_report
    from coca_lab.training.data import load_data

    workers = min(settings.workers or available_cores(), len(MODELS))
    tokenizer = load_or_train_tokenizer(
        output / "tokenizer",
        lambda: (d for d in read_documents(settings.source) if not held_out(d, HELD_OUT)),
        sizes.vocab_size,
    )
    # So that the processes find the tokens in the cache.
    load_data(_recipe(settings, "RoFormer"), tokenizer)
    shares = dict.fromkeys(MODELS, 0.0)

    def advance(name: str, part: str, share: float) -> None:
        shares[name] = share
        if progress is not None:
            progress(f"{part} {name}", round(100 * sum(shares.values()) / len(shares)), 100)

    if workers == 1:
        measured = {name: _measure(settings, name, advance) for name in MODELS}
    else:
        measured = _measure_in_processes(settings, workers, advance)
    environments: list[dict[str, Any]] = []
    for _, evaluation in measured.values():
        if evaluation["environment"] not in environments:
            environments.append(evaluation["environment"])
    content = {
        "results": [cell for _, found in measured.values() for cell in found["results"]],
        "training": [{"name": name, **summary} for name, (summary, _) in measured.items()],
        "environments": environments,
    }
    write_json(output / "results.json", content)
    write_report(
        [output / "results.json"],
        output / "report.html",
        title=f"Trained on {sizes.block_length} tokens, read up to {sizes.windows[-1]:,}",
    )
    return content


Advance = Callable[[str, str, float], None]
"""Called with a model's name, what is done with it, and the share that is done of its work."""
Measured = tuple[dict[str, Any], dict[str, Any]]
"""Summary of the training, and content of the evaluation file."""
TRAINING_SHARE = 0.8


def _measure_in_processes(
    settings: QuickstartSettings, workers: int, advance: Advance
) -> dict[str, Measured]:
    context = get_context("spawn")
    queue, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(workers, context, _watch_parent, (queue, stop)) as pool:
        jobs = {}
        for number, name in enumerate(MODELS):
            # The last ones share the cores if they are fewer.
            at_once = min(workers, len(MODELS) - number // workers * workers)
            threads = max(1, available_cores() // at_once)
            jobs[name] = pool.submit(_measure_alone, settings, name, threads)
        pending = set(jobs.values())
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                while not queue.empty():
                    advance(*queue.get(timeout=10))  # a killed process may leave half a message
                for job in done:
                    job.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process was killed, perhaps for lack of memory; what it printed is in "
                f"{settings.output}/*.log. Run the same command again to resume, if need be with "
                f"fewer than {workers} --workers"
            ) from error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        return {name: job.result() for name, job in jobs.items()}


_progress: Any = None  # in a process of the pool, the queue that its progress goes to


def _watch_parent(queue: Any, stop: Any) -> None:
    """Start of a process of the pool, which ends when it is told to or the parent is gone.

    When the parent has been killed, nothing more may be written into its folders.
    """
    import_extensions()
    global _progress
    _progress, parent = queue, parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive() and not stop.wait(1.0):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _measure_alone(settings: QuickstartSettings, name: str, threads: int) -> Measured:
    """`_measure` in a process of the pool, whose output goes to a log file."""
    import torch

    torch.set_num_threads(threads)
    with open(Path(settings.output) / f"{name}.log", "a") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    return _measure(settings, name, lambda *done: _progress.put(done))


def _measure(settings: QuickstartSettings, name: str, advance: Advance) -> Measured:
    from transformers import TrainerCallback

    from coca_lab.data import load_tokenizer
    from coca_lab.loading import load_model
    from coca_lab.training import read_summary, train

    output, sizes = Path(settings.output), settings.sizes

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 20 == 0:
                advance(name, "training", TRAINING_SHARE * state.global_step / state.max_steps)

    folder = train(_recipe(settings, name), output / name, callbacks=[Steps()])
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
    )
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    measurement = {
        **asdict(text),
        **asdict(windows),
        "ntk_factor": NTK_FACTOR,
        "weights": weights,
    }
    cells_file = output / "evaluation" / f"{name}.json"
    found = _finished(cells_file, measurement)
    if found is None:
        tokenizer = load_tokenizer(folder)
        documents = load_text(text, tokenizer, at_least=tokens_needed(windows))
        subject = Subject(load_model(folder), tokenizer, name)
        parts = 1 + (name in SCALED)

        def session(part: int, **changes: Any) -> Session:
            def report(_: str, done: int, total: int) -> None:
                share = (part + done / max(total, 1)) / parts
                advance(name, "evaluating", TRAINING_SHARE + (1 - TRAINING_SHARE) * share)

            return Session(engine=Engine(progress=report), **changes)

        cells = evaluate_perplexity(subject, documents, windows, session(0))
        if name in SCALED:
            plain = replace(windows, attend_last=None)
            scaled = session(1, scaling="ntk", factor=NTK_FACTOR)
            cells += evaluate_perplexity(subject, documents, plain, scaled)
        found = {"measured": measurement, "results": cells, "environment": describe_environment()}
        write_json(cells_file, found)
    advance(name, "finished", 1.0)
    return read_summary(folder), found


def _recipe(settings: QuickstartSettings, name: str) -> Recipe:
    output, sizes = Path(settings.output), settings.sizes
    return Recipe(
        model=ModelRecipe(
            **MODELS[name],
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
        ),
        data=DataRecipe(
            source=settings.source,
            held_out=HELD_OUT,
            tokenizer=str(output / "tokenizer"),
            vocab_size=sizes.vocab_size,  # so that another size is recognised as another run
            block_length=sizes.block_length,
            cache=str(output / "cache"),
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
