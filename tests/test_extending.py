"""Everything that can be added from outside, as docs/extending.md adds it, used end to end."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CwmConfig, CwmForCausalLM

import oracle
import runs
from coca_attention import Rotation, coca_attention, convert
from coca_attention.models import set_rotary_scaling
from coca_attention.models.families import FAMILIES
from coca_attention.ops import FORMS, RULES
from coca_attention.testing import assert_consistent, difference, logits, some_tokens
from coca_lab.cli import main
from coca_lab.data.tasks import TRAINED_TASKS
from coca_lab.engine import Engine, Item
from coca_lab.evaluation import TASKS
from coca_lab.processes import Workers
from coca_lab.report import CELLS, REPORTS
from coca_lab.settings.evaluations import TASK_OPTIONS
from coca_lab.training import train
from families import SIZES, assert_reloads, reloaded, vanilla
from operands import normal, operands

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
ADDED = {"phase": FORMS, "slowed": RULES, "repeats": TASKS, "echo": TRAINED_TASKS}


@pytest.fixture(scope="module", autouse=True)
def extensions(tmp_path_factory):
    """The page's own code, imported as a module outside of the package."""
    folder = tmp_path_factory.mktemp("module")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (folder / "extensions.py").write_text("\n\n".join(blocks), encoding="utf-8")
    sys.path.insert(0, str(folder))
    importlib.import_module("extensions")
    assert all(name in table for name, table in ADDED.items())
    yield folder
    for name, table in ADDED.items():
        del table[name]
    del CELLS["repeats"], REPORTS["repeats"], TASK_OPTIONS["repeats"], sys.modules["extensions"]
    FAMILIES.pop()
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def phase(tmp_path_factory, text_folder):
    """A model of the added form after a few steps of training."""
    recipe = runs.recipe(text_folder, model__attention="phase", model__num_layers=2)
    return train(recipe, tmp_path_factory.mktemp("extending") / "run")


def test_the_form_is_the_operator_of_its_equation():
    """Σ_j t_j |q_j|² cos((m - n)θ_j - δ_j), and its gradients, also of the learned phase."""
    q, t, v = operands(queries=9, keys=9, width=8, value_width=8)
    delta = normal(4, 4, seed=1)
    positions = torch.arange(9)
    distance = (positions.unsqueeze(-1) - positions).unsqueeze(-1)
    cosine = (distance * Rotation(8).frequencies() - delta[:, None, None]).cos()  # (H, T, S, P)
    size = q.unflatten(-1, (2, 4)).square().sum(-2)
    scores = torch.einsum("bhmp,bhnp,hmnp->bhmn", size, t.repeat_interleave(2, 1), cosine)
    expected = oracle.attention(scores, v.repeat_interleave(2, 1), scale=8**-0.5)

    def operator(q, t, v, delta):
        return coca_attention(q, t, v, form="phase", parameters={"delta": delta})

    assert (operator(q, t, v, delta) - expected).abs().max() < 1e-12
    leaves = [x.requires_grad_() for x in (q[:1, :, :3], t[:1, :, :3] + 0.1, v[:1, :, :3], delta)]
    assert torch.autograd.gradcheck(operator, leaves, atol=1e-8)
    for wrong, message in (
        ({"dleta": delta}, r"parameters of form phase must be \['delta'\], got \['dleta'\]"),
        ({"delta": delta[:3]}, r"delta of form phase must have shape \(4, ...\), .* got \(3, 4\)"),
        ({"delta": 1.0}, r"must have shape \(4, ...\), .* got \(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            coca_attention(q, t, v, form="phase", parameters=wrong)


def test_the_form_trains_saves_loads_and_generates(phase, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(phase).eval()
    learned = [p for name, p in model.named_parameters() if name.endswith("form_parameters.delta")]
    assert len(learned) == 2 and all(p.abs().max() > 1e-4 for p in learned)  # begun at 0
    ids = some_tokens(model)
    expected = logits(model, ids)
    assert torch.equal(logits(reloaded(model, tmp_path), ids), expected)
    outputs = {}
    for kind in ("full", "half"):
        model.config.kv_cache = kind
        assert_consistent(model.double())
        outputs[kind] = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(outputs["full"], outputs["half"])


@pytest.mark.parametrize("kind", ["phase", "vanilla"])
def test_the_rule_scales_models_that_keep_it(phase, tmp_path, kind):
    model = vanilla("Llama")
    if kind == "phase":
        model = AutoModelForCausalLM.from_pretrained(phase).eval()
        for name, weight in model.named_parameters():
            if "q_proj" in name:
                weight.data.mul_(30.0)  # so few steps leave scores near zero
    ids = some_tokens(model)
    before = logits(model, ids)
    set_rotary_scaling(model, "slowed", divisor=4.0)
    scaled = logits(model, ids)
    assert difference(scaled, before) > 1e-4
    set_rotary_scaling(model, "linear", factor=4.0)  # the same frequencies
    assert torch.equal(logits(model, ids), scaled)
    set_rotary_scaling(model, "slowed", divisor=4.0)
    again = reloaded(model, tmp_path)
    assert again.config.rope_parameters["divisor"] == 4.0
    if kind == "phase":  # Transformers' own Llama takes the rule's frequencies in float32
        assert torch.equal(logits(again, ids), scaled)
    assert difference(logits(again, ids), scaled) < 1e-4
    with pytest.raises(ValueError, match="'slowed' does not take speed; it takes divisor"):
        set_rotary_scaling(model, "slowed", speed=4.0)


def test_the_task_is_a_command_a_section_of_studies_and_of_the_report(
    phase, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COCA_IMPORT", "extensions")
    study = tmp_path / "study.yaml"
    study.write_text(f"models: {{mine: {phase}}}\nrepeats: {{prompt: alpha1, tokens: 4}}\n")
    assert main(["study", str(study), "--output", str(tmp_path)]) == 0
    results = tmp_path / "results.json"
    (cell,) = json.loads(results.read_text())["results"]
    assert main(["eval", "--help"]) == 0 and TASKS["repeats"].summary in capsys.readouterr().out
    words = ["eval", "repeats", str(phase), "--prompt=alpha1", "--tokens=4", "--name=mine"]
    assert main([*words, "--output", str(tmp_path / "alone.json")]) == 0
    (alone,) = json.loads((tmp_path / "alone.json").read_text())["results"]
    assert cell | alone | {"seconds": cell["seconds"]} == cell
    assert (cell["task"], cell["attention"], cell["tokens"]) == ("repeats", "phase", 4)
    assert main(["report", str(results), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Repeated tokens" in page and f"{cell['repeated']:.2f}" in page


def test_the_task_is_trained_on_by_its_share(text_folder, tokenizer):
    settings = {"data__block_length": 33, "training__global_batch_size": 8}
    recipe = runs.recipe(text_folder, data__tasks="{echo: 0.4}", **settings)
    (stage,) = runs.data_of(recipe, tokenizer).stages
    echoes = [block for block in stage if (block["shift_labels"] == -100).any()]
    assert abs(len(echoes) / len(stage) - 0.4) < 0.05
    for block in echoes:  # of 34 tokens, of which the second half repeats the first
        targets = block["shift_labels"]
        assert (targets[:16] == -100).all() and (targets[16:] == block["input_ids"][:17]).all()


def test_the_family_is_converted_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = CwmForCausalLM(CwmConfig(**SIZES)).eval()
    ids = some_tokens(model)
    before = logits(model, ids)
    assert (
        difference(logits(convert(model, "slack", free_pairs=4), ids), before) < 1e-5
    )  # all of them
    assert type(assert_reloads(model, tmp_path)).__name__ == "CoCACwmForCausalLM"


@pytest.mark.slow
def test_processes_of_a_command_know_what_was_added(extensions, monkeypatch):
    """Those of a study."""
    monkeypatch.setenv("PYTHONPATH", str(extensions), prepend=os.pathsep)
    monkeypatch.setenv("COCA_IMPORT", "extensions")
    item = Item(["forms"], forms, [None])
    with Workers(1) as executor:
        assert "phase" in Engine(executor=executor).run([item])[0]


def forms(_):
    return [[*FORMS]]


def test_a_module_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setenv("COCA_IMPORT", "no_such_module")
    assert main(["info"]) == 2
    assert "COCA_IMPORT=no_such_module" in capsys.readouterr().err
