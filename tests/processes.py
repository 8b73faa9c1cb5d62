"""Forked processes that are a group of torch.distributed."""

import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def in_processes(count, function):
    """Run a function in forked processes that are a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_joined, (count, f"{folder}/store", function), count, start_method="fork")


def _joined(rank, count, store, function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    function(dist.group.WORLD)
    dist.destroy_process_group()
