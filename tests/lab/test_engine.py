"""Items of work in this process and on Ray: values are kept, failures named, nothing lost."""

import os
import signal
import sqlite3

import pytest

from coca_attention.errors import UserError
from coca_lab import cluster
from coca_lab.cluster import RayEngine
from coca_lab.engine import Engine, Item
from coca_lab.processes import ProcessEngine
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
    assert asked == [[0], [1], [2], [5]]  # of a batch, what is missing
    assert [(done, total) for _, done, total in seen[:6]] == [
        (0, 30), (10, 30), (20, 30), (30, 30), (30, 40), (40, 40),
    ]  # fmt: skip
    assert seen[6:] == [("1 of 1 values", 10, 10)]  # one item, though named twice
    assert seen[3][0] == "3 of 3 values, item 2"


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


def noted(items, said):
    """A job that notes why its items have failed."""
    try:
        yield items, lambda *_: None
    except UserError as error:
        said.append(str(error))


def fail(numbers):
    raise UserError(f"no {numbers[0]}")


@pytest.mark.parametrize(
    "make", [Engine, pytest.param(lambda: ProcessEngine(processes=2), marks=pytest.mark.slow)]
)
def test_jobs_go_on_with_what_follows_and_share_what_they_ask_for(make):
    engine, order, said, offset = make(), [], [], 0

    def job(name, *steps):
        for numbers in steps:
            yield items_of(lambda each: [n + offset for n in each], numbers), lambda *_: None
            order.append(name)
            assert all(engine.store.get({"square": n}) == n for n in numbers)

    shared = [noted(items_of(fail, numbers), said) for numbers in ([7], [7])]
    jobs = [job("a", [1], [2]), job("b", [1], [3], [1, 2]), *shared, job("c", [4]), job("d")]
    engine.follow(jobs)
    assert sorted(order) == [*"aabbbc"] and said == ["item 7: no 7"] * 2
    if make is Engine:  # what follows comes first
        assert order == [*"ababbc"]


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\[ray\]"):
        RayEngine()


def test_an_address_without_a_cluster_is_one_line():
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"Ray at 127\.0\.0\.1:9 does not answer: .*refused"):
        RayEngine(address="127.0.0.1:9")


@pytest.mark.slow
def test_on_ray_values_are_the_same_and_a_killer_is_named(ray, tmp_path):
    """An item that kills its process three times has failed; one that does so once has not."""
    count = tmp_path / "count"
    count.mkdir()

    def work(numbers):
        (count / f"{numbers[0]}.{len(list(count.glob(f'{numbers[0]}.*')))}").touch()
        if numbers == [1] or (numbers == [3] and len(list(count.glob("3.*"))) < 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if numbers == [2]:
            raise UserError("two is wrong")
        return [number**2 for number in numbers]

    items = items_of(work, range(8))
    with Store(tmp_path / "values.sqlite") as store:
        said = []
        RayEngine(store).follow([noted([item], said) for item in items])
        assert sorted(said)[1] == "item 2: two is wrong"
        assert sorted(said)[0].startswith("item 1: unexpected W") and len(said) == 2
        assert [store.get({"square": n}) for n in (0, 3, 4, 5, 6, 7)] == [0, 9, 16, 25, 36, 49]
    times = [len(list(count.glob(f"{n}.*"))) for n in range(8)]
    assert times == [1, 3, 1, 2, 1, 1, 1, 1]


@pytest.mark.slow
def test_what_ray_does_not_have_is_one_line(ray):
    with pytest.raises(UserError, match="an item needs 9 CPUs and Ray has 2"):
        RayEngine(num_cpus=9)
    with pytest.raises(UserError, match="an item needs 4 GPUs and Ray has 0"):
        RayEngine(num_gpus=4)
