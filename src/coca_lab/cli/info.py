"""The command ``coca info``."""

from coca_lab.cli.console import parse


def run_info(words: list[str]) -> None:
    """Say what this machine has, or what the folder of a model or a run holds."""
    from coca_lab.info import machine, model_folder

    paths = [word for word in words[:1] if not word.startswith("-")]
    leading = {"[MODEL]": "Folder of a model or a run; without one, this machine is described."}
    parse("coca info", run_info, words[len(paths) :], [], leading=leading)
    rows = model_folder(paths[0]) if paths else machine()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
