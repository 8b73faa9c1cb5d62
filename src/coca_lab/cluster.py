"""An executor of items on Ray."""

import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle

from coca_attention.errors import UserError, install
from coca_lab.engine import GRACE, ItemExecutor, Outcome, Work, compute_sent

PATIENCE = 20.0
"""Seconds in which a cluster has to answer."""


class OnRay(ItemExecutor):
    """Computes items on Ray, at an address or started here; by default one GPU each, if any."""

    def __init__(
        self, address: str = "", *, num_cpus: int = 1, num_gpus: float | None = None
    ) -> None:
        """Connect; UserError if the cluster does not answer, or has too little for an item."""
        self._ray = _connected(address)
        there = self._ray.cluster_resources()
        if num_gpus is None:
            num_gpus = 1 if there.get("GPU", 0) >= 1 else 0
        self.needs = {"CPU": num_cpus, "GPU": num_gpus}
        for kind, number in self.needs.items():
            if number > there.get(kind, 0):
                raise UserError(
                    f"an item needs {number:g} {kind}s and Ray has {there.get(kind, 0):g}: change "
                    f"num_{kind.lower()}s, or add machines"
                )
        # Processes compute many items each (max_calls), and so keep a model between them.
        options: Any = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_calls": 0}
        self._compute = self._ray.remote(**options, max_retries=0)(_compute_remotely)
        self._work: Work | None = None
        self._sent: Any = None
        self._running: list[Any] = []  # references to what was submitted, until it has ended

    @property
    def slots(self) -> int:
        """Twice what fits, so that Ray sees that more could run and may add machines."""
        there = self._ray.cluster_resources()
        fit = min(there.get(kind, 0) / number for kind, number in self.needs.items() if number)
        return 2 * max(1, int(fit))

    def submit(self, fn: Work, /, arguments: Sequence[object], label: str = "") -> Future[Outcome]:
        if fn is not self._work:  # a copy for the cluster; items with the same follow each other
            self._sent = self._ray.put(cloudpickle.dumps(fn))
            self._work = fn
        count = len(self._running)
        _, self._running = self._ray.wait(self._running, num_returns=count, timeout=0)
        reference = self._compute.remote(os.getcwd(), self._sent, arguments)
        self._running.append(reference)
        return reference.future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the items, with ``cancel_futures`` as Ctrl-C does: trainings save within `GRACE`."""
        if cancel_futures and self._running:
            for reference in self._running:
                self._ray.cancel(reference)
            count = len(self._running)
            self._ray.wait(self._running, num_returns=count, timeout=GRACE)
        self._running.clear()


def _compute_remotely(folder: str, work: bytes, arguments: Sequence[object]) -> Outcome:
    if Path(folder).is_dir():
        os.chdir(folder)  # where the paths of the driver begin
    return compute_sent(work, arguments)


def _connected(address: str) -> Any:
    """Ray, started or connected to a cluster; what is started ends with this process."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"this needs Ray: {install('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # an optional package, which reads these variables

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), PATIENCE).close()
        if not ray.is_initialized():
            ray.init(
                address=address or "local",
                include_dashboard=False if not address else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"Ray at {address or 'this machine'} does not answer: {text}") from error
    return ray
