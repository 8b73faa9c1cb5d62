"""Benchmarks: wrong results are not timed, ratios are within a round, memory is that of a run."""

import json
import re
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import cases, compare, gpu_check
from benchmarks.__main__ import main, measure, parser
from benchmarks.tables import print_tables, tables
from benchmarks.timing import Variant, interleaved
from coca_attention import ops
from coca_attention.errors import UserError
from coca_attention.ops import FORMS
from coca_lab.environment import describe_environment

SMALL = "--heads 4 --head-width 16 --hidden-size 32 --layers 2 --rounds 3"
PAGE = Path(__file__).parents[1] / "results" / "cpu" / "README.md"


def settings(options=""):
    return parser().parse_args(f"{SMALL} {options}".split())


@pytest.fixture(scope="module")
def cells():
    names, options = ("operator", "operator-training", "training", "prefill"), "--kv-heads 2"
    return [measure(name, length, settings(options)) for name in names for length in (32, 48)]


def test_cells_are_plain_values_of_correct_variants(cells):
    assert json.loads(json.dumps(cells, allow_nan=False)) == cells
    for cell in cells:
        names = list(cell["variants"])
        base = cases.ROTARY if "operator" in cell["case"] else cases.LLAMA
        assert names[: 1 + len(FORMS)] == [base, *(f"CoCA {form}" for form in FORMS)]
        assert (cases.CONTRACTION in names) == ("operator" in cell["case"])
        for measured in cell["variants"].values():
            assert measured["rounds"] == 3 and measured["error"] < 1e-4
            low, high = measured["quartiles_ms"]
            assert 0 < low <= measured["median_ms"] <= high
        assert cell["variants"][base]["ratio_quartiles"] == [1.0, 1.0]


def test_models_with_roles_take_the_place_of_forms_in_every_layer():
    chosen = settings("--roles lg --window 4 --layers 3")
    cell = measure("prefill", 32, chosen)
    local = [f"lg, local {x}" for x in ("rotary", *FORMS)]
    assert list(cell["variants"]) == ["Llama", *local, "lg, GraniteSWA"]
    assert (cell["sizes"]["roles"], cell["sizes"]["window"]) == ("lg", 4)
    model = cases.make_model(chosen, "rope")
    assert [kind[0] for kind in model.config.layer_types] == ["s", "f", "s"]


@pytest.mark.parametrize("case", ["limits", "limits-training"])
def test_limited_distances_are_measured_beside_plain_attention(case):
    measured = measure(case, 48, settings("--kv-heads 2"))["variants"]
    kinds = [name.partition(",")[0] for name in measured]
    assert kinds == [cases.ROTARY, *(kind for kind in ("limited", "leaky", "shifted") * 2)]
    assert max(x["error"] for x in measured.values()) < 1e-5


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = cases.coca

    def wrong(*arguments, **options):
        return right(*arguments, **options) * (1.01 if options["form"] == "strict" else 1)

    monkeypatch.setattr(cases, "coca", wrong)
    for case in ("operator", "operator-training"):
        with pytest.raises(UserError, match=r"CoCA strict is off by 0\.01"):
            measure(case, 32, settings())


def test_one_query_over_a_cache_is_checked_too(monkeypatch):
    measured = measure("operator-decode", 50, settings("--kv-heads 2"))["variants"]
    halves = [f"half keys, CoCA {form}" for form in FORMS]
    assert list(measured) == [cases.ROTARY, *halves, cases.COPY]
    errors = [variant["error"] for variant in measured.values()]
    assert max(errors[:-1]) < 1e-5 and errors[-1] is None
    monkeypatch.setattr(ops, "query_map", lambda query, *_, **__: query)
    with pytest.raises(UserError, match="half keys, CoCA slack is off by"):
        measure("operator-decode", 50, settings("--kv-heads 2"))


def test_times_and_ratios_of_a_round():
    order = []
    slow = iter([9.0, 0.2, 0.4, 0.6])  # the first warms up

    def first() -> float:
        order.append("a")
        return next(slow)

    def second() -> None:
        order.append("b")
        time.sleep(0.02)

    timed = interleaved([Variant("a", first), Variant("b", second)], settings())
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert timed["a"]["median_ms"] == pytest.approx(400) and timed["a"]["ratio"] == 1
    assert timed["a"]["quartiles_ms"] == pytest.approx([300, 500])
    assert timed["b"]["median_ms"] >= 20
    low, high = timed["b"]["ratio_quartiles"]
    assert low <= timed["b"]["ratio"] <= high and timed["b"]["ratio"] > 0.02 / 0.6


@pytest.mark.parametrize("limits", ["--rounds 100 --seconds 0", "--rounds 1"])
def test_three_rounds_always_run(limits):
    assert interleaved([Variant("a", lambda: 1.0)], settings(limits))["a"]["rounds"] == 3


@pytest.mark.slow
def test_peak_memory_of_the_contraction_and_of_the_operator():
    """At 2,048 tokens the scores of 4 heads alone take 67 MB; everything else is small."""
    peaks = {variant.name: variant.run() for variant in cases.memory_variants(2048, settings())}
    assert peaks[cases.CONTRACTION] > 67 and peaks["CoCA slack"] < 20


@pytest.mark.parametrize("kind", ["full", "half"])
def test_decoding_restores_the_cache(kind, monkeypatch):
    caches, random_cache = [], cases.random_cache

    def recorded(*arguments):
        caches.append(random_cache(*arguments))
        return caches[-1]

    monkeypatch.setattr(cases, "random_cache", recorded)
    variant = cases.decoder("A", "slack", kind, 40, settings(), False)
    for _ in range(2):
        variant.run()
        assert caches[0].get_seq_length() == 40
    full = 2 * 2 * 40 * 4 * 16 * 4 / 1e6 / 2
    share = 0.75 if kind == "half" else 1.0
    assert variant.facts == {"cache_megabytes": pytest.approx(share * full)}
    assert variant.error is not None and variant.error < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["decode", "decode-compiled"])
def test_decoding_is_timed_in_separate_processes(case):
    variants = measure(case, 64, settings())["variants"]
    kinds = [
        f"CoCA {form}, {kind} cache" for form in ("slack", "strict") for kind in ("full", "half")
    ]
    assert list(variants) == ["Llama", *kinds]
    sizes = [measured["cache_megabytes"] for measured in variants.values()]
    assert sizes[2] == pytest.approx(0.75 * sizes[0])


@pytest.mark.slow
def test_decoding_with_limited_distances_is_timed_beside_plain_decoding():
    measured = measure("limits-decode", 64, settings())["variants"]
    assert list(measured) == ["Llama", "limited", "leaky", "shifted"]
    assert max(x["error"] for x in measured.values()) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_check_needs_a_gpu(capsys):
    assert gpu_check.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().out


def test_runs_of_the_gpu_check_the_comparison_and_the_page_parse():
    page = re.findall(r"(?m)^python -m benchmarks (?:\$S )?(.*)", PAGE.read_text(encoding="utf-8"))
    runs = [f"--cases {run} {gpu_check.OPTIONS}" for run in gpu_check.RUNS]
    runs += [f"{run} {compare.OPTIONS}" for run in compare.RUNS]
    runs += page
    assert len(runs) > 20
    for run in runs:
        parser().parse_args(run.split())


def test_tables_by_hand(cells):
    titles = [table.split("  ")[0].strip() for table in tables(cells)]
    assert (
        "operator (heads 4, kv heads 2, head width 16, batch 1, float32, cpu)" in tables(cells)[0]
    )
    assert [title.split()[0] for title in titles] == list(dict.fromkeys(c["case"] for c in cells))
    about = {"case": "x", "sizes": {"heads": 2, "roles": None}, "batch": 1}
    about |= {"dtype": "float32", "device": "cpu"}
    timed = {
        "a": {"median_ms": 1234.5, "cache_megabytes": 4.0},
        "b": {"ratio": 0.5, "ratio_quartiles": [0.4, 0.625], "cache_megabytes": 3.0},
    }
    longer = {"a": {"median_ms": 9.87}}
    (table,) = tables(
        [about | {"length": 2048, "variants": longer}, about | {"length": 8, "variants": timed}]
    )
    assert [re.sub(" +", " ", line.strip()) for line in table.splitlines()] == [
        "x (heads 2, batch 1, float32, cpu) 8 2,048",
        "a 1,234 ms 9.9 ms",
        "b (0.75 × bytes) 0.50 × (0.40–0.62) –",
    ]
    memory = about | {"length": 8, "variants": {"a": {"peak_megabytes": 1234.0}}}
    assert "1,234 MB" in tables([memory])[0]


def test_the_command(capsys, tmp_path):
    words = "--cases operator --lengths 32 64 --heads 2 --rounds 3 --head-width 8 --kv-heads 1"
    main([*words.split(), "--longest-contraction", "32", "--output", str(tmp_path / "b.json")])
    said = capsys.readouterr().out
    assert "CoCA slack" in said and str(tmp_path / "b.json") in said
    content = json.loads((tmp_path / "b.json").read_text())
    assert [cell["length"] for cell in content["results"]] == [32, 64]
    has_matrix = [cases.CONTRACTION in cell["variants"] for cell in content["results"]]
    assert has_matrix == [True, False]
    assert content["results"][0]["sizes"] == {"heads": 2, "kv_heads": 1, "head_width": 8}
    assert content["environment"]["versions"]["torch"] == version("torch")


def test_the_tables_of_published_files_have_the_ratios_of_their_page(capsys):
    print_tables([str(PAGE.with_name("operator.json"))])
    printed = re.findall(r"(?m)^ *CoCA strict(.*)", capsys.readouterr().out)
    page = re.findall(r"(?m)^\| strict, forward[^|]*\|(.*)", PAGE.read_text(encoding="utf-8"))
    for row, said in zip(printed, page, strict=True):
        assert re.findall(r"[\d.]+(?= ×)", row) == re.findall(r"[\d.]+", said)


def test_of_two_versions_the_imported_one_is_named(tmp_path, monkeypatch):
    found = tmp_path / "torch-0.1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert describe_environment()["versions"]["torch"] == "0.1"
