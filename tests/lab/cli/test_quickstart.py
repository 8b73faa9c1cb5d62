"""coca quickstart, with small models."""

import json
import shutil

import pytest

from coca_lab.data import held_out, read_documents
from coca_lab.studies.quickstart import HELD_OUT
from commands import run
from conftest import some_text

QUICK = [
    "--sizes.block_length=16", "--sizes.num_layers=2", "--sizes.hidden_size=16",
    "--sizes.num_heads=2", "--sizes.vocab_size=300", "--sizes.steps=6", "--sizes.batch_size=4",
    "--sizes.longest=4", "--sizes.judged=2",
]  # fmt: skip


def test_quickstart_small_then_reused_then_changed(capsys, tmp_path):
    output, texts = tmp_path / "quick", tmp_path / "texts"
    texts.mkdir()
    for index in range(60):
        (texts / f"{index}.txt").write_text(some_text(200, seed=index))
    words = ["quickstart", "--output", output, "--source", texts, *QUICK, "--workers=1"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    content = json.loads((output / "results.json").read_text())
    labels = {(c["model"], c["scaling"]) for c in content["results"]}
    rotary = ("RoFormer", "CoCA-Slack", "CoCA-Strict")
    assert labels == (
        {(m, "none") for m in (*rotary, "ALiBi", "Roles")}
        | {(m, "attend-last") for m in (*rotary, "ALiBi", "Roles")}
        | {(m, "ntk") for m in rotary}
    )
    assert len({c["tokens"] for c in content["results"]}) == 1
    assert [run["name"] for run in content["training"]] == [
        "ALiBi", "RoFormer", "CoCA-Slack", "CoCA-Strict", "Roles",
    ]  # fmt: skip
    assert len({run["tokens"] for run in content["training"]}) == 1
    assert "</html>" in (output / "report.html").read_text()
    assert "CoCA-Strict + NTK (4)" in out

    scored = {d["id"] for c in content["results"] for d in c["documents"]}
    unseen = {d.id for d in read_documents(str(texts)) if held_out(d, HELD_OUT)}
    assert scored and scored <= unseen

    weights = output / "RoFormer" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    shutil.rmtree(output / "evaluation" / "ALiBi")
    code, _, err = run(capsys, *words)
    assert code == 0, err
    assert weights.stat().st_mtime_ns == written
    again = json.loads((output / "results.json").read_text())
    for before, after in zip(content["results"], again["results"], strict=True):
        assert before["nats"] == pytest.approx(after["nats"], rel=1e-6)

    # The same models, other windows: evaluated again.
    code, _, err = run(capsys, *words, "--sizes.judged=3")
    assert code == 0, err
    assert weights.stat().st_mtime_ns == written
    changed = json.loads((output / "results.json").read_text())
    assert changed["results"][0]["tokens"] > content["results"][0]["tokens"]

    (output / "evaluation" / "ALiBi" / "results.json").write_text("{")
    code, _, err = run(capsys, *words)
    assert code == 2 and "is there and no result file" in err
    code, _, err = run(capsys, *words, "--sizes.vocab-size=290")
    assert code == 2 and "another recipe" in err
    code, _, err = run(capsys, *words, "--sizes.longest=0")
    assert code == 2 and "longest: Input should be greater than or equal to 1" in err
    code, _, err = run(capsys, *words, "--sizes.num_layers=1")
    assert code == 2 and "got 'lg' for 1 layers" in err
    code, _, err = run(capsys, *words, "--workers=0")
    assert code == 2 and "workers: Input should be greater than or equal to 1" in err

    # Two at a time, in processes of their own: the same figures.
    words[2] = output = tmp_path / "processes"
    code, _, err = run(capsys, *words[:-1], "--workers=2")
    assert code == 0, err
    parallel = json.loads((output / "results.json").read_text())
    for one, other in zip(content["results"], parallel["results"], strict=True):
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-6)
    assert (output / "ALiBi.log").is_file()
    code, _, err = run(capsys, *words, "--sizes.seed=1")
    assert code == 2 and "another recipe" in err
