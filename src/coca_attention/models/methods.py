"""Methods by which a model reads longer texts than it was made for, without training: one table.

Legend: L the length in tokens that a model was made for, T the longest text that it is to read.

A method changes one of three things: what a distance counts (a map of distances), how fast rotary
pairs turn (frequencies, with a magnitude), or weights. To add one, write its row, and its name into
`coca_attention.method_names`.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from coca_attention.errors import UserError, check_is_loaded, check_whole, did_you_mean
from coca_attention.method_names import MethodName
from coca_attention.models.configuration import (
    EXTENSION,
    GLOBAL,
    check_is_computed,
    extension_of,
    head_width,
    layer_types,
    made_for,
    rope_parameters,
    without_positions,
)
from coca_attention.models.conversion import convert, forget_gguf
from coca_attention.models.folding import fold_temperature, position_free_queries
from coca_attention.models.frequencies import RULE_DEFAULTS
from coca_attention.models.scaling import (
    check_rotary_modules,
    rotary_modules,
    set_rope_parameters,
)
from coca_attention.ops import NTK, DistanceMap

STOCK = ("Transformers", "vLLM", "SGLang", "llama.cpp")
"""Engines that run the classes of Transformers."""
UNTRIED = ("SGLang", "llama.cpp")
"""Those of them in which nothing extended here has run: their sources have what it takes."""
PACKAGE = ("Transformers with this package",)


class Asked(NamedTuple):
    """What a method is to do."""

    length: int
    """L."""
    to: int
    """T."""
    text: int | None
    """Tokens of the text that is read, where one is; None: the model is for all texts up to T."""
    width: int
    """Elements of a head that are rotated."""
    base: float
    """Base of the rotary frequencies."""


Parameters = Callable[..., dict[str, Any]]
"""From what is asked, and the given options of a method by name, to the entries of
``rope_parameters`` that it sets for layers that see the whole text."""


@dataclass(frozen=True)
class Method:
    """A named change after which a model reads farther.

    Attributes:
        name: Its name in Python, on the command line and in files.
        source: Who had it: author, year, address.
        changes: ``distances``: what a distance counts; this package's attention computes it.
            ``frequencies``: those of rotary pairs, and the magnitude of cos and sin. ``weights``:
            of queries, and with them frequencies of other layers. ``nothing``.
        parameters: See `Parameters`.
        options: Names of its options.
        within: What it promises for texts of up to L tokens: ``exact``, or ``changed``.
        engines: What runs the result.
        shorter: Whether T may be L or less.
        folder: Whether a model can be saved with it.
        left_out: Why ``coca extend --check`` measures it only where it is named; empty: it always
            does.
    """

    name: MethodName
    source: str
    changes: Literal["nothing", "distances", "frequencies", "weights"]
    parameters: Parameters
    options: tuple[str, ...] = ()
    within: Literal["exact", "changed"] = "changed"
    engines: tuple[str, ...] = STOCK
    shorter: bool = False
    folder: bool = True
    left_out: str = ""

    @property
    def compared(self) -> bool:
        """Whether ``coca extend --check`` measures it where no method is named."""
        return self.folder and not self.left_out

    def cost(self, length: int) -> str:
        """What gets worse, of short texts or of answers, for L in tokens; empty if nothing does."""
        if self.within == "exact":
            drift = f"Beyond {length:,} tokens {self.left_out}: answers there get worse."
            return drift if self.left_out else ""
        said = f"Texts of up to {length:,} tokens change, too, and answers to them may get worse"
        if self.changes == "weights":  # of models that take no other method
            return f"{said}."
        kept = " and ".join(row.name for row in ROWS if row.within == "exact" and row.compared)
        return f"{said}; methods {kept} keep them as they are."


def limited(asked: Asked, near: int | None = None) -> dict[str, Any]:
    """Keys beyond W = ``near`` score as if W back, and queries grow with log n beyond L."""
    near = asked.length if near is None else near
    check_whole("`near`, in tokens and at most L,", near, 1, asked.length, error=UserError)
    return {
        "temperature": asked.length,
        "distance_map": asdict(DistanceMap.limited(near)),
    }


def leaky(asked: Asked) -> dict[str, Any]:
    """Beyond L / 2 distances grow so slowly that none reaches L."""
    near = max(1, asked.length // 2)
    slope = (asked.length - near) / (asked.to - near)
    return {"distance_map": asdict(DistanceMap.leaky(near, slope))}


def self_extend(asked: Asked, near: int | None = None) -> dict[str, Any]:
    """`leaky`, rounded: from ``near`` on, by default L / 2, distances count groups of tokens."""
    near = max(1, asked.length // 2) if near is None else near
    check_whole("`near`, in tokens and below L,", near, 1, asked.length - 1, error=UserError)
    # The smallest with which far distances of T tokens stay within L.
    group = math.ceil((asked.to - near) / (asked.length - near))
    return {"distance_map": asdict(DistanceMap.grouped(near, group))}


def shifted(asked: Asked, near: int | None = None, first: int | None = None) -> dict[str, Any]:
    """For queries beyond L, distances from S = ``near`` on count from w = ``first`` on.

    So all stay below L, and queries up to L have their own distances.
    """
    near, first = _shift(asked, near, first)
    return {"distance_map": asdict(DistanceMap.shifted(near, first, after=asked.length))}


def string(
    asked: Asked,
    near: int | None = None,
    first: int | None = None,
    attention_factor: float | None = None,
) -> dict[str, Any]:
    """`shifted` for all queries, with cos and sin times 1 + 0.1 ln 2."""
    near, first = _shift(asked, near, first)
    factor = 1 + 0.1 * math.log(2) if attention_factor is None else attention_factor
    # YaRN by 1 has the frequencies of training, and a factor on cos and sin.
    return {
        "distance_map": asdict(DistanceMap.shifted(near, first)),
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": asked.length,
        "attention_factor": factor,
    }


def _shift(asked: Asked, near: int | None, first: int | None) -> tuple[int, int]:
    """S and w; by default S is halfway between the smallest that T allows and the largest."""
    length = asked.length
    to = asked.to
    if first is None:
        first = max(1, min(128, length // 16))
    check_whole("`first`, in tokens and below L,", first, 0, length - 1, error=UserError)
    # The largest distance, T - 1, becomes T - 1 - S + w.
    smallest = max(to - length + first, first + 1)
    if smallest > length:
        raise UserError(
            f"shifted distances read at most {2 * length - first:,} tokens here, got {to:,}: "
            f"choose `to` {2 * length - first}, or for longer texts leaky, which changes short "
            "ones and finds more, or limited, which keeps perplexity flat"
        )
    if near is None:
        near = (to + first) // 2 if to > length else max(smallest, length // 3)
    check_whole("`near`, in tokens from T - L + w to L,", near, smallest, length, error=UserError)
    return near, first


def ntk(asked: Asked) -> dict[str, Any]:
    """A larger base."""
    base = NTK(factor=asked.to / asked.length).scaled_base(asked.width, asked.base)
    return {"rope_type": "default", "rope_theta": base}


def ntk_text(asked: Asked) -> dict[str, Any]:
    """The base of dynamic NTK for each text and its answer, without a drift in between."""
    reached = max(asked.text or asked.to, asked.length)
    return {"rope_type": "ntk", "factor": asked.to / asked.length, "length": reached}


def rule_of_transformers(rope_type: str, names_length: bool = True) -> Parameters:
    """What sets a rule by T / L, with the parameters of the rule as options.

    Args:
        rope_type: Its name in Transformers.
        names_length: Whether it reads L from a field of its own.
    """

    def parameters(asked: Asked, **options: Any) -> dict[str, Any]:
        # Transformers requires some parameters to save a configuration.
        found = RULE_DEFAULTS.get(rope_type, {}) | {"rope_type": rope_type}
        if names_length:
            found["original_max_position_embeddings"] = asked.length
        given = {name: value for name, value in options.items() if value is not None}
        return found | {"factor": asked.to / asked.length} | given

    return parameters


YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")
ROWS = (
    Method(
        "none",
        source="",
        changes="nothing",
        within="exact",
        parameters=lambda asked: {},
        shorter=True,
        folder=False,
    ),
    Method(
        "shifted",
        source="STRING: An et al., 2024, arXiv 2410.18745; here beyond L alone, without its factor",
        changes="distances",
        within="exact",
        engines=PACKAGE,
        parameters=shifted,
        options=("near", "first"),
    ),
    Method(
        "limited",
        source="ReRoPE: Su, 2023, https://kexue.fm/archives/9708",
        changes="distances",
        within="exact",
        engines=PACKAGE,
        parameters=limited,
        options=("near",),
    ),
    Method(
        "leaky",
        source="Leaky ReRoPE: Su, 2023, https://kexue.fm/archives/9708",
        changes="distances",
        engines=PACKAGE,
        parameters=leaky,
    ),
    Method(  # slow pairs divided by T / L, fast ones kept
        "yarn",
        source="YaRN: Peng et al., 2023, arXiv 2309.00071",
        changes="frequencies",
        parameters=rule_of_transformers("yarn"),
        options=YARN,
    ),
    Method(
        "ntk",
        source="NTK-aware scaling: bloc97, 2023, reddit.com/r/LocalLLaMA",
        changes="frequencies",
        parameters=ntk,
    ),
    Method(  # ln(T + 1) / ln(L + 1) in the queries of layers without positions
        "temperature",
        source="log n scaling: Su, 2021, https://kexue.fm/archives/8823; SWAN, 2025, 2504.08719",
        changes="weights",
        parameters=rule_of_transformers("yarn"),
        options=YARN,
    ),
    Method(  # ntk with the base of the text so far; vLLM reads its name as another function
        "dynamic",
        source="dynamic NTK: emozilla, 2023, reddit.com/r/LocalLLaMA",
        changes="frequencies",
        within="exact",
        engines=STOCK[:1],
        parameters=rule_of_transformers("dynamic", names_length=False),
        left_out="its frequencies change with every token of an answer, and cached keys do not",
    ),
    Method(
        "self_extend",
        source="Self-Extend: Jin et al., 2024, arXiv 2401.01325",
        changes="distances",
        engines=PACKAGE,
        parameters=self_extend,
        options=("near",),
        left_out="leaky with rounded distances",
    ),
    Method(
        "string",
        source="STRING: An et al., 2024, arXiv 2410.18745",
        changes="distances",
        engines=PACKAGE,
        parameters=string,
        options=("near", "first", "attention_factor"),
        shorter=True,
        left_out="shifted for all texts, with a factor",
    ),
    Method(  # positions divided by T / L
        "linear",
        source="position interpolation: kaiokendev, and Chen et al., 2023, arXiv 2306.15595",
        changes="frequencies",
        parameters=rule_of_transformers("linear", names_length=False),
        left_out="stretches fast pairs as well, unlike yarn",
    ),
    Method(  # the ramp of Llama 3.1
        "llama3",
        source="Llama 3.1: Grattafiori et al., 2024, arXiv 2407.21783",
        changes="frequencies",
        parameters=rule_of_transformers("llama3"),
        options=("low_freq_factor", "high_freq_factor"),
        left_out="yarn with another ramp",
    ),
    Method(  # a divisor for every pair, other ones beyond L
        "longrope",
        source="LongRoPE: Ding et al., 2024, arXiv 2402.13753",
        changes="frequencies",
        parameters=rule_of_transformers("longrope"),
        options=("short_factor", "long_factor", "attention_factor"),
        left_out="needs divisors",
    ),
    Method(
        "ntk_text",
        source="dynamic NTK: emozilla, 2023, reddit.com/r/LocalLLaMA",
        changes="frequencies",
        within="exact",
        engines=PACKAGE,
        parameters=ntk_text,
        folder=False,
    ),
)
"""Not had: dual chunk attention (An et al., 2024, arXiv 2402.17463), whose three queries meet one
key."""
METHODS: Mapping[str, Method] = MappingProxyType({row.name: row for row in ROWS})
"""The methods by name."""
REACH = 1.5
"""T / L by default, which every method reaches."""
DEFAULTS: tuple[MethodName, ...] = ("shifted", "limited", "temperature")
"""The methods where none was measured; the first that the model and T take is taken.

Shifted and limited distances cannot make texts of up to L tokens worse. Shifted ones read almost
2 L, and there SmolLM2 finds most with them (results/extend); limited ones read on, and at 16 L no
method without training has a lower perplexity (results/extension). A temperature is for layers with
roles.
"""


def extend_context(
    model: PreTrainedModel,
    method: MethodName | None = None,
    *,
    to: int | None = None,
    length: int | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Let a model read longer texts than it was made for, in place and without training.

    Which method is best depends on the model: ``coca extend MODEL TARGET --check TEXT`` measures
    them. A model whose frequencies or weights are changed stays of its Transformers class, and what
    `save_pretrained` writes loads without this package.

    Args:
        model: A loaded model that was not extended before. It and its configuration are changed in
            place, so a configuration that another model shares has to be copied first. Methods
            that change rotary positions need a supported family, with rotary positions as in
            training.
        method: A row of `METHODS`, which docs/methods.md describes; by default the first of
            `DEFAULTS` that the model takes: ``shifted`` for most up to almost 2 L, ``limited``
            farther.
        to: T, the longest text in tokens that the model is to read; by default 1.5 L.
        length: L, the length in tokens that the model was made for; by default what its
            configuration says.
        **options: Those of the method, such as ``near`` of ``limited``.

    Returns:
        The same model. Its ``max_position_embeddings`` is T; with ``dynamic`` it stays L, from
        which Transformers computes the base.

    Raises:
        UserError: If the method is unknown or not for this model, an option unknown, or a length
            out of range. The model is then unchanged.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from coca_attention.models import extend_context
        >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        >>> config = LlamaConfig(num_attention_heads=4, max_position_embeddings=128, **sizes)
        >>> model = extend_context(LlamaForCausalLM(config), "yarn", to=512)
        >>> model.config.rope_parameters["factor"], model.config.max_position_embeddings
        (4.0, 512)
    """
    check_is_loaded(model)
    if method is None:
        length, to = extended_lengths(model.config, to, length)
        extend_by_default(model, to=to, length=length, **options)
        return model
    saved = [each.name for each in METHODS.values() if each.folder]
    row = method_named(method, saved)
    if not row.folder:
        nothing = row.changes == "nothing"
        why = "changes nothing" if nothing else "depends on the text that is read"
        raise UserError(f"method {method} {why}: no model is saved with it")
    length, to = extended_lengths(model.config, to, length, row)
    restore = _snapshot(model)
    try:
        forget_gguf(model)
        _apply(model, row, length, to, None, options)
        config = model.config.get_text_config()
        setattr(config, EXTENSION, {"method": row.name, "length": length, "to": to})
        try:
            type(config).from_dict(config.to_dict())
        except Exception as error:  # whatever a family checks (Phi-3 takes only longrope)
            raise UserError(
                f"{config.model_type} cannot be saved with {row.name}: {error}"
            ) from error
    except BaseException:
        restore()
        raise
    return model


def extend_by_default(
    model: PreTrainedModel, *, to: int, length: int, **options: Any
) -> dict[MethodName, UserError]:
    """Extend by the first of `DEFAULTS` that the model takes: why those before it are refused."""
    refused = dict[MethodName, UserError]()
    for name in DEFAULTS:
        try:
            extend_context(model, name, to=to, length=length, **options)
        except UserError as error:
            refused[name] = error
        else:
            return refused
    names = dict[str, list[str]]()
    for name, error in refused.items():
        names.setdefault(str(error), []).append(name)
    reasons = "; ".join(f"{' and '.join(names[error])}: {error}" for error in names)
    raise UserError(f"no default method is for this model; {reasons}")


@contextmanager
def applied(
    model: PreTrainedModel,
    method: MethodName,
    *,
    to: int | None = None,
    length: int | None = None,
    text: int | None = None,
    **options: Any,
) -> Iterator[PreTrainedModel]:
    """Within the ``with`` block, the model with a method; afterwards as it was, bit by bit.

    Args:
        model: As for `extend_context`, and so the other arguments.
        method: A row of `METHODS`; ``none`` changes nothing, but what the model remembers of texts
            that are read in the block ends with it.
        to: T.
        length: L.
        text: Tokens of the text that is read, with its answer, for ``ntk_text``.
        **options: Those of the method.

    Raises:
        UserError: As `extend_context`.
    """
    check_is_loaded(model)
    row = method_named(method)
    restore = _snapshot(model)
    try:
        if row.changes == "nothing":
            _check_options(row, options)
        else:
            length, to = extended_lengths(model.config, to, length, row)
            _apply(model, row, length, to, text, options)
        yield model
    finally:
        restore()


def method_named(method: str, offered: Collection[str] = METHODS.keys()) -> Method:
    """The row of a name; UserError with those on offer, and which of them is near, if none."""
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(str(method), offered)
        raise UserError(f"`method` must be one of {', '.join(offered)}, got {method!r}{hint}")
    return METHODS[method]


def extended_lengths(
    config: PreTrainedConfig, to: int | None, length: int | None, method: Method | None = None
) -> tuple[int, int]:
    """L and T with their defaults; a method says whether T may be L or less.

    Raises:
        UserError: If no method is for the model, which has no rotary positions, the configuration
            does not say L, they are out of range, or the model was extended before.
    """
    check_is_computed(config)
    text_config = config.get_text_config()
    is_rotary = bool(getattr(text_config, "rope_parameters", None))
    # Those that change weights are for layers without positions, and may be taken by default.
    may_do_without = method is None or method.changes == "weights"
    if not is_rotary and not (may_do_without and any(without_positions(text_config))):
        raise UserError(
            f"models of type {config.model_type!r} cannot be extended: all methods are for rotary "
            "positions, and this package finds none there; choose a model that has them, such as "
            "a Llama or a Qwen3"
        )
    extended = extension_of(text_config)
    if extended or rope_parameters(text_config).get("distance_map") is not None:
        by = extended["method"] if extended else "limits of distances"
        raise UserError(
            f"the model was extended by {by} already, or one that shares its configuration, and a "
            "second method would act on top of the first: start from the original, the model that "
            "it was made from"
        )
    source = ""
    if length is None:
        length, why = made_for(text_config)
        if length is None:
            raise UserError(f"{config.model_type} does not say how long its training texts were")
        source = f" ({why}; `length` sets another)"
    check_whole("`length`, the tokens that the model was made for,", length, error=UserError)
    shorter = method is not None and method.shorter
    if to is None:
        to = round(REACH * length)
    try:
        check_whole("`to`, the tokens to read,", to, 1 if shorter else length + 1, error=UserError)
    except UserError as error:
        raise UserError(f"{error}: L, the training length, is {length:,}{source}") from error
    return length, to


def _snapshot(model: PreTrainedModel) -> Callable[[], None]:
    """What puts a model back into the state that it has now.

    Modules get back their classes, attributes, submodules, parameters and buffers, and
    configurations their fields. Values of tensors are not copied: a method replaces tensors, and
    does not write into them.
    """
    modules = []
    for module in model.modules():
        attributes = dict(vars(module))
        for name in ("_parameters", "_buffers", "_modules"):
            attributes[name] = copy.copy(attributes[name])
        modules.append((module, type(module), attributes))
    found = [vars(module).get("config") for module in model.modules()]
    found += [model.config, model.config.get_text_config()]
    configs = {id(each): each for each in found if isinstance(each, PreTrainedConfig)}
    fields = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def restore() -> None:
        for module, its_class, attributes in modules:
            module.__class__ = its_class
            vars(module).clear()
            vars(module).update(attributes)
        for config, values in fields:
            vars(config).clear()
            vars(config).update(values)

    return restore


def _apply(
    model: PreTrainedModel,
    method: Method,
    length: int,
    to: int,
    text: int | None,
    options: dict[str, Any],
) -> None:
    """Change a model by a method; UserError if that cannot be done."""
    _check_options(method, options)
    config: PreTrainedConfig = model.config.get_text_config()
    rope = rope_parameters(config)
    asked = Asked(
        length,
        to,
        text,
        width=int(head_width(config) * rope.get("partial_rotary_factor", 1.0)),
        base=float(rope.get("rope_theta") or 10000.0),
    )
    parameters = method.parameters(asked, **options)
    rule = rope.get("rope_type", "default")
    by_text = rule in ("dynamic", "longrope")
    slope = parameters.get("distance_map", {}).get("slope")
    if slope and by_text:
        raise UserError(
            f"method {method.name} needs frequencies that do not depend on the text, and the model "
            f"has {rule} scaling: choose limited"
        )
    if rule != "default" and method.changes != "weights" and "rope_type" in parameters:
        raise UserError(
            f"method {method.name} would replace the {rule} scaling that the model was trained "
            "with: choose limited"
        )
    reached = to
    if method.changes == "distances":
        convert(model, "rope", length=length)
        config = model.config.get_text_config()
        rope = rope_parameters(config)
        rope.pop("temperature", None)  # which conversion to limited distances has set
        rope |= parameters
        if by_text:  # these rules compute from it what they do
            reached = config.max_position_embeddings
    elif method.changes == "frequencies":
        check_rotary_modules(model)
        set_rope_parameters(model, rope | parameters)
        # Transformers computes the base of dynamic from it.
        if parameters["rope_type"] in ("dynamic", "ntk"):
            reached = length
    else:
        queries = position_free_queries(model)
        kinds = zip(layer_types(config), without_positions(config), strict=True)
        if any(kind == GLOBAL and not free for kind, free in kinds):
            several = rope is not config.rope_parameters
            several = several or getattr(config, "layer_rope_theta", None)
            if several or rule != "default" or not rotary_modules(model):
                raise UserError(
                    f"the rotary layers of {config.model_type} that see the whole text cannot be "
                    "scaled: expected one set of rotary parameters without a rule, got "
                    f"{config.rope_parameters}"
                )
            set_rope_parameters(model, rope | parameters)
        fold_temperature(queries, math.log(to + 1) / math.log(length + 1))
    config.max_position_embeddings = reached


def _check_options(method: Method, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in method.options:
            takes = f"; it takes {', '.join(method.options) or 'none'}"
            hint = did_you_mean(name, method.options, takes)
            holders = [each.name for each in METHODS.values() if name in each.options]
            if holders:
                hint = f": {name} is for method {' and '.join(holders)}: leave it out"
            raise UserError(f"method {method.name} has no option `{name}`{hint}")
