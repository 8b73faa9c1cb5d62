"""The lines that long work writes into a file."""

import logging

import pytest

from coca_lab.cli import console


def test_the_first_item_says_how_long_the_others_take(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.ProgressBar() as advance:
        advance("10% of the tokens", 10, 100)  # what an earlier run has left
        now += 90
        advance("40% of the tokens", 40, 100)
    assert [record.getMessage() for record in caplog.records] == [
        "10% of the tokens",
        "40% of the tokens, 0:03:00 left",
    ]


@pytest.mark.parametrize("done", [0, 100])
def test_without_an_item_or_with_all_nothing_is_left(done, caplog):
    caplog.set_level(logging.INFO, logger=console.log.name)
    with console.ProgressBar() as advance:
        advance("a", done, 100)
    assert [record.getMessage() for record in caplog.records] == ["a"]
