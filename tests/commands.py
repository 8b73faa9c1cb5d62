"""Commands as a user runs them, in this process."""

from coca_lab.cli import main


def run(capsys, *words) -> tuple[int, str, str]:
    """Exit code, output and error output of ``coca`` with these words."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
