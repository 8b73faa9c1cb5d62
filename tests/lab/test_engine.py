"""Items of work in this process, in others and on Ray: values kept, failures named, none lost."""

import os
import signal
import sqlite3
import struct
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection

import pytest

from coca_attention.errors import UserError
from coca_lab import cluster
from coca_lab.cluster import OnRay
from coca_lab.engine import Engine, Item, ItemExecutor, Job
from coca_lab.processes import Workers
from coca_lab.store import Store


def square(numbers):
    return [number**2 for number in numbers]


def items_of(work, numbers, **fields):
    return [Item([{"square": n}], work, [n], label=f"item {n}", **fields) for n in numbers]


def test_values_and_their_times_survive_and_can_be_forgotten(tmp_path):
    path = tmp_path / "folder" / "values.sqlite"
    with Store(path) as store:
        store.put([{"a": 1, "b": 2}, ["c"]], [{"x": 2.5}, 7], 3.0)
        with pytest.raises(ValueError):
            store.put(["d", "e"], [1, float("nan")])  # both or neither
    with Store(path) as store:
        assert {"b": 2, "a": 1} in store and ["c"] in store and "d" not in store
        assert store.get({"b": 2, "a": 1}) == {"x": 2.5} and store.get("d") is None
        assert store.seconds([["c"]]) == 1.5 and store.seconds([["c"], "d"]) == 1.5
        store.forget([["c"]])
    with Store(path) as store:
        assert {"a": 1, "b": 2} in store and ["c"] not in store  # of another measurement
        store.forget([{"a": 1, "b": 2}])
    assert not list(path.parent.iterdir())


def test_a_damaged_file_and_a_full_disk_are_named(tmp_path):
    path = tmp_path / "values.sqlite"
    with Store(path) as store:
        store.put([*range(2000)], ["x" * 50] * 2000)
    page = bytearray(path.read_bytes())
    page[20 * 4096 : 21 * 4096] = b"\xff" * 4096
    for name, damaged in (("a", page), ("b", b"this is not a database" * 100)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name} is damaged .*delete it"):
            Store(tmp_path / name)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE done (key, value)")
    with Store(path) as store, pytest.raises(UserError, match=r"is damaged .*column.* delete it"):
        store.put(["a"], [1])
    path.unlink(missing_ok=True)
    with Store(path) as store:
        store.put(["a"], [1])
        store._db.execute("PRAGMA max_page_count = 4")
        with pytest.raises(UserError, match=r"values\.sqlite: .*full: free disk space"):
            store.put(["b"], ["x" * 10**6])
        assert "b" not in store and store.get("a") == 1


def test_items_are_computed_once_and_progress_never_goes_back(tmp_path):
    seen, asked = [], []

    def work(numbers):
        asked.append(numbers)
        return square(numbers)

    items = items_of(work, range(3), cost=10)
    with Store(tmp_path / "values.sqlite") as store:
        engine = Engine(store, lambda *line: seen.append(line))
        assert engine.run(items) == [0, 1, 4]
        batch = Item([{"square": n} for n in (1, 2, 5)], work, [1, 2, 5], 30)
        assert engine.run([*items, batch]) == [0, 1, 4, 1, 4, 25]
        assert engine.run([items[0], items[0]]) == [0, 0]
        # One of two items may be a hundredth of the work.
        short = items_of(work, [10], cost=10)
        long = items_of(work, [11], cost=990)
        engine.run(short + long)
    assert asked == [[0], [1], [2], [5], [10], [11]]  # of a batch, what is missing
    # Before every item, which may take minutes, and behind it.
    assert [(done, total) for _, done, total in seen[:9]] == [
        (0, 30), (10, 30), (10, 30), (20, 30), (20, 30), (30, 30), (30, 60), (30, 60), (60, 60),
    ]  # fmt: skip
    once = "100% of 10 tokens, from an earlier run"  # one item, though named twice
    assert seen[9] == (once, 10, 10)
    assert seen[0][0] == "0% of 30 tokens, now item 0"
    assert seen[-2][0] == "1% of 1,000 tokens, now item 11"


def test_a_failure_is_named_once_the_rest_is_done():
    attempts = []

    def work(numbers):
        attempts.append(numbers[0])
        if numbers == [1]:
            raise UserError("one is wrong")
        if numbers == [2] or (numbers == [3] and attempts.count(3) < 3):
            raise OSError(f"attempt {attempts.count(numbers[0])}")
        return square(numbers)

    engine = Engine()
    with pytest.raises(UserError, match=r"item 1: one is wrong \(2 of 5 items failed\)"):
        engine.run(items_of(work, range(5)))
    assert engine.store.get({"square": 3}) == 9 and engine.store.get({"square": 4}) == 16
    assert [attempts.count(n) for n in range(5)] == [1, 1, 3, 3, 1]
    with pytest.raises(UserError, match=r"item 2: unexpected OSError: attempt 6 \(1 of 2"):
        engine.run(items_of(work, [0, 2]))


def test_an_item_whose_values_cannot_be_kept_fails_alone():
    """Not JSON, too few, or none at all; and one that would end the command as if all were done."""
    bad = {1: [float("nan")], 2: [], 3: [None], 4: [{1, 2}]}

    def work(numbers):
        if numbers == [5]:
            sys.exit(0)
        return bad.get(numbers[0], numbers)

    engine = Engine()
    with pytest.raises(
        UserError, match=r"item 1: .*cannot be kept: .*JSON.* \(5 of 7 items failed\)"
    ):
        engine.run(items_of(work, range(7)))
    assert [engine.store.get({"square": n}) for n in range(7)] == [0, *[None] * 5, 6]


class Breaking(ItemExecutor):
    """Breaks as a pool does: while items are computed, or when they are submitted."""

    def __init__(self, breaks):
        self.breaks, self.stopped = breaks, []

    @property
    def slots(self):
        return 3

    def submit(self, fn, /, arguments, label=""):
        self.breaks.setdefault(label, [])
        how = self.breaks[label].pop() if self.breaks[label] else ""
        if how == "refused":
            raise OSError("no process")
        if how == "broken":
            future = Future()
            future.set_exception(BrokenExecutor("killed"))
            return future
        return super().submit(fn, arguments)

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.stopped.append(cancel_futures)


def test_what_breaks_is_tried_three_times():
    executor = Breaking({"item 0": ["broken"] * 2, "item 1": ["refused", "broken"] * 2})
    engine = Engine(executor=executor)
    with pytest.raises(UserError, match=r"item 1: its process was ended 3 times.*\(1 of 3 items"):
        engine.run(items_of(square, range(3)))
    assert [engine.store.get({"square": n}) for n in range(3)] == [0, None, 4]
    assert executor.breaks["item 1"] == ["refused"] and executor.stopped == []


def test_a_store_that_cannot_be_written_ends_all_and_the_processes_too(tmp_path):
    executor, asked = Breaking({}), []

    def work(numbers):
        asked.append(numbers)
        return ["x" * 10**6]

    with Store(tmp_path / "values.sqlite") as store:
        store._db.execute("PRAGMA max_page_count = 8")
        with pytest.raises(UserError, match="full: free disk space"):
            Engine(store, executor=executor).run(items_of(work, range(9)))
    assert len(asked) == 3 and executor.stopped == [True]


def fail(numbers):
    raise UserError(f"no {numbers[0]}")


@pytest.mark.parametrize(
    "make", [ItemExecutor, pytest.param(lambda: Workers(2), marks=pytest.mark.slow)]
)
def test_what_follows_from_jobs_is_computed_and_shared(make):
    order, said, offset = [], [], 0
    with make() as executor:
        engine = Engine(executor=executor)

        def job(name, numbers, *steps):
            def then(error):
                assert error is None and all(engine.store.get({"square": n}) == n for n in numbers)
                order.append(name)
                return [job(name, *steps)] if steps else []

            return Job(items_of(lambda each: [n + offset for n in each], numbers), then)

        def noted(error):
            said.append(str(error))
            return ()

        shared = [Job(items_of(fail, [7]), noted) for _ in range(2)]
        jobs = [job("a", [1], [2]), job("b", [1], [3], [1, 2]), *shared, job("c", [4]), Job([])]
        engine.follow(jobs)
    assert sorted(order) == [*"aabbbc"] and said == ["item 7: no 7"] * 2
    if make is ItemExecutor:  # what follows comes first
        assert order == [*"aabbbc"]


def killing(folder):
    """Work on the numbers 0 to 7; some kill their processes, and each leaves a file a try."""

    def work(numbers):
        tries = len([*folder.glob(f"{numbers[0]}.*")])
        (folder / f"{numbers[0]}.{tries}").touch()
        if numbers == [1] or (numbers == [3] and tries < 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if numbers == [2]:
            raise UserError("two is wrong")
        return [number**2 for number in numbers]

    return work


def check_killing(executor, folder, store):
    """An item that kills its process three times has failed; one that does so once has not."""
    said = []
    jobs = [
        Job([item], lambda error: said.append(error and str(error)) or ())
        for item in items_of(killing(folder), range(8))
    ]
    Engine(store, executor=executor).follow(jobs)
    failures = sorted(filter(None, said))
    assert len(said) == 8 and len(failures) == 2 and failures[1] == "item 2: two is wrong"
    assert [store.get({"square": n}) for n in (0, 3, 4, 5, 6, 7)] == [0, 9, 16, 25, 36, 49]
    assert [len([*folder.glob(f"{n}.*")]) for n in range(8)] == [1, 3, 1, 2, 1, 1, 1, 1]
    return failures[0]


@pytest.mark.slow
def test_killed_processes_are_replaced_and_a_killer_is_named(tmp_path):
    with Store(tmp_path / "values.sqlite") as store, Workers(2, logs=tmp_path / "logs") as executor:
        said = check_killing(executor, tmp_path, store)
        assert said.startswith("item 1: its process was ended 3 times, perhaps for lack of memory")


@pytest.mark.slow
def test_a_process_that_is_killed_within_its_result_is_missed():
    def work(numbers):
        whole = Connection._send_bytes

        def half(pipe, content):
            if len(content) < 10**6:
                return whole(pipe, content)
            pipe._send(struct.pack("!i", len(content)) + bytes(content[:100_000]))
            os.kill(os.getpid(), signal.SIGKILL)

        Connection._send_bytes = half
        return [" " * 10**6]

    with Workers(1) as executor, pytest.raises(BrokenProcessPool):
        executor.submit(work, [0]).result(timeout=120)


def test_ctrl_c_leaves_a_process_that_has_just_started_to_its_driver():
    """A terminal sends it to both; where it met the import of torch there was a traceback."""
    with Workers(1) as executor:
        future = executor.submit(lambda numbers: numbers, [0])
        (worker,) = executor._workers
        (process,) = worker.pool._processes
        os.kill(process, signal.SIGINT)
        values, _ = future.result(timeout=120)
    assert values == [0]


@pytest.mark.slow
def test_processes_end_with_what_started_them_and_keep_what_failed_in_their_logs(tmp_path):
    log = tmp_path / "logs" / "item-0.log"

    def work(numbers):
        (tmp_path / str(os.getpid())).touch()
        if numbers == [0]:
            raise ZeroDivisionError("as it happens")
        while not (log.exists() and log.read_text().count("Error: as it happens") == 3):
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        return numbers

    executor = Workers(2, logs=tmp_path / "logs")
    with pytest.raises(KeyboardInterrupt), executor:
        Engine(executor=executor).run(items_of(work, range(2)))
    processes = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\[ray\]"):
        OnRay()


def test_an_address_without_a_cluster_is_one_line():
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"Ray at 127\.0\.0\.1:9 does not answer: .*refused"):
        OnRay("127.0.0.1:9")


@pytest.mark.slow
def test_on_ray_values_are_the_same_and_a_killer_is_named(ray, tmp_path):
    with Store(tmp_path / "values.sqlite") as store:
        assert check_killing(OnRay(), tmp_path, store).startswith("item 1: unexpected W")


@pytest.mark.slow
def test_an_interruption_reaches_what_ray_computes(ray, tmp_path):
    def work(numbers):
        (tmp_path / "started").touch()
        try:
            for _ in range(600):
                time.sleep(0.1)
        except KeyboardInterrupt:  # as a training that saves its step
            time.sleep(2)
            (tmp_path / "saved").touch()
            raise
        return numbers

    def interrupt():
        while not (tmp_path / "started").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        Engine(executor=OnRay()).run(items_of(work, range(1)))
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_what_ray_does_not_have_is_one_line(ray):
    with pytest.raises(UserError, match="an item needs 9 CPUs and Ray has 2"):
        OnRay(num_cpus=9)
    with pytest.raises(UserError, match="an item needs 4 GPUs and Ray has 0"):
        OnRay(num_gpus=4)
