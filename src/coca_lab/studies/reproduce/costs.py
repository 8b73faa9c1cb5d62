"""What a reproduction costs, on this machine or on GPUs that are not at hand."""

from dataclasses import dataclass
from typing import Any

from coca_attention.errors import UserError, did_you_mean
from coca_lab.evaluation.perplexity.score import sliding_windows
from coca_lab.studies.reproduce.plan import (
    BATCH,
    MEMORY_SHARE,
    Plan,
    empty_model,
    make_plan,
    share_out,
    suite_of,
    tokens_per_second,
)
from coca_lab.studies.reproduce.settings import MODELS, ReproduceSettings
from coca_lab.training.dry_run import StageCost
from coca_lab.training.throughput import DEVICES, training_flops

# For devices that are not at hand (docs/reproduce.md): the share of the peak FLOP/s; bytes of
# activations per token, layer and channel, and per logit.
ASSUMED_UTILIZATION, ACTIVATION, LOGIT = 0.4, 34, 10


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Attributes:
        name: Of the model.
        parameters: Of the model.
        tokens: To train it on.
        steps: Optimizer steps.
        micro_batch_size: Blocks of a process and forward pass.
        memory: Bytes on every device while it trains.
        training: Seconds of its training.
        evaluation: Seconds of its evaluation.
    """

    name: str
    parameters: int
    tokens: int
    steps: int
    micro_batch_size: int
    memory: float
    training: float
    evaluation: float


def costs_of(settings: ReproduceSettings) -> list[Cost]:
    """What every model costs; nothing is written.

    With ``device``, from the floating-point operations at `ASSUMED_UTILIZATION` of the peak, and
    from the bytes of weights, gradients, AdamW's state and activations. Otherwise from measured
    steps.

    Raises:
        UserError: If the device is not known, or a model does not fit into its memory.
    """
    settings.check()
    if not settings.device:
        measured: dict[str, StageCost] = {}
        plan = make_plan(settings, measured)
        return [
            _cost(settings, plan, name, cost.parameters, cost.peak or 0, tokens_per_second(cost))
            for name, cost in measured.items()
        ]
    if settings.device not in DEVICES:
        raise UserError(
            f"device must be one of {', '.join(DEVICES)}, got "
            f"{settings.device!r}{did_you_mean(settings.device, DEVICES)}"
        )
    peak, memory = DEVICES[settings.device]
    rate = ASSUMED_UTILIZATION * peak * settings.devices
    plan = Plan(settings.kept, "bfloat16", 1, BATCH, 1)
    models = {name: empty_model(settings, plan, name) for name in MODELS}
    length = settings.shape.block_length
    speeds = {name: rate / _training_flops(model, length) for name, model in models.items()}
    slowest = min(speeds[name] for name in settings.models)
    tokens = settings.tokens or round(
        settings.tokens_per_parameter * models["RoFormer"].num_parameters()
        if settings.minutes_per_model is None
        else 60 * settings.minutes_per_model * slowest
    )
    share_out(plan, settings, tokens, settings.devices)
    sizes = {name: models[name].num_parameters() for name in settings.models}

    def needed(parameters: int) -> float:
        # Weights, gradients and two moments in float32; the weights again in bfloat16.
        shape, pass_tokens = settings.shape, plan.micro_batch_size * length
        each = ACTIVATION * shape.hidden_size * shape.num_layers + LOGIT * shape.vocab_size
        return (16 + 2) * parameters + each * pass_tokens

    while needed(max(sizes.values())) > MEMORY_SHARE * memory:
        if plan.micro_batch_size == 1:
            raise UserError(f"size {settings.size} does not fit into a {settings.device}")
        plan.micro_batch_size //= 2
    return [
        _cost(settings, plan, name, sizes[name], needed(sizes[name]), speeds[name])
        for name in settings.models
    ]


def _cost(
    settings: ReproduceSettings, plan: Plan, name: str, parameters: int, memory: float, speed: float
) -> Cost:
    """The cost of a model that trains at so many tokens a second."""
    recipe = plan.recipe(settings, name)
    steps, shape, suite = recipe.steps, settings.shape, suite_of(settings, plan)
    tokens = steps * plan.global_batch_size * shape.block_length
    model = empty_model(settings, plan, name)
    per_second = speed * _training_flops(model, shape.block_length)
    ways = sum(s.models is None or name in s.models for s in suite.scalings)
    evaluation = 0.0
    for length in settings.lengths:
        windows = sliding_windows(settings.lengths[-1] + 1, length, shape.block_length)
        read = shape.documents * sum(window.inputs for window in windows) + shape.samples * length
        evaluation += ways * read * _training_flops(model, length) / 3 / per_second
    return Cost(
        name, parameters, tokens, steps, plan.micro_batch_size, memory, tokens / speed, evaluation
    )


def _training_flops(model: Any, length: int) -> float:
    flops = training_flops(model, length)
    assert flops is not None  # none of MODELS is a mixture of experts
    return flops
