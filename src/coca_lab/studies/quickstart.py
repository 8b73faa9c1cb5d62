"""Train short, test long: a few small models, one text and one page of figures."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from coca_attention.errors import UserError, error_prefix
from coca_lab.data import held_out, load_or_train_tokenizer, read_documents
from coca_lab.engine import Progress
from coca_lab.environment import available_cores
from coca_lab.evaluation.perplexity import PerplexitySettings
from coca_lab.evaluation.suite import ScalingSettings, Suite, run_suite
from coca_lab.extensions import import_extensions
from coca_lab.files import read_json, write_json
from coca_lab.report import write_report
from coca_lab.training import Recipe, read_summary, train
from coca_lab.training.data import load_data
from coca_lab.training.recipe import Count, DataRecipe, ModelRecipe, TrainingRecipe

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
    longest: Count = 32
    """Longest window as a multiple of the training length."""
    judged: Count = 4
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
    workers: Count | None = None
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
    for name in MODELS:
        with error_prefix(f"{name}: "):
            _recipe(settings, name).check()
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
    torch.set_num_threads(threads)
    with open(Path(settings.output) / f"{name}.log", "a") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    return _measure(settings, name, lambda *done: _progress.put(done))


def _measure(settings: QuickstartSettings, name: str, advance: Advance) -> Measured:
    output = Path(settings.output)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 20 == 0:
                advance(name, "training", TRAINING_SHARE * state.global_step / state.max_steps)

    def evaluated(_: str, done: int, total: int) -> None:
        share = done / max(total, 1)
        advance(name, "evaluating", TRAINING_SHARE + (1 - TRAINING_SHARE) * share)

    folder = train(_recipe(settings, name), output / name, callbacks=[Steps()])
    suite = _suite(settings, name)
    results = run_suite(suite, output / "evaluation" / name, progress=evaluated)
    advance(name, "finished", 1.0)
    return read_summary(folder), read_json(results)


def _suite(settings: QuickstartSettings, name: str) -> Suite:
    sizes = settings.sizes
    text = PerplexitySettings(
        source=settings.source,
        held_out=HELD_OUT,
        max_tokens=sizes.windows[-1] + sizes.judged * sizes.block_length,
        skip_short=True,
        windows=sizes.windows,
        stride=sizes.block_length,
        attend_last=sizes.block_length,
    )
    scaled = [ScalingSettings("ntk", NTK_FACTOR)] if name in SCALED else []
    return Suite(
        models={name: str(Path(settings.output) / name)},
        scalings=[ScalingSettings(), *scaled],
        tasks={"perplexity": text},
    )


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
