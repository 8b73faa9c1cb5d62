"""The journal of finished parts."""

import pytest

from coca_lab.evaluation.journal import Journal, fingerprint


def test_a_journal_names_its_damage(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.put({"a": 1}, {"x": 2.5})
    journal.put(["b"], [1])
    assert Journal(path).get({"a": 1}) == {"x": 2.5}
    assert Journal(path).get({"a": 2}) is None
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{broken", *lines]) + "\n")
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Journal(path)
    path.write_text(lines[0] + "\n" + lines[1][:-5])
    assert len(Journal(path)) == 1
    Journal(path).put(["c"], 3)
    assert Journal(path).get(["c"]) == 3 and len(Journal(path)) == 2
    with pytest.raises(ValueError):
        journal.put(["d"], float("nan"))
    assert Journal(path).get(["d"]) is None


def test_an_updated_repository_of_the_hub_is_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache, found = tmp_path / "models--owner--name", []
    (cache / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):  # as they are loaded
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        (cache / "refs" / "main").write_text(commit)
        found.append(fingerprint("owner/name"))
    assert found == [f"owner/name {commit * 40}" for commit in "ab"]
    with pytest.raises(ValueError, match=r"no/where: .* \(offline\)"):
        fingerprint("no/where")
