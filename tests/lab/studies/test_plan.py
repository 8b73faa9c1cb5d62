"""What follows from the settings of a reproduction: batches, recipes, the suite."""

import pytest

from coca_attention.errors import UserError
from coca_lab.evaluation.suite import load_suite
from coca_lab.studies.reproduce import (
    Plan,
    ReproduceSettings,
    make_plan,
    reproduce,
    suite_of,
)
from coca_lab.studies.reproduce.plan import share_out
from coca_lab.studies.reproduce.settings import MODELS


def test_batches_follow_from_the_tokens(tmp_path):
    def plan(tokens):
        return make_plan(ReproduceSettings(size="50m", tokens=tokens, output=str(tmp_path)))

    assert plan(2000 * 256 * 512).global_batch_size == 256  # the paper's
    assert plan(2000 * 256 * 512 - 1).global_batch_size == 128
    assert plan(1000).global_batch_size == 8
    recipe = plan(10**9).recipe(ReproduceSettings(size="50m"), "RoFormer")
    assert recipe.steps == 10**9 // (256 * 512)
    assert recipe.training.learning_rate == pytest.approx(7.5e-4)
    assert recipe.training.micro_batch_size == 16  # on a CPU
    # 20 tokens a parameter.
    assert make_plan(ReproduceSettings(size="50m")).tokens == 20 * 54_606_848


def test_processes_that_cannot_share_a_batch(tmp_path):
    def micro_batch(devices, tokens=10**9):
        plan, given = Plan({}, "bfloat16", 1, 1, 1), ReproduceSettings(output=str(tmp_path))
        share_out(plan, given, tokens, devices)
        return plan.micro_batch_size

    assert micro_batch(4) == 64 and micro_batch(8, 1000) == 1
    for devices, tokens in ((3, 10**9), (6, 10**9), (16, 1000)):
        with pytest.raises(UserError, match=f"to {devices} processes: use a power of two"):
            micro_batch(devices, tokens)


def test_all_models_differ_in_their_attention_alone():
    given = ReproduceSettings()
    plan = Plan({}, "bfloat16", 10**9, 256, 16)
    roformer, *others = (plan.recipe(given, name) for name in MODELS)
    for other in others:
        other.model.attention, other.model.layers = "rope", ""
        assert other == roformer


def test_the_suite_is_the_papers(request):
    paper = request.config.rootpath / "suites" / "paper.yaml"
    expected = load_suite(paper, [])
    made = suite_of(ReproduceSettings(), Plan({}, "bfloat16", 10**9, 256, 16))
    found, known = made.tasks["perplexity"], expected.tasks["perplexity"]
    found.source = known.source
    assert made.tasks == expected.tasks
    assert [(s.kind, s.factor) for s in made.scalings] == [
        (s.kind, s.factor) for s in expected.scalings
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ["Roformer"]}, "did you mean RoFormer"),
        ({"minutes": 1.0, "hours": 1.0}, "say the same"),
        ({"tokens_per_parameter": 0.0}, "must be above 0"),
        ({}, "name the text to tokenise with --text"),
    ],
)
def test_invalid_settings(changes, message, tmp_path):
    given = ReproduceSettings(output=str(tmp_path / "run"), **changes)
    with pytest.raises(UserError, match=message):
        reproduce(given)
    assert not (tmp_path / "run").exists()
