"""Score forms: how a query is scored against collinear key coefficients.

Legend: P rotary pairs, m a query's position, n a key's, t key coefficients.

In every form the key of a pair is the rotary key of (t_j, 0),

    K'_j = t_j (cos n θ_j, sin n θ_j),

so a form is a query map, linear in cos m θ_j and sin m θ_j:

    slack     (Eq. 10):     Q'_j = (|q|² cos m θ_j, (q_1² - q_0²) cos m θ_j + 2 q_0 q_1 sin m θ_j)
    strict    (Eq. 9, 17):  Q'_j = |q|² (cos m θ_j, sin m θ_j)
    magnitude (cf. PoPE):   Q'_j = |q|  (cos m θ_j, sin m θ_j)

where q = (q_0, q_1) is pair j of the query and Q'_m · K'_n the score. The paper writes the slack
form with the key R_n [t, t]; collecting its terms by cos n θ_j and sin n θ_j gives the query above.
PoPE (arXiv 2509.10534) scores by softplus of single elements and with a learned phase.

The last pairs of a head may be left free (`free_pairs`): they score by the ordinary dot product of
rotated queries and keys, whatever the form.

To add a form, create a `ScoreForm` and register it with `register_form`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ScoreForm:
    """A way to score a query against key coefficients.

    Attributes:
        name: Name in configurations and recipes.
        shift_invariant: Whether scores depend only on m - n.
        query: Computes the effective query: maps (q0, q1, cos, sin) to (..., 2, P). q0 and q1 are
            the members of every pair before rotation, (..., P); cos and sin broadcast to them. Must
            be linear in cos and sin, and differentiable by autograd.
        gradient: Computes the gradients of q0 and q1 from those of the two halves of the result:
            maps (q0, q1, g0, g1, cos, sin) to a pair of (..., P). Default: autograd, which needs
            more memory.
        parameters: Learned parameters: maps each name to a function from (heads, pairs) to the
            initial value (heads, ...). `query` receives them as keyword arguments, with a
            dimension for the positions inserted after that of the heads.
        homogeneous: Whether Q' grows with a power of |q|, so that linear attention, which does not
            depend on the size of Q', may divide q by it.
        kernel: Name of the form in the Triton kernels; None if it has no kernel, so that PyTorch
            operations compute it.
    """

    name: str
    shift_invariant: bool
    query: Callable[..., Tensor]
    gradient: Callable[..., Pair] | None = None
    parameters: dict[str, Callable[[int, int], Tensor]] = field(default_factory=dict)
    homogeneous: bool = False
    kernel: str | None = None

    def initial_parameters(self, heads: int, pairs: int) -> dict[str, Tensor]:
        """What the learned parameters begin with, each (heads, ...)."""
        return {name: make(heads, pairs) for name, make in self.parameters.items()}


@dataclass(frozen=True)
class Pairing:
    """How the elements of a query form pairs, and how those are scored."""

    form: ScoreForm
    interleaved: bool  # see `split_pairs`
    span: int  # rotary width
    free_pairs: int


FORMS: dict[str, ScoreForm] = {}
"""Registered score forms by name."""


def register_form(form: ScoreForm) -> ScoreForm:
    """Register a form under its name and return it.

    Raises:
        ValueError: If another form is registered under that name.
    """
    if FORMS.setdefault(form.name, form) is not form:
        raise ValueError(f"a score form named {form.name!r} is already registered")
    return form


def get_form(form: str | ScoreForm) -> ScoreForm:
    """Look up a form by its name; a `ScoreForm` is returned unchanged.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(form, ScoreForm):
        return form
    if form not in FORMS:
        raise ValueError(f"unknown score form {form!r}; choose one of {', '.join(FORMS)}")
    return FORMS[form]


def check_shift_invariant(form: ScoreForm, what: str) -> None:
    """Raise ValueError if scores, of which ``what`` needs only distances, depend on more."""
    if not form.shift_invariant:
        raise ValueError(
            f"{what} needs scores that depend only on distances; those of form {form.name} depend "
            "on both positions: use a shift-invariant form, such as strict or magnitude"
        )


def check_parameters(form: ScoreForm, given: Mapping[str, Tensor], heads: int) -> None:
    """Raise ValueError unless learned parameters have a form's names and an entry per head."""
    if given.keys() != form.parameters.keys():
        raise ValueError(
            f"the parameters of form {form.name} must be {[*form.parameters]}, got {[*given]}"
        )
    for name, x in given.items():
        shape = tuple(getattr(x, "shape", ()))
        if shape[:1] != (heads,):
            raise ValueError(
                f"parameter {name} of form {form.name} must have shape ({heads}, ...), with an "
                f"entry for each query head; got {shape}"
            )


def _slack_query(q0: Tensor, q1: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The second member is the first one minus 2 q0 (q0 cos - q1 sin).
    squares = (q0 * q0).addcmul_(q1, q1)
    if torch.compiler.is_compiling():
        # Writing into a part would be traced as a choice between two values, in every loop that
        # reads the result: a compiled decoding step then takes 3 to 8 times as long.
        first = squares * cos
        return torch.stack((first, first - 2 * q0 * (q0 * cos - q1 * sin)), dim=-2)
    effective = squares.unsqueeze(-2) * torch.stack((cos, cos), dim=-2)
    effective.select(-2, 1).addcmul_(q0, (q0 * cos).addcmul_(q1, sin, value=-1), value=-2)
    return effective


def _slack_gradient(
    q0: Tensor, q1: Tensor, g0: Tensor, g1: Tensor, cos: Tensor, sin: Tensor
) -> Pair:
    cross = 2 * g1 * sin
    first = torch.addcmul(cross * q1, 2 * cos * (g0 - g1), q0)
    second = torch.addcmul(cross * q0, 2 * cos * (g0 + g1), q1)
    return first, second


def _strict_query(q0: Tensor, q1: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    squares = (q0 * q0).addcmul_(q1, q1)
    return squares.unsqueeze(-2) * torch.stack((cos, sin), dim=-2)


def _strict_gradient(
    q0: Tensor, q1: Tensor, g0: Tensor, g1: Tensor, cos: Tensor, sin: Tensor
) -> Pair:
    along = 2 * torch.addcmul(g0 * cos, g1, sin)
    return along * q0, along * q1


def _magnitude_query(q0: Tensor, q1: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = (q0 * q0).addcmul_(q1, q1).sqrt_()
    return size.unsqueeze(-2) * torch.stack((cos, sin), dim=-2)


def _magnitude_gradient(
    q0: Tensor, q1: Tensor, g0: Tensor, g1: Tensor, cos: Tensor, sin: Tensor
) -> Pair:
    along = torch.addcmul(g0 * cos, g1, sin)
    square = torch.addcmul(q0 * q0, q1, q1)
    # Zero where q is zero. Both branches of `where` must be finite for a finite second derivative.
    along = torch.where(square > 0, along * square.where(square > 0, 1.0).rsqrt(), 0.0)
    return along * q0, along * q1


register_form(ScoreForm("slack", False, _slack_query, _slack_gradient, kernel="slack"))
register_form(
    ScoreForm("strict", True, _strict_query, _strict_gradient, homogeneous=True, kernel="strict")
)
register_form(
    ScoreForm(
        "magnitude",
        True,
        _magnitude_query,
        _magnitude_gradient,
        homogeneous=True,
        kernel="magnitude",
    )
)
