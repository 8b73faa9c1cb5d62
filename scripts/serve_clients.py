"""Streamed completions of a running server, one client after another and all at once.

coca serve MODEL --port 8000 --continuous-batching
python scripts/serve_clients.py MODEL --url http://localhost:8000
"""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def ask(url: str, model: str, tokens: int, client: int) -> str:
    """The text that a client is streamed; every client has a prompt of another length."""
    prompt = "import os\n" * (3 + client)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0}  # greedy, in vLLM too
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as lines:
        events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices)


def main() -> None:
    """Print both times, and whether all clients got the same text twice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    get = partial(ask, options.url, options.model, options.tokens)
    get(0)  # loads the model
    started = time.perf_counter()
    alone = [get(client) for client in range(options.clients)]
    middle = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        together = [*pool.map(get, range(options.clients))]
    first, second = middle - started, time.perf_counter() - middle
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    print(f"{options.clients} clients one after another {first:.2f} s, at once {second:.2f} s")
    print(f"ratio {second / first:.2f}; the same text {same} times")


if __name__ == "__main__":
    main()
