"""The perplexity task: its windows, models whose answer is known, tiny real ones, the command."""

import json
import math
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config
from transformers.modeling_outputs import CausalLMOutput

from coca_attention.errors import UserError
from coca_attention.models import set_rotary_scaling
from coca_lab.engine import Engine
from coca_lab.evaluation import MethodSettings, Model
from coca_lab.evaluation.perplexity import (
    PerplexitySettings,
    TextSettings,
    cut,
    distant_repeats,
    load_text,
    measure_perplexity,
)
from coca_lab.evaluation.task import finish
from coca_lab.evaluation.windows import (
    TokenDocument,
    shared_first_target,
    sliding_windows,
)
from coca_lab.options import checked
from commands import run
from conftest import VOCABULARY, some_text, tiny_model


def evaluate_perplexity(model, documents, settings, method="none", factor=4.0):
    scaled, read = MethodSettings(method, factor), {str(settings): documents}
    return finish(
        measure_perplexity(Model(model, None, "m", texts=read), settings, scaled), Engine()
    )


def settings(**changes) -> PerplexitySettings:
    return PerplexitySettings(**{"windows": [16, 32, 64], "stride": 16, **changes})


class KnownModel(nn.Module):
    """Gives the next token of a counting text the probability ``sure``; records what it reads."""

    config = tiny_model("rope").config

    def __init__(self, sure: float):
        super().__init__()
        self.anchor, self.sure = nn.Parameter(torch.zeros(1)), sure
        self.lengths: list[int] = []
        self.kept: list[int] = []

    def forward(self, input_ids, use_cache=None, logits_to_keep=0):
        self.lengths.append(input_ids.shape[1])
        self.kept.append(logits_to_keep)
        others = (1 - self.sure) / 49
        logits = torch.full((*input_ids.shape, 50), math.log(others) if others else -math.inf)
        logits.scatter_(-1, (input_ids.unsqueeze(-1) + 1) % 50, math.log(self.sure))
        return CausalLMOutput(logits=logits[:, -logits_to_keep:])


def counting(length: int, name: str = "d") -> TokenDocument:
    return TokenDocument(name, torch.arange(length) % 50)


def random_documents(*lengths: int, vocabulary: int = VOCABULARY) -> list[TokenDocument]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenDocument(str(i), torch.randint(vocabulary, (length,), generator=generator))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (7, 3), (32, 32), (64, 5)])
@pytest.mark.parametrize(("sure", "expected"), [(1 / 50, 50), (0.5, 2)])
def test_a_model_whose_answer_is_known_has_its_perplexity(window, stride, sure, expected):
    model = KnownModel(sure)
    wanted = settings(windows=[window], stride=stride, targets="all")
    (cell,) = evaluate_perplexity(model, [counting(101), counting(64)], wanted)
    assert cell["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert [document["tokens"] for document in cell["documents"]] == [100, 63]
    # Only the logits that are scored are computed.
    assert (max(model.lengths), max(model.kept)) == (window, stride)


def one_token_at_a_time(model, tokens, window, stride, first) -> list[tuple[int, int, float]]:
    """Every target with the number of tokens read before it, and its nats."""
    found = []
    for w in sliding_windows(len(tokens), window, stride, first):
        with torch.no_grad():
            logits = model(tokens[None, w.start : w.stop]).logits[0].double()
        for target in range(w.first_target, w.stop + 1):
            read = target - w.start
            found.append((target, read, -F.log_softmax(logits[read - 1], -1)[tokens[target]]))
    return found


def check_cell(cell, model, documents, stride, first, beyond=None):
    """Documents, positions and repeats of a cell are sums over single tokens."""
    scores = [one_token_at_a_time(model, d.tokens, cell["window"], stride, first)
              for d in documents]  # fmt: skip

    def total(chosen):
        nats = [nats for _, _, nats in chosen]
        return {"nats": pytest.approx(float(sum(nats)), rel=1e-5), "tokens": len(nats)}

    ids = [document.id for document in documents]
    assert cell["documents"] == [{"id": i, **total(s)} for i, s in zip(ids, scores, strict=True)]
    for each in cell.get("by_position", []):
        inside = [s for of in scores for s in of if each["first"] <= s[1] <= each["last"]]
        assert {"nats": each["nats"], "tokens": each["tokens"]} == total(inside)
    if beyond is not None:
        masks = [distant_repeats(document.tokens, 3, beyond) for document in documents]
        far = [total([s for s in of if m[s[0]]]) for of, m in zip(scores, masks, strict=True)]
        assert cell["repeats"] == {"n": 3, "beyond": beyond, "documents": far}
        assert all(each["tokens"] for each in far)


@pytest.mark.parametrize(
    ("kind", "targets", "batch_tokens", "pieces"),
    [
        ("slack", "shared", 1, 10**9),
        ("llama-rope", "all", 100, 48),
        ("alibi", "shared", 100_000, 1),
    ],
)
def test_cells_are_sums_over_single_tokens(kind, targets, batch_tokens, pieces, monkeypatch):
    """Of the same tokens at every window, in whatever batches and items these are read."""
    monkeypatch.setattr("coca_lab.evaluation.perplexity.cut", lambda costs: cut(costs, pieces))
    model, documents = tiny_model(kind), random_documents(90, 61, 75, vocabulary=5)
    wanted = settings(
        windows=[8, 24],
        stride=7,
        targets=targets,
        batch_tokens=batch_tokens,
        positions=4,
        repeats=3,
        attend_last=16,
    )
    first = 18 if targets == "shared" else 1
    near, far, last = evaluate_perplexity(model, documents, wanted)
    assert [each["last"] for each in far["by_position"]] == [6, 12, 18, 24]
    for cell, stride in ((near, 7), (far, 7), (last, 2)):
        check_cell(cell, model, documents, stride, first, beyond=16)
    assert (last["window"], last["stride"], last["scaling"]) == (16, 2, "attend-last")
    assert near["tokens"] == far["tokens"] == last["tokens"] == 90 + 61 + 75 - 3 * first
    assert "by_position" not in last


@pytest.mark.parametrize("kind", ["rope", "slack"])
def test_one_pass_scores_the_beginning_by_what_was_read(kind):
    """Ranges that end at the windows, from one forward pass over every document."""
    model, read, documents = tiny_model(kind), [], random_documents(120, 120)
    wanted = settings(windows=[16, 48, 32], stride=None, targets="one-pass", batch_tokens=1)
    with model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape), with_kwargs=True
    ):
        (cell,) = evaluate_perplexity(model, documents, wanted)
    assert read == [(1, 48)] * len(documents) and cell["targets"] == "one-pass"
    ranges = [(each["first"], each["last"]) for each in cell["by_position"]]
    assert ranges == [(1, 16), (17, 32), (33, 48)]
    beginnings = [TokenDocument(d.id, d.tokens[:49]) for d in documents]
    check_cell(cell, model, beginnings, stride=48, first=1)


def test_infinite_nats_become_plain_json_and_nan_is_refused_by_document():
    model = KnownModel(1.0)  # certain, and wrong where the text does not count on
    documents = [counting(100), TokenDocument("e", torch.zeros(100, dtype=torch.long))]
    (cell,) = evaluate_perplexity(model, documents, settings(windows=[16]))
    assert cell["perplexity"] is cell["nats"] is cell["ci95"] is None
    assert [d["nats"] for d in cell["documents"]] == [0.0, None]
    json.dumps(cell, allow_nan=False)
    model.sure = float("nan")
    with pytest.raises(ValueError, match=r"NaN for document 'e'"):
        evaluate_perplexity(model, [counting(1), counting(70, "e")], settings(windows=[16]))


def test_a_method_reaches_the_model_is_reported_and_taken_back(monkeypatch):
    model, documents = tiny_model("slack"), random_documents(120, 120)
    plain = evaluate_perplexity(model, documents, settings())
    scaled = evaluate_perplexity(model, documents, settings(), method="ntk_text")
    assert scaled[1]["nats"] == pytest.approx(plain[1]["nats"])  # 32 is the training length
    assert abs(scaled[2]["nats"] - plain[2]["nats"]) > 0.1
    assert scaled[2]["scaling"] == "ntk_text" and scaled[2]["factor"] == 4.0
    again = evaluate_perplexity(model, documents, settings())
    assert [cell["nats"] for cell in again] == [cell["nats"] for cell in plain]

    set_rotary_scaling(model, "ntk", factor=4.0, length=64)
    own = dict(model.config.rope_parameters)
    (plain,) = evaluate_perplexity(model, documents, settings(windows=[64]))
    assert plain["rope_parameters"] == own
    for kind in ("linear", "yarn"):
        with pytest.raises(UserError, match="would replace the ntk scaling that the model was tr"):
            evaluate_perplexity(model, documents, settings(windows=[64]), kind, 2.0)
        assert model.config.rope_parameters == own

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("coca_lab.evaluation.perplexity.score_windows", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate_perplexity(model, documents, settings())
    assert model.config.rope_parameters == own


def test_a_method_with_options_reads_a_vanilla_model_and_leaves_it():
    model, documents = tiny_model("llama-rope"), random_documents(120, 120)
    read, found = {str(settings()): documents}, {}
    for options in ({}, {"near": 16}):
        method = MethodSettings("limited", 4.0, options)
        measured = measure_perplexity(Model(model, None, "m", texts=read), settings(), method)
        cells = finish(measured, Engine())
        found[cells[0]["scaling"]] = [cell["nats"] for cell in cells]
        assert "distance_map" in cells[0]["rope_parameters"]
    plain = [cell["nats"] for cell in evaluate_perplexity(model, documents, settings())]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert found["limited"][:2] == pytest.approx(plain[:2]) != found["limited (near=16)"][:2]
    assert found["limited"][2] != pytest.approx(plain[2])


def test_models_of_other_kinds_are_evaluated_too():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    documents = random_documents(120, 120)
    bloom = AutoModelForCausalLM.from_config(BloomConfig(**sizes)).eval()
    cells = evaluate_perplexity(bloom, documents, settings())
    assert all(math.isfinite(cell["perplexity"]) for cell in cells)
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_embd=16, n_positions=32)).eval()
    assert evaluate_perplexity(gpt2, documents, settings(windows=[16, 32]))
    with pytest.raises(ValueError, match=r"cannot read 64 tokens at once .* 32: use shorter"):
        evaluate_perplexity(gpt2, documents, settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": -5}, "max_tokens: .* greater than 0"),
        ({"held_out": -1.0}, "held_out: .* greater than or equal to 0"),
        ({"max_tokens": 64}, "`max_tokens` cuts documents to 64 tokens, and at least 65 are"),
        ({"windows": []}, "windows: .* at least 1 item"),
        ({"windows": [-8]}, "windows: .* greater than 0"),
        ({"stride": 17}, "`stride` must be at least 1 token and at most the window"),
        ({"attend_last": 65}, "at most the largest window"),
        ({"positions": 17}, "at most the smallest window"),
        ({"targets": "one-pass", "stride": 8}, "neither `stride` nor `positions`"),
        (
            {"targets": "one-pass", "stride": None, "positions": 4},
            "neither `stride` nor `positions`",
        ),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        checked(PerplexitySettings, {"windows": [16, 32, 64], "stride": 16, **changes})


def test_short_documents_are_refused_or_skipped(tokenizer, tmp_path):
    (tmp_path / "long.txt").write_text(some_text(300))
    (tmp_path / "short.txt").write_text(some_text(5))
    text = TextSettings(source=str(tmp_path))
    with pytest.raises(ValueError, match=r"short\.txt' has \d+ tokens .* needs 65"):
        load_text(text, tokenizer, at_least=65)
    text.skip_short = True
    kept = load_text(text, tokenizer, at_least=65)
    assert [document.id for document in kept] == [str(tmp_path / "long.txt")]
    with pytest.raises(ValueError, match=r"100,000 tokens, of 2 the longest has \d{3}: give"):
        load_text(text, tokenizer, at_least=100_000)


def test_short_documents_of_stdlib_are_skipped_unless_that_is_off(tokenizer):
    """By default all windows are longer than most of its files."""
    (document,) = load_text(TextSettings(max_documents=1), tokenizer, at_least=3000)
    assert len(document.tokens) >= 3000
    with pytest.raises(ValueError, match=r"\d+ tokens .* needs 3000: .* set `skip_short`"):
        load_text(TextSettings(skip_short=False), tokenizer, at_least=3000)


def test_text_is_cut_split_and_counted(tokenizer, text_folder):
    def load(**changes):
        return load_text(TextSettings(str(text_folder), **changes), tokenizer, at_least=10)

    few = load(max_documents=4, max_tokens=50)
    assert [len(document.tokens) for document in few] == [50] * 4
    whole, part = ({document.id for document in load(held_out=share)} for share in (0.0, 0.4))
    assert len(whole) == 12 and set() < part < whole


@pytest.mark.parametrize(
    ("tokens", "n", "beyond", "expected"),
    [
        ([1, 2, 3, 9, 9, 1, 2, 3], 3, 4, [7]),
        ([1, 2, 3, 9, 9, 1, 2, 3], 3, 5, []),
        ([1, 2, 3, 9, 9, 1, 2, 3], 2, 4, [6, 7]),
        # The latest of two earlier ones is near.
        ([1, 2, 8, 8, 1, 2, 1, 2], 2, 3, [5]),
        ([5, 5, 5, 5], 1, 1, []),
        ([1, 2], 3, 1, []),
    ],
)
def test_distant_repeats_stand_far_back_only(tokens, n, beyond, expected):
    found = distant_repeats(torch.tensor(tokens), n, beyond)
    assert found.nonzero().flatten().tolist() == expected


# Windows: golden ones, then properties


def spans(*arguments) -> list[tuple[int, int, int]]:
    return [(w.start, w.stop, w.first_target) for w in sliding_windows(*arguments)]


GOLDEN = {
    # (length, window, stride, first target): (first input, end of inputs, first target) …
    (10, 4, 2, 1): [(0, 2, 1), (0, 4, 3), (2, 6, 5), (4, 8, 7), (5, 9, 9)],
    (1, 8, 4, 1): [],
    (10, 4, 1, 7): [(3, 7, 7), (4, 8, 8), (5, 9, 9)],
    (12, 8, 4, 5): [(0, 8, 5), (3, 11, 9)],
}


@pytest.mark.parametrize("arguments", GOLDEN, ids=str)
def test_golden_windows(arguments):
    assert spans(*arguments) == GOLDEN[arguments]


SIZES = st.integers(1, 60).flatmap(
    lambda window: st.tuples(st.just(window), st.integers(1, window))
)


@given(length=st.integers(1, 300), sizes=SIZES, first=st.integers(1, 100))
def test_each_target_exactly_once_with_its_context(length, sizes, first):
    window, stride = sizes
    seen = []
    for w in sliding_windows(length, window, stride, first):
        targets = range(w.first_target, w.stop + 1)
        assert w.start >= 0 and w.stop < length
        assert 1 <= w.inputs <= window and w.targets == len(targets) <= stride
        for target in targets:
            context = target - w.start
            assert context >= min(target, window - stride + 1)
            assert context <= window
        seen += targets
    assert seen == list(range(first, length))


@given(sizes=st.lists(st.integers(8, 64), min_size=1), extra=st.integers(1, 50))
def test_shared_targets_are_the_same_at_every_window(sizes, extra):
    stride = 8
    first = shared_first_target(sizes, stride)
    length = max(sizes) + extra
    runs = []
    for window in sizes:
        found = list(sliding_windows(length, window, stride, first))
        assert all(w.inputs == window for w in found)
        runs.append([(w.first_target, w.stop) for w in found])
    assert all(run == runs[0] for run in runs)
    assert sum(stop + 1 - begin for begin, stop in runs[0]) == length - first


# The command, and the report of its results


def test_eval_perplexity_and_report(capsys, model_folder, text_folder, tmp_path):
    output = tmp_path / "deep" / "result.json"
    code, out, err = run(
        capsys, "eval", "perplexity", model_folder, "--source", text_folder, "--windows", "16,64",
        "--method", "ntk_text", "--factor", "2", "--attend-last", "16", "--output", output,
        "--name", "tiny",
    )  # fmt: skip
    assert code == 0, err
    content = json.loads(output.read_text())
    cells = content["results"]
    assert [(c["scaling"], c["window"]) for c in cells] == [
        ("ntk_text", 16), ("ntk_text", 64), ("attend-last", 16),
    ]  # fmt: skip
    assert len({c["tokens"] for c in cells}) == 1
    assert content["environment"]["versions"]["torch"] == version("torch")
    assert f"{cells[1]['perplexity']:.1f}" in out and "tiny + NTK to 2 L" in out
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "report", output, "--output", page, "--title", "Mine")
    assert code == 0, err
    assert "<title>Mine</title>" in page.read_text()
