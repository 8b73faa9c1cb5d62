"""Commands as a user runs them, in this process, and requests to the servers that they start."""

import json
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
