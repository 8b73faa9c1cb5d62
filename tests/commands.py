"""Commands as a user runs them, in this process, and requests to the servers that they start."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from coca_lab.cli import main


def run(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and error output of ``coca`` with these words."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def post(address: str, **content: Any) -> Any:
    """The answer of a server to a request in JSON."""
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(address, json.dumps(content).encode(), headers)) as answer:
        return json.load(answer)


@contextmanager
def serving(
    folder: Path, log: Path, *options: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of ``coca serve``, which has loaded no model yet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = ["serve", str(folder), "--port", port, "--device", "cpu", *options]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "coca_lab.cli", *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            with suppress(OSError):
                urlopen(f"http://localhost:{port}/health")
                break
            time.sleep(0.5)
        yield f"http://localhost:{port}", process
    finally:
        process.kill()
        process.wait()
