"""What the package logs, on the terminal: each message in a line of its own."""

import logging
import sys


class _Lines(logging.Handler):
    """Writes to the standard error of the moment, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"coca: warning: {text}"
        if "tqdm" in sys.modules:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)


def show_messages() -> None:
    """Show what the package logs from now on."""
    for package in ("coca_attention", "coca_lab"):
        log = logging.getLogger(package)
        log.setLevel(logging.INFO)
        if not any(isinstance(handler, _Lines) for handler in log.handlers):
            log.addHandler(_Lines())
