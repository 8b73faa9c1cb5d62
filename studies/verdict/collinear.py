"""Collinear attention (arXiv 2309.08646) through the public operators, with its parts apart.

    strict     (Eq. 9):  score(m, n) = Σ_j |q_j|² t_j cos((m - n) θ_j) / √D
    magnitude (our own): score(m, n) = Σ_j |q_j|  t_j cos((m - n) θ_j) / √D

The paper has t = relu(T x). ``signed`` leaves the ReLU out: a key is then parallel or antiparallel
to the query, and the cache the same.

    shifted   (our own): score(m, n) = Σ_j |q_j| t_j cos((m - n) θ_j + δ_j) / √D

is the design of this study that should give collinearity its best chance, together with ``signed``
and with free pairs for the slow half of the frequencies:

- A collinear pair costs one number in the cache, an ordinary one two. What it loses is the angle
  between query and key, so it belongs where content needs no angle: in the fast pairs, which turn
  several times within the window and so carry position rather than content. The slow pairs hardly
  turn and are the content channels of a rotary model; they stay free. At 16 numbers of a key, 4
  collinear and 6 free pairs have 12 numbers for slow pairs where rotary attention has 8, and the
  same four pairs' worth of fast frequencies.
- cos((m - n) θ) alone is largest at distance 0. δ, learned for every query head and pair as in PoPE
  (arXiv 2509.10534), begins at 0 and moves that, at no cost in the cache.
- |q| in place of |q|² and signed t halved the cost of the constraint in earlier single runs.

Queries and keys are not normalised: a gain from that would not be collinearity's, and the baseline
would need it too.
"""

import torch
from torch import Tensor, nn

from coca_attention.ops import Rotation, ScoreForm, activate, get_form, key_map, query_map
from studies.verdict.score import Score


def shift(cos: Tensor, sin: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles plus a phase."""
    c = phase.cos()
    s = phase.sin()
    return cos * c - sin * s, sin * c + cos * s


def _shifted(q0: Tensor, q1: Tensor, cos: Tensor, sin: Tensor, *, phase: Tensor) -> Tensor:
    square = torch.addcmul(q0 * q0, q1, q1)
    # The derivative of the root is infinite at 0; where the limit applies, it is 0.
    size = square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()
    return size.unsqueeze(-2) * torch.stack(shift(cos, sin, phase), dim=-2)


SHIFTED = ScoreForm(
    "shifted",
    True,
    _shifted,
    parameters={"phase": lambda heads, pairs: torch.zeros(heads, pairs)},
)
"""|q_j| (cos(m θ_j + δ_j), sin(m θ_j + δ_j)), with δ learned for every head and pair."""


class Collinear(Score):
    """Collinear keys.

    Args:
        heads: H.
        rotation: Positions, of width D.
        form: ``strict``, ``magnitude`` or ``shifted``.
        free_pairs: Pairs, the slowest, that are scored as in rotary attention.
        signed: Whether coefficients may be negative.
    """

    def __init__(
        self,
        heads: int,
        rotation: Rotation,
        form: str = "strict",
        free_pairs: int = 0,
        signed: bool = False,
    ) -> None:
        super().__init__(heads, rotation)
        self.form = SHIFTED if form == SHIFTED.name else get_form(form)
        self.free_pairs = free_pairs
        self.signed = signed
        self.query_width = rotation.width
        pairs = rotation.width // 2
        self.key_width = pairs + free_pairs
        learned = self.form.initial_parameters(heads, pairs - free_pairs)
        self.learned = nn.ParameterDict(learned)

    def forward(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        coefficients = key if self.signed else activate(key, self.query_width // 2)
        effective = query_map(
            query,
            cos,
            sin,
            form=self.form,
            scale=self.query_width**-0.5,
            free_pairs=self.free_pairs,
            parameters=dict(self.learned.items()),
        )
        return effective, key_map(coefficients, cos, sin, free_pairs=self.free_pairs)
