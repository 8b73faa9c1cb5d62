"""Benchmarks: nothing wrong is timed, ratios are of one round, memory is that of one run."""

import importlib.util
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from coca_attention.benchmarks import (
    CASES,
    BenchSettings,
    check_settings,
    operators,
    run_benchmarks,
)
from coca_attention.benchmarks import models as model_cases
from coca_attention.benchmarks.timing import Apart, Variant, interleaved, peak_megabytes
from coca_attention.cli import main
from coca_attention.errors import UserError
from coca_attention.report import build_report, printed_tables

SMALL = {"heads": 4, "head_width": 16, "hidden_size": 32, "layers": 2, "rounds": 3}
CPU = torch.device("cpu")


def settings(**changes):
    return BenchSettings(**{**SMALL, **changes})


@pytest.fixture(scope="module")
def cells():
    cases = ["operator", "operator-training", "training", "prefill"]
    return run_benchmarks(settings(cases=cases, lengths=[32, 48], groups=2))


def test_cells_are_plain_values_of_correct_variants(cells):
    assert json.loads(json.dumps(cells, allow_nan=False)) == cells
    assert [(c["case"], c["length"]) for c in cells[:3]] == [
        ("operator", 32), ("operator", 48), ("operator-training", 32),
    ]  # fmt: skip
    for cell in cells:
        names = list(cell["variants"])
        base = operators.VANILLA if "operator" in cell["case"] else model_cases.VANILLA
        assert names[:4] == [base, "CoCA slack", "CoCA strict", "CoCA linear"]
        assert (operators.CONTRACTION in names) == ("operator" in cell["case"])
        for measured in cell["variants"].values():
            assert measured["rounds"] == 3 and measured["error"] < 1e-4
            low, high = measured["quartiles_ms"]
            assert 0 < low <= measured["median_ms"] <= high
        assert cell["variants"][base]["ratio_quartiles"] == [1.0, 1.0]


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = operators.coca_attention

    def wrong(*arguments, **options):
        return right(*arguments, **options) * (1.01 if options["form"] == "strict" else 1)

    monkeypatch.setattr(operators, "coca_attention", wrong)
    for case in ("operator", "operator-training"):
        with pytest.raises(UserError, match=r"CoCA strict is off by 0\.01"):
            run_benchmarks(settings(cases=[case], lengths=[32]))


def test_the_contraction_is_left_out_where_it_would_not_fit():
    names = operators.functions(64, settings(longest_contraction=32))
    assert operators.CONTRACTION not in names


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


def test_no_round_is_begun_after_the_time_is_up():
    run = Variant("a", lambda: 1.0)
    assert interleaved([run], CPU, rounds=100, seconds=0)["a"]["rounds"] == 3


def variant_for_another_process(fails: bool) -> Variant:
    if fails:
        raise UserError("it cannot be made")
    return Variant("far", lambda: time.sleep(0.05), 0.5, {"number": 3.0})


def test_a_variant_in_a_process_of_its_own():
    apart = Apart(variant_for_another_process, False)
    assert (apart.error, apart.facts) == (0.5, {"number": 3.0})
    assert 0.05 <= apart() < 5
    apart.close()
    assert apart.process.exitcode == 0
    with pytest.raises(UserError, match="it cannot be made"):
        Apart(variant_for_another_process, True)


def variant_that_dies() -> Variant:
    os._exit(7)


def test_a_process_that_dies_is_an_error():
    with pytest.raises(UserError, match=r"ended without a word \(exit code 7\)"):
        Apart(variant_that_dies)


def test_peak_memory_of_the_contraction_and_of_the_operator():
    """At 2,048 tokens the scores of 4 heads alone take 67 MB; everything else is small."""
    chosen = settings()
    matrix, ours = (
        peak_megabytes(operators.one_forward, name, 2048, chosen, device="cpu")
        for name in (operators.CONTRACTION, "CoCA slack")
    )
    assert matrix > 67 and ours < 20


@pytest.mark.parametrize("name", model_cases.DECODED)
def test_decoding_puts_the_cache_back(name):
    chosen = settings()
    form, kind = model_cases.DECODED[name]
    model = model_cases.make_model(chosen, form, kind)
    cache = model_cases.filled(model, 40, chosen)
    step = model_cases._step(model, cache, chosen)
    for _ in range(2):
        step()
        assert cache.get_seq_length() == 40
    whole = 2 * 2 * 40 * 32 * 4 / 1e6
    share = 0.75 if kind == "half" else 1.0
    assert model_cases.cache_megabytes(cache) == pytest.approx(share * whole)
    assert model_cases.decoder(name, 40, chosen).error < 1e-4


def test_one_query_over_a_cache_is_checked_too(monkeypatch):
    case = settings(cases=["operator-decode"], lengths=[50], groups=2)
    (cell,) = run_benchmarks(case)
    halves = [f"half keys, CoCA {form}" for form in ("slack", "strict")]
    assert list(cell["variants"]) == [operators.VANILLA, *halves, operators.COPY]
    errors = [measured["error"] for measured in cell["variants"].values()]
    assert max(errors[:3]) < 1e-5 and errors[3] is None
    monkeypatch.setattr(operators, "query_map", lambda query, *_, **__: query)
    with pytest.raises(UserError, match="half keys, CoCA slack is off by"):
        run_benchmarks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode", "decode-compiled"])
def test_decoding_is_timed_in_processes_of_their_own(case):
    (cell,) = run_benchmarks(settings(cases=[case], lengths=[64]))
    assert list(cell["variants"]) == list(model_cases.DECODED)
    sizes = [measured["cache_megabytes"] for measured in cell["variants"].values()]
    assert sizes[2] == pytest.approx(0.75 * sizes[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": ["speed"]}, "unknown cases .*'speed'.*choose from operator"),
        ({"lengths": [2]}, "lengths must be at least 4"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"head_width": 7}, "must be even"),
        ({"hidden_size": 40}, "divide hidden_size"),
    ],
)
def test_unfit_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_settings(settings(**changes))


def test_the_parts_of_the_gpu_check_are_fit():
    path = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for part in script.PARTS:
        check_settings(BenchSettings(**part))
    assert {case for part in script.PARTS for case in part["cases"]} == {*CASES, "memory"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_said():
    with pytest.raises(UserError, match="no CUDA device"):
        check_settings(settings(device="cuda"))


def test_report_and_printed_tables(cells):
    memory = {**cells[0], "case": "memory", "variants": {"A": {"peak_megabytes": 12.5}}}
    page = build_report([{"results": [*cells, memory]}])
    for text in ("Operator, forward:", "Figure 6", "Table 6", "12 MB", "2 layers of 32"):
        assert text in page
    titles = [header[0] for header, _ in printed_tables(cells)]
    assert titles[0] == "operator (4 heads of 16, 2 key/value heads, float32, cpu)"
    assert len(titles) == 4 and set(CASES) > {title.split()[0] for title in titles}


def test_ids_of_figures_are_unique_among_sizes_of_one_case(cells):
    other = [{**cell, "sizes": {**cell["sizes"], "groups": 1}} for cell in cells]
    ids = re.findall(r'\bid="([^"]+)"', build_report([{"results": [*cells, *other]}]))
    assert ids and len(ids) == len(set(ids))


def test_the_command(capsys, tmp_path):
    words = ["bench", "--cases", "operator", "--lengths", "32,64", "--heads", "2", "--rounds", "3"]
    assert main([*words, "--head-width", "8", "--output", str(tmp_path / "b.json")]) == 0
    assert "CoCA slack" in capsys.readouterr().out
    content = json.loads((tmp_path / "b.json").read_text())
    assert [cell["length"] for cell in content["results"]] == [32, 64]
    assert content["environment"]["versions"]["torch"] == torch.__version__
