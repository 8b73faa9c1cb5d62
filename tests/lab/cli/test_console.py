"""The lines that long work writes into a file."""

import logging
import time

import pytest

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
        _wait_for_lines(caplog, "40% of the tokens, 0:03:00 left")
        now += 60  # within the next item
        _wait_for_lines(caplog, "40% of the tokens, 0:02:00 left")
    assert caplog.records[0].getMessage() == "10% of the tokens"


def test_before_the_first_item_has_ended_every_minute_has_a_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    monkeypatch.setattr(console, "MINUTE", 0.01)
    with console.ProgressBar() as advance:
        advance("0% of the tokens, now a long one", 0, 100)
        _wait_for_lines(caplog, "0% of the tokens, now a long one", count=3)
    count = len(caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) <= count + 1  # one may have been on its way


def _wait_for_lines(caplog, line, count=1):
    started = time.perf_counter()
    while [record.getMessage() for record in caplog.records].count(line) < count:
        assert time.perf_counter() < started + 30, f"no {line!r}"
        time.sleep(0.001)


@pytest.mark.parametrize("done", [0, 100])
def test_without_an_item_or_with_all_nothing_is_left(done, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    with console.ProgressBar() as advance:
        advance("a", done, 100)
    assert [record.getMessage() for record in caplog.records] == ["a"]
