"""Runs in the report: validation against the start, one figure of losses per objective."""

import pytest
from result_cells import lines

from coca_lab.report.training import training_sections

STAGES = [{"name": "near", "objective": "attention"}, {"name": "far", "objective": "logits"}]
STEPS = ((0, 300.0), (10, 100.9), (20, 101.5), (30, 101.0), (40, 100.4))


def run(name="converted", **changes):
    return {
        "name": name, "parameters": 12345, "steps": 40, "tokens": 4000, "epochs": 0.5,
        "seconds": None, "stages": STAGES, "start": {"name": "base", "perplexity": 100.0},
        "curve": [
            {"step": 10, "loss": 0.3, "stage": "near"},
            {"step": 20, "loss": 0.2, "stage": "near"},
            {"step": 30, "loss": 0.1, "stage": "far"},
        ],
        "validation": [{"step": step, "perplexity": perplexity} for step, perplexity in STEPS],
        **changes,
    }  # fmt: skip


def test_losses_of_different_objectives_have_separate_figures():
    plain = run("scratch", stages=[], validation=[], curve=[{"step": 1, "loss": 5.0}])
    sections = training_sections([run(), plain])
    titles = ["Training", "Training: logits", "Training: attention", "Runs"]
    assert [s.title for s in sections] == ["Validation perplexity in training", *titles]
    drawn = {s.title: list(lines(s.chart)) for s in sections if s.chart}
    assert "scratch" in drawn["Training"] and "converted" not in drawn["Training"]
    for title in ("Training: logits", "Training: attention"):
        assert "converted" in drawn[title] and "scratch" not in drawn[title]
    assert "base (start)" in drawn["Validation perplexity in training"]
    assert sections[-1].rows[0][1:4] == ["12,345", "40", "4,000"]


@pytest.mark.parametrize(
    ("last", "change", "one", "half"),
    [
        (100.4, "+0.40%", "3,000", "4,000"),  # 101.5 at 2,000 tokens undid what came before
        (100.9, "+0.90%", "3,000", "never"),
        (101.5, "+1.50%", "never", "never"),
        (99.0, "−1.00%", "3,000", "4,000"),
    ],
)
def test_tokens_until_a_model_has_recovered_for_good(last, change, one, half):
    validation = [*run()["validation"][:-1], {"step": 40, "perplexity": last}]
    row = training_sections([run(validation=validation)])[0].rows[0]
    assert row == ["converted", "100.00", "300.00", f"{last:.2f}", change, one, half]


def test_runs_from_scratch_are_compared_with_nothing():
    plain = {k: v for k, v in run().items() if k not in ("start", "stages")}
    section = training_sections([plain])[0]
    assert section.rows[0][1] == "–" and section.rows[0][4:] == ["–", "–", "–"]
    assert section.note == ""
    assert training_sections([]) == []


def test_step_0_does_not_flatten_the_chart_and_stands_in_the_table():
    section = training_sections([run()])[0]
    measured, start = lines(section.chart).values()
    assert list(measured.values()) == [100.9, 101.5, 101.0, 100.4]
    assert list(start.values()) == [100.0, 100.0]
    assert section.rows[0][2] == "300.00"
    assert section.lead == "converted ends at a validation perplexity of 100.40."


def test_what_a_run_recorded_besides_the_loss_is_drawn():
    rates = {"learning_rate": 0.1, "grad_norm": 2.0, "tokens_per_second": 9.0}
    curve = [{"step": step, "loss": 1.0, **rates} for step in (1, 20)]
    titles = [section.title for section in training_sections([run(stages=[], curve=curve)])]
    for measure in ("Learning rate", "Gradient norm", "Throughput"):
        assert f"{measure} in training" in titles
