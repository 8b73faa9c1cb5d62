"""Benchmarks: wrong results are not timed, ratios are within a round, memory is that of a run."""

import json
import os
import re
import runpy
import time
from pathlib import Path

import pytest
import torch

from coca_attention import ops
from coca_attention.errors import UserError
from coca_attention.ops import FORMS
from coca_lab.cli import main
from coca_lab.report import build_report, printed_tables
from coca_lab.studies import bench
from coca_lab.studies.bench import BenchSettings, check_settings, run_benchmarks
from coca_lab.studies.timing import IsolatedVariant, Variant, interleaved, peak_megabytes

SMALL = {"heads": 4, "head_width": 16, "hidden_size": 32, "layers": 2, "rounds": 3}
CPU = torch.device("cpu")


def settings(**changes):
    return BenchSettings(**{**SMALL, **changes})


@pytest.fixture(scope="module")
def cells():
    cases = ["operator", "operator-training", "training", "prefill"]
    return run_benchmarks(settings(cases=cases, lengths=[32, 48], kv_heads=2))


def test_cells_are_plain_values_of_correct_variants(cells):
    assert json.loads(json.dumps(cells, allow_nan=False)) == cells
    assert [(c["case"], c["length"]) for c in cells[:3]] == [
        ("operator", 32), ("operator", 48), ("operator-training", 32),
    ]  # fmt: skip
    for cell in cells:
        names = list(cell["variants"])
        base = bench.ROTARY if "operator" in cell["case"] else bench.LLAMA
        assert names[: 1 + len(FORMS)] == [base, *(f"CoCA {form}" for form in FORMS)]
        assert (bench.CONTRACTION in names) == ("operator" in cell["case"])
        for measured in cell["variants"].values():
            assert measured["rounds"] == 3 and measured["error"] < 1e-4
            low, high = measured["quartiles_ms"]
            assert 0 < low <= measured["median_ms"] <= high
        assert cell["variants"][base]["ratio_quartiles"] == [1.0, 1.0]


def test_models_with_roles_take_the_place_of_forms_in_every_layer():
    (cell,) = run_benchmarks(settings(cases=["prefill"], lengths=[32], roles="lg", window=4))
    assert list(cell["variants"]) == ["Llama", *(f"lg, local {x}" for x in ("rotary", *FORMS))]
    assert (cell["sizes"]["roles"], cell["sizes"]["window"]) == ("lg", 4)
    model = bench.make_model_with_roles(settings(roles="lg", window=4, layers=3), "rotary")
    assert [kind[0] for kind in model.config.layer_types] == ["s", "f", "s"]
    for change in ({"roles": "lx", "window": 4}, {"roles": "lg"}):
        with pytest.raises(
            UserError, match="roles must consist of the letters l and g, and requires"
        ):
            check_settings(settings(**change))


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = bench.coca

    def wrong(*arguments, **options):
        return right(*arguments, **options) * (1.01 if options["form"] == "strict" else 1)

    monkeypatch.setattr(bench, "coca", wrong)
    for case in ("operator", "operator-training"):
        with pytest.raises(UserError, match=r"CoCA strict is off by 0\.01"):
            run_benchmarks(settings(cases=[case], lengths=[32]))


def test_the_contraction_is_left_out_of_long_texts():
    names = [bench.operators(length, settings(longest_contraction=32)) for length in (32, 64)]
    assert [bench.CONTRACTION in each for each in names] == [True, False]


def test_times_and_ratios_of_a_round():
    order = []
    slow = iter([9.0, 0.2, 0.4, 0.6])  # the first warms up

    def first() -> float:
        order.append("a")
        return next(slow)

    def second() -> None:
        order.append("b")
        time.sleep(0.02)

    found = interleaved([Variant("a", first), Variant("b", second)], CPU, rounds=3, seconds=60)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found["a"]["median_ms"] == pytest.approx(400) and found["a"]["ratio"] == 1
    assert found["a"]["quartiles_ms"] == pytest.approx([300, 500])
    assert found["b"]["median_ms"] >= 20
    low, high = found["b"]["ratio_quartiles"]
    assert low <= found["b"]["ratio"] <= high and found["b"]["ratio"] > 0.02 / 0.6


@pytest.mark.parametrize(("rounds", "seconds"), [(100, 0), (1, 60)])
def test_three_rounds_always_run(rounds, seconds):
    run = Variant("a", lambda: 1.0)
    assert interleaved([run], CPU, rounds=rounds, seconds=seconds)["a"]["rounds"] == 3


def variant_for_another_process(fails: bool) -> Variant:
    if fails:
        raise UserError("it cannot be made")
    return Variant("far", lambda: time.sleep(0.05), 0.5, {"number": 3.0})


def test_a_variant_in_a_process_of_its_own():
    variant = IsolatedVariant(variant_for_another_process, False)
    assert (variant.name, variant.error, variant.facts) == ("far", 0.5, {"number": 3.0})
    assert 0.05 <= variant.run() < 5
    variant.close()
    assert variant.process.exitcode == 0
    with pytest.raises(UserError, match="it cannot be made"):
        IsolatedVariant(variant_for_another_process, True)


def variant_that_dies() -> Variant:
    os._exit(7)


def test_a_process_that_dies_is_an_error():
    with pytest.raises(UserError, match=r"ended unexpectedly \(exit code 7\)"):
        IsolatedVariant(variant_that_dies)


def test_peak_memory_of_the_contraction_and_of_the_operator():
    """At 2,048 tokens the scores of 4 heads alone take 67 MB; everything else is small."""
    chosen = settings()
    matrix, ours = (
        peak_megabytes(bench.single_forward, name, 2048, chosen, device="cpu")
        for name in (bench.CONTRACTION, "CoCA slack")
    )
    assert matrix > 67 and ours < 20


@pytest.mark.parametrize("kind", ["full", "half"])
def test_decoding_restores_the_cache(kind, monkeypatch):
    caches = []
    random_cache = bench.random_cache

    def recorded(*arguments):
        caches.append(random_cache(*arguments))
        return caches[-1]

    monkeypatch.setattr(bench, "random_cache", recorded)
    variant = bench.decoder("A", "slack", kind, 40, settings())
    for _ in range(2):
        variant.run()
        assert caches[0].get_seq_length() == 40
    full = 2 * 2 * 40 * 32 * 4 / 1e6
    share = 0.75 if kind == "half" else 1.0
    assert variant.facts == {"cache_megabytes": pytest.approx(share * full)}
    assert variant.error is not None and variant.error < 1e-4


def test_one_query_over_a_cache_is_checked_too(monkeypatch):
    case = settings(cases=["operator-decode"], lengths=[50], kv_heads=2)
    (cell,) = run_benchmarks(case)
    halves = [f"half keys, CoCA {form}" for form in FORMS]
    assert list(cell["variants"]) == [bench.ROTARY, *halves, bench.COPY]
    errors = [measured["error"] for measured in cell["variants"].values()]
    assert max(errors[:-1]) < 1e-5 and errors[-1] is None
    monkeypatch.setattr(ops, "query_map", lambda query, *_, **__: query)
    with pytest.raises(UserError, match="half keys, CoCA slack is off by"):
        run_benchmarks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode", "decode-compiled"])
def test_decoding_is_timed_in_separate_processes(case):
    (cell,) = run_benchmarks(settings(cases=[case], lengths=[64]))
    assert list(cell["variants"])[:3] == [
        "Llama",
        "CoCA slack, full cache",
        "CoCA slack, half cache",
    ]
    assert len(cell["variants"]) == 1 + 2 * len(FORMS)
    sizes = [measured["cache_megabytes"] for measured in cell["variants"].values()]
    assert sizes[2] == pytest.approx(0.75 * sizes[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": ["speed"]}, "unknown cases .*'speed'.*choose from .*operator"),
        ({"lengths": [2]}, "lengths must be at least 4"),
        ({"head_width": 7}, "must be even"),
        ({"hidden_size": 40}, "divide hidden_size"),
    ],
)
def test_invalid_settings_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        check_settings(settings(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_check_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "gpu_check.py"))
    assert script["main"]() == 2
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_an_error():
    with pytest.raises(UserError, match="no CUDA device"):
        check_settings(settings(device="cuda"))


def test_report_and_printed_tables(cells):
    page = build_report([{"results": cells}])
    for text in (
        "Operator, forward:",
        "Figure 6",
        "2 layers of 32",
        "relative to the largest value",
    ):
        assert text in page
    titles = [header[0] for header, _ in printed_tables(cells)]
    assert titles[0] == "operator (4 heads of 16, 2 key/value heads, float32, cpu)"
    assert [title.split()[0] for title in titles] == [
        "operator", "operator-training", "training", "prefill",
    ]  # fmt: skip


def test_ids_of_figures_are_unique_among_sizes_of_one_case(cells):
    other = [{**cell, "sizes": {**cell["sizes"], "kv_heads": 1}} for cell in cells]
    ids = re.findall(r'\bid="([^"]+)"', build_report([{"results": [*cells, *other]}]))
    assert ids and len(ids) == len(set(ids))


def test_the_command(capsys, tmp_path):
    words = ["bench", "--cases", "operator", "--lengths", "32,64", "--heads", "2", "--rounds", "3"]
    words += ["--head-width", "8", "--kv-heads", "1", "--output", str(tmp_path / "b.json")]
    assert main(words) == 0
    assert "CoCA slack" in capsys.readouterr().out
    content = json.loads((tmp_path / "b.json").read_text())
    assert [cell["length"] for cell in content["results"]] == [32, 64]
    assert content["results"][0]["sizes"] == {"heads": 2, "kv_heads": 1, "head_width": 8}
    assert content["environment"]["versions"]["torch"] == torch.__version__
