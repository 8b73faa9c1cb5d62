"""Cells of small result files, and what their pages hold."""

from collections import Counter
from html.parser import HTMLParser

from coca_lab.data.ruler import ANSWER_TOKENS
from coca_lab.intervals import wilson_interval
from coca_lab.report.page import page_sections, parts_of
from coca_lab.report.result_files import parsed
from coca_lab.report.section import Section

ATTENTION = {"CoCA-Slack": "slack", "CoCA-Strict": "strict"}
ENVIRONMENT = {
    "versions": {"python": "3.11"}, "processor": "A <processor>", "cores": 2, "threads": 2,
    "gpus": [], "system": "Linux", "command": "coca study quickstart",
}  # fmt: skip


def shown(*cells: dict, runs=()) -> dict[str, Section]:
    """The sections of a page of cells and runs, by their titles."""
    content = {"results": [*cells], "training": [*runs], "file": "results.json"}
    sections = page_sections(*parts_of(parsed([content])))
    return {section.title: section for section in sections}


def perplexity(model: str, window: int, value: float, scaling: str = "none", **changes) -> dict:
    return {
        "task": "perplexity", "model": model, "attention": ATTENTION.get(model),
        "training_length": 64, "scaling": scaling, "factor": 4.0 if scaling == "ntk" else None,
        "window": window, "stride": 64, "targets": "shared", "tokens": 1000,
        "perplexity": value, "ci95": [value * 0.9, value * 1.1],
        "documents": [{"id": "a", "nats": 1.0, "tokens": 1000}], **changes,
    }  # fmt: skip


def passkey(model, length, hits, scaling="none", factor=None, trained=512):
    """A cell of ten prompts, the first ``hits`` of them right, distances and depths spread out."""
    samples = [
        {"index": i, "key": 10_000 + i, "depth": i / 9, "hit": i < hits, "output": "",
         "distance": round(length * (1 - i / 10)) - 5}
        for i in range(10)
    ]  # fmt: skip
    return {
        "task": "passkey", "model": model, "attention": ATTENTION.get(model),
        "training_length": trained, "scaling": scaling, "factor": factor, "length": length,
        "seed": 0, "depths": None, "max_new_tokens": 64,
        "accuracy": hits / 10, "wilson95": [0.1, 0.9], "samples": samples,
    }  # fmt: skip


def ruler(model: str, kind: str, length: int, *scores: float, trained: int = 512) -> dict:
    samples = [{"index": i, "expected": [f"{i}"], "score": score} for i, score in enumerate(scores)]
    return {
        "task": "ruler", "model": model, "kind": kind, "length": length, "scaling": "none",
        "chat": False, "training_length": trained, "samples": samples,
        "seed": 0, "max_new_tokens": ANSWER_TOKENS[kind], "filler": f"hash of {kind} at {length}",
        "score": sum(scores) / len(scores), "wilson95": wilson_interval(sum(scores), len(scores)),
    }  # fmt: skip


def study(model: str, seed: int, size: float, near: float, far: float) -> list[dict]:
    """The cells of a trial of a model of so many million parameters."""
    about = {
        "task": "perplexity", "model": model, "training_seed": seed, "size": f"{size:g}M",
        "parameters": int(1e6 * size), "training_length": 256, "scaling": "none",
    }  # fmt: skip
    return [about | {"window": n, "perplexity": y} for n, y in ((256, near), (4096, far))]


def training(name: str = "converted", last: float = 100.4, **changes) -> dict:
    """A run from a model whose perplexity is 100."""
    validated = ((0, 300.0), (20, 101.5), (40, last))
    return {
        "name": name, "parameters": 12345, "steps": 40, "tokens": 4000, "epochs": 0.5,
        "seconds": None, "start": {"name": "base", "perplexity": 100.0},
        "curve": [{"step": 10, "loss": 0.3}, {"step": 30, "loss": 0.1}],
        "validation": [{"step": step, "perplexity": y} for step, y in validated],
        **changes,
    }  # fmt: skip


CELLS = [
    perplexity("RoFormer", 64, 40.0),
    perplexity("RoFormer", 128, 90.0),
    perplexity("RoFormer", 64, 41.0, "attend-last", stride=8),
    perplexity("RoFormer", 64, 40.0, "ntk"),
    perplexity("RoFormer", 128, 60.0, "ntk"),
    perplexity("CoCA-Slack", 64, 41.5),
    perplexity("CoCA-Slack", 128, 54.0),
]
TRAINING = {
    "name": "RoFormer", "parameters": 12345, "steps": 10, "tokens": 1000, "epochs": 0.5,
    "seconds": 3.0, "recipe": {"training": {"learning_rate": 0.003}},
    "curve": [{"step": 1, "loss": 5.0}, {"step": 10, "loss": 4.0}],
}  # fmt: skip
CONTENT = {"results": CELLS, "training": [TRAINING], "environment": ENVIRONMENT}


class Page(HTMLParser):
    """The text of a page, its ids and references, and how often it has a tag or an attribute."""

    def __init__(self, html: str):
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.found: Counter[str] = Counter()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.update([tag, *(name for name, _ in attrs)])
        self.ids += [value for name, value in attrs if name == "id"]
        links = ("src", "href", "xlink:href", "data")
        self.references += [value for name, value in attrs if name in links]

    def handle_data(self, data):
        self.text += data


def lines(chart) -> dict[str, dict[float, float]]:
    """By the names of a chart's lines, their values."""
    return {
        name: dict(zip(line["x"], line["y"], strict=True))
        for name, line in chart.points.groupby("line", sort=False)
    }
