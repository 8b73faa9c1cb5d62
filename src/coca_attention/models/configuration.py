"""Configurations: what their fields say, and those of CoCA models."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coca_attention.errors import UserError, check_whole
from coca_attention.models.frequencies import PARAMETERS, StockRule
from coca_attention.ops import RULES, DistanceMap, Rotation, Rule, ScoreForm, get_form
from coca_attention.ops.checks import check_heads, check_width
from coca_attention.ops.forms import check_shift_invariant
from coca_attention.ops.linear import check_linear
from coca_attention.roles import Roles

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""Transformers' names for layers that see a window, and for layers that see the whole text."""
STATEFUL = "hybrid"
"""Transformers' name for layers whose cache has a state beside keys."""
ROTATION_FIELDS = {
    "turning_pairs" if item.name == "turning" else item.name: item.name
    for item in fields(Rotation)
    if item.name not in ("width", "base", "rule")
}
"""Our additions to ``rope_parameters``, and the fields of a `Rotation` that they are."""
LOCAL_RULE = "local"
"""Our addition to ``rope_parameters``: those of local layers that keep a rule of the original."""
UNSUPPORTED = {
    "alibi": "has biases in place of rotary positions",
    "attn_logit_softcapping": "caps its attention scores",
    "clip_qkv": "clips queries, keys and values",
    "qk_layernorm": "applies layer norms to queries and keys",
    "kv_lora_rank": "computes keys from a latent vector",
    "num_kv_shared_layers": "uses the keys of a layer in others",
}
"""Fields of configurations by which attention does something that a CoCA model's does not."""
ROTARY = "rope"
"""``coca_form`` of models whose pairs are all free: their attention is rotary."""
LETTERS = {"l": LOCAL, "g": GLOBAL}
EXTENSION = "context_extension"
"""Our field of config.json: by what method a model was extended, from which L to which T."""
WITHOUT_POSITIONS = ("cohere2", "afmoe")
"""Model types whose layers with full attention have no positions, which no field says."""
WITHOUT_BESIDE_WINDOWS = ("exaone4", "exaone_moe")
"""Those of which it is so if the model has a window."""


def rope_parameters(config: PreTrainedConfig, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters of a configuration, of one layer type if they differ (Gemma 3)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(value is None or isinstance(value, dict) for value in rope.values()):
        rope = rope.get(layer_type or GLOBAL) or {}
    return rope


def with_global(config: PreTrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of a configuration with others for layers that see the whole text."""
    one_set = rope_parameters(config) is config.rope_parameters
    return rope if one_set else config.rope_parameters | {GLOBAL: rope}


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of every layer: in a family without types but with a window (Mistral), `LOCAL`."""
    kind = LOCAL if own_window(config) else GLOBAL
    return list(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers)


def without_positions(config: PreTrainedConfig) -> list[bool]:
    """Whether each layer has no positions, which families say in different ways."""
    kinds = layer_types(config)
    thetas = getattr(config, "layer_rope_theta", None)  # GraniteSWA
    rotated = getattr(config, "no_rope_layers", None)  # SmolLM3, Llama 4: 1 where there is rotation
    if thetas:
        return [not theta for theta in thetas]
    if rotated:
        return [not each for each in rotated]
    free = (
        config.model_type in WITHOUT_POSITIONS
        or (config.model_type in WITHOUT_BESIDE_WINDOWS and bool(config.sliding_window))
        or (has_own_roles(config) and rope_parameters(config).get("turning_pairs") == 0)
    )
    return [free and kind == GLOBAL for kind in kinds]


def own_window(config: PreTrainedConfig) -> int | None:
    """``sliding_window``, in tokens; None in families that ignore one in their files."""
    known = getattr(type(config), "__dataclass_fields__", vars(config))
    return (config.sliding_window or None) if "sliding_window" in known else None


def window_of(config: PreTrainedConfig, layer_type: str | None = None) -> int | None:
    """Tokens that a query sees in layers of a type, its own included; None for all."""
    kinds = {layer_type} if layer_type else set(layer_types(config))
    return config.sliding_window if kinds == {LOCAL} else None


def free_pairs(config: PreTrainedConfig, layer_type: str | None = None) -> int:
    """Free pairs F of a CoCA model's heads in layers of a type."""
    if config.coca_form == ROTARY:
        return head_width(config) // 2
    given = config.coca_free_pairs
    return given.get(layer_type or GLOBAL, 0) if isinstance(given, dict) else given


def score_form(config: PreTrainedConfig) -> ScoreForm:
    """The form of a CoCA model's collinear pairs: any if it has none."""
    return get_form("strict" if config.coca_form == ROTARY else config.coca_form)


def attention_of(config: PreTrainedConfig) -> str | None:
    """The name of a CoCA model's score form, ``rope``, ``alibi``, or None for any other model."""
    if hasattr(config, "coca_form"):
        return config.coca_form
    if config.model_type == "alibi_gpt_neox" or getattr(config, "alibi", False):
        return "alibi"
    # Another's class may have Llama's fields and an attention of its own.
    is_stock = type(config).__module__.startswith("transformers.")
    return ROTARY if is_stock and getattr(config, "rope_parameters", None) else None


def extension_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What `extend_context` has written: the method, L as ``length`` and T as ``to``.

    None of a model that was not extended. UserError if something of it is missing.
    """
    found = getattr(config, EXTENSION, None)
    if not found:
        return None
    if not isinstance(found, dict) or not {"method", "length", "to"} <= found.keys():
        raise UserError(
            f"{EXTENSION} in config.json must have method, length and to, as extend_context writes "
            f"them; got {found!r}: extend the original model once more"
        )
    for name in ("length", "to"):
        check_whole(f"{name} of {EXTENSION} in config.json", found[name], error=UserError)
    return found


def made_for(config: PreTrainedConfig) -> tuple[int | None, str]:
    """L, the longest text that a model was made to read, in tokens, and what says so.

    Where a rule has extended a model, that is the length with the rule (Llama 3.1: 131,072), not
    `original_length`; where `extend_context` has, the length from which it did. Public
    configurations say it in several ways; where they leave it open, the reason begins with
    "assumed". None if nothing says it.

    Raises:
        UserError: If what `extend_context` writes is incomplete.
    """
    extended = extension_of(config)
    if extended:
        return extended["length"], f"from which {extended['method']} has extended it"
    longest = getattr(config, "max_position_embeddings", None)
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    factor = rope.get("factor") or 1.0
    given = rope.get("original_max_position_embeddings")
    chunks = getattr(config, "dual_chunk_attention_config", None) or {}
    if chunks.get("original_max_position_embeddings"):  # Qwen2.5-1M
        why = "dual_chunk_attention_config; Transformers has no such attention for longer texts"
        return chunks["original_max_position_embeddings"], why
    stated = [
        (value, name)
        for name in ("max_sequence_length", "model_max_length")  # Vicuna, Command R
        if isinstance(value := getattr(config, name, None), int) and value >= (longest or 1)
    ]
    if rope.get("distance_map") and rope.get("temperature"):
        return rope["temperature"], "what its distance map was set for"
    if longest is None:
        return max(stated, default=(given, "original_max_position_embeddings"))
    found = [(longest, "max_position_embeddings")]
    if kind == "linear" and not stated:
        # On the Hub this is the length before scaling (LongAlpaca) or after it (LLaMA-2-7B-32K).
        # No public model was pre-trained on less than 2,048 tokens, so it is the one before if
        # dividing it would say so.
        why = f"assumed: max_position_embeddings, after linear scaling by {factor:g}"
        found = [(longest, why)]
        if longest / factor < 2048 <= longest:
            why = f"assumed: linear scaling by {factor:g} of max_position_embeddings"
            found = [(round(longest * factor), why)]
    elif kind == "yarn":  # vLLM and SGLang count like this, too
        of = given or longest
        found.append((round(factor * of), f"yarn scaling by {factor:g} of {of:,}"))
    elif kind != "default" and given and given != longest:
        found = [(longest, f"with {kind} scaling of {given:,}: max_position_embeddings")]
    return max([*found, *stated], key=lambda pair: pair[0])


def original_length(config: PreTrainedConfig) -> int | None:
    """The length in tokens that a rotary rule scales from; without a rule, that of `made_for`."""
    rope = rope_parameters(config)
    given = rope.get("original_max_position_embeddings")
    if given:
        return given
    length, _ = made_for(config)
    extended = extension_of(config)
    if extended and extended["method"] == "linear":
        return length
    if length is not None and rope.get("rope_type") == "linear":
        return round(length / rope["factor"])
    return length


def check_is_computed(config: PreTrainedConfig) -> None:
    """Raise UserError if Transformers computes another model than was trained."""
    ratio = getattr(config, "rope_condense_ratio", None) or 1
    if ratio != 1:
        raise UserError(
            f"config.json has rope_condense_ratio {ratio}, which Transformers ignores, so what it "
            "loads is another model than was trained: replace the entry by "
            f'"rope_scaling": {{"type": "linear", "factor": {ratio}}}'
        )


def head_width(config: PreTrainedConfig) -> int:
    """Head width D."""
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def unsupported(config: PreTrainedConfig) -> str | None:
    """What a model's attention does and a CoCA model's does not; None if no field says so."""
    set_fields = (name for name in UNSUPPORTED if getattr(config, name, None))
    return next((f"{UNSUPPORTED[name]} ({name})" for name in set_fields), None)


def has_own_roles(config: PreTrainedConfig) -> bool:
    """Whether a CoCA model gives local and global layers masks and rotations of their own."""
    rope = rope_parameters(config)
    if LOCAL not in (getattr(config, "layer_types", None) or ()) or not hasattr(
        config, "coca_form"
    ):
        return False
    if rope is not (config.rope_parameters or {}):  # a set for each layer type
        return False
    # Types that share a set differ by free pairs or our fields; some families have no types.
    differ = isinstance(config.coca_free_pairs, dict) or any(n in rope for n in ROTATION_FIELDS)
    return differ or "layer_types" not in type(config).__dataclass_fields__


def counts_distances(config: PreTrainedConfig) -> bool:
    """Whether scores depend on distances beside the angles: a decay, or a distance map."""
    rope = rope_parameters(config)
    return bool(rope.get("decay")) or rope.get("distance_map") is not None


def keeps_coefficients(config: PreTrainedConfig) -> bool:
    """Whether the cache has something else than keys at their positions: see `Stored`."""
    found = rotation(config).distance_map
    return config.kv_cache == "half" or (found is not None and not found.shares_keys)


def rope_type_of(kind: str) -> str:
    """What ``rope_parameters`` call a rule."""
    return "default" if kind == Rule.kind else kind


def rotation(config: PreTrainedConfig, layer_type: str | None = None) -> Rotation:
    """The rotation described by ``rope_parameters``; ValueError if one is out of range."""
    rope = rope_parameters(config, layer_type)
    local = layer_type == LOCAL and has_own_roles(config)
    if local:  # it never sees far, so our fields and the rule are for global layers
        kept = ("rope_theta", "partial_rotary_factor")
        rope = rope.get(LOCAL_RULE) or {name: rope[name] for name in kept if name in rope}
    rope_type = rope.get("rope_type", "default")
    unknown = sorted(name for name in ("mscale", "mscale_all_dim") if rope.get(name) is not None)
    if unknown and rope_type != "default":
        raise ValueError(
            f"rope_type {rope_type!r} with {' and '.join(unknown)} is not supported; set "
            "attention_factor instead, the factor on cos and sin"
        )
    longest = getattr(config, "max_position_embeddings", None)
    trained = rope.get("original_max_position_embeddings") or longest  # as Transformers reads it
    rules = {rope_type_of(kind): rule for kind, rule in RULES.items()}
    if rope_type in PARAMETERS:
        made = StockRule.of(rope_type, rope, trained, longest)
    elif rope_type in rules:
        made = rules[rope_type].from_parameters(rope, trained)
    else:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported by CoCA models; choose one of "
            f"{', '.join((*rules, *PARAMETERS))}"
        )
    options = {
        name: rope[key] for key, name in ROTATION_FIELDS.items() if rope.get(key) is not None
    }
    if "distance_map" in options:
        options["distance_map"] = _distance_map(options["distance_map"])
    if local:
        found = made
        made = made.for_length(config.sliding_window)
        if made != found and rope_parameters(config, layer_type).get("distance_map") is not None:
            # Up to near tokens nothing is to change, and longrope selects its factors by the text.
            raise ValueError(
                f"a distance map beside layers with windows needs frequencies of one length; got "
                f"{found.kind} scaling"
            )
    return Rotation(
        width=int(head_width(config) * rope.get("partial_rotary_factor", 1.0)),
        base=float(rope.get("rope_theta", 10000.0)),
        rule=made,
        **options,
    )


def _distance_map(given: Any) -> DistanceMap:
    """That of ``rope_parameters``, where tuples are lists; ValueError if something is missing."""
    needed = {"near", "slope", "start"}
    if not isinstance(given, dict) or not needed <= given.keys() <= {*needed, "group", "after"}:
        raise ValueError(
            "distance_map in rope_parameters must have near, slope, start, and may have group and "
            f"after; got {given!r}"
        )
    values: Any = {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}
    return DistanceMap(**values)


def with_distance_map(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """Rotary parameters with a distance map for what older versions saved in its place.

    They had ``max_distance`` W, and ``leak``: f(d) = W + leak (d - W) from W on.
    """
    if rope is None:
        return None
    rope = {key: with_distance_map(x) if isinstance(x, dict) else x for key, x in rope.items()}
    near = rope.pop("max_distance", None)
    slope = rope.pop("leak", None) or 0.0
    if near is not None:
        rope["distance_map"] = asdict(DistanceMap.leaky(near, slope))
    return rope


def transformers_frequencies(
    config: PreTrainedConfig,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, float]:
    """Frequencies (P,), float32, and the factor on cos and sin, for Transformers' table."""
    found = rotation(config, layer_type)
    if found.follows_length:
        found = found.for_length(seq_len or original_length(config) or 1)
    return found.frequencies().to(device, torch.float32), found.rule.magnitude


def add_rope_types() -> None:
    """Add the rope types of all registered rules to Transformers."""
    for rope_type in map(rope_type_of, RULES):
        check = f"_validate_{rope_type}_rope_parameters"
        if not hasattr(PreTrainedConfig, check):
            # Transformers warns about rope types without a check; `rotation` does the checks.
            setattr(CoCAConfig, check, lambda *_, **__: None)
            ROPE_INIT_FUNCTIONS.setdefault(rope_type, transformers_frequencies)


@dataclass(kw_only=True, repr=False)
class CoCAConfig:
    """Fields that CoCA adds to a family's configuration; a mixin placed before the family's class.

    ``max_position_embeddings`` is the training length in tokens; ``rope_parameters`` contains the
    rotary base and scaling, with the additional type ``ntk`` (``factor``, and optionally the
    target ``length`` in tokens).

    Args:
        coca_form: Name of the score form: ``slack`` (the paper's Eq. 10), ``strict`` (Eq. 9),
            ``magnitude``, a registered form, or ``rope``: rotary attention, all pairs are free.
        coca_free_pairs: Number of pairs per head, the last ones, that are scored by ordinary rotary
            attention; a dictionary if it differs between layer types. Not read with ``rope``.
        kv_cache: What is cached besides the values. ``full``: the effective keys, as wide as a
            head; works everywhere. ``half``: the coefficients before rotation, half as wide
            (without free pairs). With a ``distance_map`` whose slope is not 1, or that has groups,
            ``full`` caches keys at their far positions, of collinear pairs the coefficients. The
            cache object then keeps the positions of its tokens beside them.
        coca_linear: Whether attention is linear (see `coca_attention.ops.linear`), in the forms
            strict and magnitude: the cache is then one state per layer, whatever the length, and
            two bytes a token that count them. Masks are (batch, tokens), and a row is one document.
        requires: What config.json says to whoever looks into it because Transformers alone does not
            know the type of the model. Nothing reads it.
    """

    coca_form: str = "slack"
    coca_free_pairs: int | dict[str, int] = 0
    kv_cache: Literal["full", "half"] = "full"
    coca_linear: bool = False
    requires: str = "import coca_attention.models (package coca-attention) before you load this"

    def __post_init__(self: Any, **kwargs: Any) -> None:
        if self.coca_linear and not kwargs.get("layer_types"):
            kwargs["layer_types"] = [STATEFUL] * self.num_hidden_layers
        self.rope_parameters = with_distance_map(self.rope_parameters)
        super().__post_init__(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # Rotary models of older versions have another form, of no pairs.
        if all(free_pairs(self, kind) == head_width(self) // 2 for kind in layer_types(self)):
            self.coca_form = ROTARY

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = getattr(cls, "ignore_keys_at_rope_validation", None) or set()
        cls.ignore_keys_at_rope_validation = {*known, "length", LOCAL_RULE, *ROTATION_FIELDS}

    def validate_architecture(self: Any) -> None:
        """Called by Transformers whenever a configuration is created or loaded."""
        parents = super()
        if hasattr(parents, "validate_architecture"):
            parents.validate_architecture()  # pyright: ignore[reportAttributeAccessIssue]
        if unsupported(self):
            raise ValueError(f"a CoCA model cannot do what this one does: it {unsupported(self)}")
        form = score_form(self)
        width = head_width(self)
        heads = self.num_attention_heads
        check_width(width)
        check_heads(heads, getattr(self, "num_key_value_heads", None) or heads)
        if LOCAL in layer_types(self):
            # A window of one token, the query's, leaves no cache, which Transformers never empties.
            smallest = 1 if self._sees_both_directions else 2
            window = getattr(self, "sliding_window", None)
            check_whole(f"sliding_window of {LOCAL} layers", window, smallest)
        if self.coca_linear:
            self._check_linear()
        for layer_type in sorted(set(layer_types(self))):
            free = free_pairs(self, layer_type)
            turning = rotation(self, layer_type)
            check_whole("coca_free_pairs", free, 0, width // 2)
            if turning.width > width:
                raise ValueError(
                    f"partial_rotary_factor must be at most 1, got {turning.width / width:g}"
                )
            if turning.distance_map is not None and free < width // 2:
                check_shift_invariant(form, "a distance map")
            counts = (turning.temperature, turning.bias, turning.distance_map)
            if self._sees_both_directions and any(x is not None for x in counts):
                raise ValueError(
                    "temperature, decay and distance_map count the tokens before a query, but in "
                    "an encoder a query sees those after it, too: leave them out"
                )

    @property
    def _sees_both_directions(self) -> bool:
        """Whether this is an encoder, or a decoder that is used as one (EmbeddingGemma)."""
        return getattr(self, "use_bidirectional_attention", False)

    def _check_linear(self: Any) -> None:
        if "layer_types" in type(self).__dataclass_fields__ or set(self.layer_types) != {STATEFUL}:
            raise ValueError(
                "coca_linear is for all layers of families without layer types of their own, such "
                f"as Llama; got {type(self).__name__} with layer_types {self.layer_types}"
            )
        if self.kv_cache == "half" or free_pairs(self):
            raise ValueError(
                "linear attention has no cache of keys and no free pairs: leave out kv_cache and "
                "coca_free_pairs"
            )
        if own_window(self):
            raise ValueError(
                "linear attention sees the whole text: set sliding_window=None; got "
                f"{self.sliding_window}"
            )
        check_linear(score_form(self), rotation(self))

    def validate_rope(self: Any) -> None:
        """Transformers' checks of ``rope_parameters``; `rotation` checks our own rules."""
        add_rope_types()
        super().validate_rope()  # pyright: ignore[reportAttributeAccessIssue]


def role_fields(roles: Roles, form: str, config: PreTrainedConfig, length: int) -> dict[str, Any]:
    """Fields by which the CoCA configuration of a model with roles differs from its vanilla one.

    The form is that of the local layers, or ``rope``; the length is L. UserError if the model has
    too few layers, or rotary parameters per layer type.
    """
    num_layers = config.num_hidden_layers
    rope = rope_parameters(config)
    if rope is not (config.rope_parameters or {}):
        raise UserError(
            f"roles need one set of rotary parameters; {config.model_type} has rotary parameters "
            "per layer type"
        )
    if num_layers < len(roles.layers):
        raise UserError(
            f"layers {roles.layers} needs a model of at least {len(roles.layers)} layers, got "
            f"{num_layers}: use a shorter pattern"
        )
    pairs = head_width(config) // 2
    changed = {
        "coca_form": form,
        "coca_free_pairs": {LOCAL: pairs if form == ROTARY else 0, GLOBAL: pairs},
        "layer_types": [LETTERS[x] for x in (roles.layers * num_layers)[:num_layers]],
        # Some families apply a window in all layers if there is one.
        "sliding_window": (roles.window or max(2, length // 8)) if "l" in roles.layers else None,
        "rope_parameters": rope | roles.rotation_fields(length),
    }
    if hasattr(config, "use_sliding_window"):
        changed["use_sliding_window"] = True  # or Qwen drops its window
    return changed
