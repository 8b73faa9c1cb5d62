"""Forked processes that are a group of torch.distributed."""

import socket

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def in_processes(count, function):
    """Run a function in forked processes that are a gloo group."""
    start_processes(_joined, (count, free_port(), function), count, start_method="fork")


def _joined(rank, count, port, function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=count)
    function(dist.group.WORLD)
    dist.destroy_process_group()
