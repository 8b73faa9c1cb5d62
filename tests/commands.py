"""Commands as a user runs them, in this process, and requests to the servers that they start."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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
def answering(log: Path, environment: dict[str, str], *words: Any) -> Iterator[tuple[str, Any]]:
    """The address and the process of a server that a command with a ``--port`` starts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"http://localhost:{free.getsockname()[1]}"
    command = [*map(str, words), "--port", address.rpartition(":")[2]]
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment
        )
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            with suppress(OSError):
                urlopen(f"{address}/health")
                break
            time.sleep(0.5)
        yield address, process
    finally:
        process.terminate()
        process.wait(timeout=60)


def serving(folder: Path, log: Path, *options: str) -> AbstractContextManager[tuple[str, Any]]:
    """The address and the process of ``coca serve``."""
    words = [sys.executable, "-m", "coca_lab.cli", "serve", folder, "--device", "cpu", *options]
    return answering(log, {"PYTHONPATH": ":".join(sys.path)}, *words)
