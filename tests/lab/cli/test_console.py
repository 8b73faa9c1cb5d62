"""The lines that long work writes into a file."""

import io
import logging
import re
import time

import pytest
from rich.console import Console

from coca_lab.cli import console


def test_the_first_item_says_how_long_the_others_take(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    monkeypatch.setattr(console, "MINUTE", 0.01)
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.ProgressBar() as advance:
        advance("10% of the tokens", 10, 100)  # what an earlier run has left
        now += 90
        advance("40% of the tokens", 40, 100)
        _wait_for_lines(caplog, "40% of the tokens, 0:01:30 elapsed, 0:03:00 left")
        now += 60  # within the next item
        _wait_for_lines(caplog, "40% of the tokens, 0:02:30 elapsed, 0:02:00 left")
    assert caplog.records[0].getMessage() == "10% of the tokens"


def test_before_the_first_item_has_ended_every_minute_has_a_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    monkeypatch.setattr(console, "MINUTE", 0.01)
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.ProgressBar() as advance:
        advance("0% of the tokens, now a long one", 0, 100)
        for minute in (1, 2, 3):
            now += 60
            _wait_for_lines(caplog, f"0% of the tokens, now a long one, 0:0{minute}:00 elapsed")
    count = len(caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) <= count + 1  # one may have been on its way


def _wait_for_lines(caplog, line):
    started = time.perf_counter()
    while [record.getMessage() for record in caplog.records].count(line) == 0:
        assert time.perf_counter() < started + 30, f"no {line!r}"
        time.sleep(0.001)


@pytest.mark.parametrize("done", [0, 100])
def test_without_an_item_or_with_all_nothing_is_left(done, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    with console.ProgressBar() as advance:
        advance("a", done, 100)
    assert [record.getMessage() for record in caplog.records] == ["a"]


def test_in_a_terminal_of_80_columns_times_are_whole():
    label = "0% of 12,288 tokens, now a-model-of-some-name needles 12,288, document 1 of 1"
    bar = console.ProgressBar()
    with bar as advance:
        advance(label, 0, 100)
        output = io.StringIO()
        Console(width=80, file=output).print(bar.bar.get_renderable())
    shown = output.getvalue()
    assert re.search(r"0:00:\d\d elapsed, -:--:-- left", shown)
    assert all(word in shown for word in label.split())
