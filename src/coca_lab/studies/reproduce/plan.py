"""What is decided once, and the recipes and the suite that follow from it."""

import gc
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import AutoModelForCausalLM

from coca_attention.errors import UserError
from coca_lab.evaluation.passkey import PasskeySettings
from coca_lab.evaluation.perplexity import PerplexitySettings
from coca_lab.evaluation.suite import ScalingSettings, Suite
from coca_lab.files import read_json, write_json
from coca_lab.studies.quickstart import SCALED
from coca_lab.studies.reproduce.settings import MODELS, ReproduceSettings
from coca_lab.training import Recipe
from coca_lab.training.model import model_config
from coca_lab.training.recipe import DataRecipe, ModelRecipe, TrainingRecipe

PLAN_FILE = "plan.json"
# Learning rates are those of this width, times this width / the model's (docs/reproduce.md).
WIDTH, RATE = 128, 3e-3
# A budget of tokens makes at least so many steps, if need be of smaller batches than the paper's.
STEPS, BATCH, SMALLEST = 2000, 256, 8


@dataclass
class Plan:
    """What is decided once: the machine may be another one when the run goes on.

    Attributes:
        settings: What the run was started with.
        precision: Of the training and evaluation.
        tokens: Training tokens of every model.
        global_batch_size: Blocks of a step.
        micro_batch_size: Blocks of a process and forward pass.
    """

    settings: dict[str, Any]
    precision: str
    tokens: int
    global_batch_size: int
    micro_batch_size: int

    def recipe(self, settings: ReproduceSettings, name: str) -> Recipe:
        """The recipe of a model: one template for all."""
        shape, folder = settings.shape, settings.text_folder
        steps = max(self.tokens // (self.global_batch_size * shape.block_length), 1)
        tokenizer = str(folder / "tokenizer")
        if not Path(tokenizer).is_dir():
            tokenizer = settings.tokenizer
        text = DataRecipe()
        if tokenizer is not None:  # None before there is any text
            text = replace(text, source=str(folder / "train.npy"), tokenizer=tokenizer)
        return Recipe(
            model=ModelRecipe(
                **MODELS[name],
                hidden_size=shape.hidden_size,
                num_layers=shape.num_layers,
                num_heads=shape.num_heads,
            ),
            data=replace(
                text,
                held_out=0.0,
                vocab_size=shape.vocab_size,
                block_length=shape.block_length,
                passkey_share=settings.passkey_share,
            ),
            training=TrainingRecipe(
                steps=steps,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                learning_rate=settings.learning_rate or RATE * WIDTH / shape.hidden_size,
                warmup_share=0.02,
                precision=self.precision,  # pyright: ignore[reportArgumentType]
                compile=settings.compile,
                seed=settings.seed,
                save_every=500,
                keep_checkpoints=1,
            ),
        )


def load_plan(settings: ReproduceSettings) -> Plan:
    """The plan of the run in the folder, or a new one.

    Raises:
        UserError: If the folder has a run with other settings.
    """
    path, state = settings.folder / PLAN_FILE, PartialState()
    # One process looks, as others may be later and find what it has written.
    found = read_json(path) if state.is_main_process and path.is_file() else None
    found = broadcast_object_list([found])[0] if state.num_processes > 1 else found
    if found is None:
        plan = make_plan(settings)
        if state.is_main_process:
            write_json(path, asdict(plan))
        return plan
    plan = Plan(**found)
    changed = [name for name, value in settings.kept.items() if plan.settings.get(name) != value]
    if changed:
        raise UserError(
            f"{settings.folder} holds a run with another {', '.join(changed)}: choose another "
            "--output"
        )
    return plan


def make_plan(settings: ReproduceSettings) -> Plan:
    """Decide on tokens, batches and the precision."""
    gpu = torch.accelerator.is_available()
    precision = settings.precision or ("bfloat16" if gpu else "float32")
    plan = Plan(settings.kept, precision, 1, BATCH, 1)
    share_out(plan, settings, settings.tokens or _tokens(settings, plan))
    if not gpu:
        # A larger one needs more memory and is no faster.
        plan.micro_batch_size = min(plan.micro_batch_size, 16)
    return plan


def _tokens(settings: ReproduceSettings, plan: Plan) -> int:
    """So many for each parameter of RoFormer."""
    config = model_config(plan.recipe(settings, "RoFormer"), settings.shape.vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return round(settings.tokens_per_parameter * model.num_parameters())


def share_out(plan: Plan, settings: ReproduceSettings, tokens: int, processes: int = 0) -> None:
    """Set tokens and batches: the paper's, halved until there are `STEPS` steps.

    Raises:
        UserError: If the processes cannot share out a batch.
    """
    length, batch = settings.shape.block_length, BATCH
    while batch > SMALLEST and tokens < STEPS * batch * length:
        batch //= 2
    plan.tokens, plan.global_batch_size = tokens, batch
    plan.micro_batch_size = blocks_each(batch, processes)


def blocks_each(batch: int, processes: int = 0) -> int:
    """Blocks of a step for every process; by default, for those of this run."""
    processes = processes or PartialState().num_processes
    if batch % processes:
        raise UserError(
            f"the {batch} blocks of a step cannot be shared out evenly to {processes} processes: "
            f"use a power of two of them, at most {batch}"
        )
    return batch // processes


def halve(plan: Plan) -> None:
    """Halve the batch of a pass, and free the memory of the one that was too large."""
    plan.micro_batch_size //= 2
    gc.collect()  # Trainer and model refer to each other
    torch.cuda.empty_cache()


def suite_of(settings: ReproduceSettings, plan: Plan) -> Suite:
    """The tasks of suites/paper.yaml for the models, at the lengths of the size."""
    shape, lengths = settings.shape, settings.lengths
    scaled = [name for name in settings.models if name in SCALED]
    factors = settings.factors if scaled else []
    return Suite(
        models={name: str(settings.folder / name) for name in settings.models},
        scalings=[
            ScalingSettings(),
            *(ScalingSettings("ntk", factor, scaled) for factor in factors),
        ],
        tasks={
            "perplexity": PerplexitySettings(
                source=str(settings.text_folder / "test.jsonl.xz"),
                max_documents=shape.documents,
                max_tokens=lengths[-1] + 1,
                skip_short=True,
                windows=lengths,
                stride=shape.block_length,
                targets="all",
            ),
            "passkey": PasskeySettings(lengths=lengths, samples=shape.samples, seed=settings.seed),
        },
        dtype=plan.precision,  # pyright: ignore[reportArgumentType]
    )
