"""The laboratory: training, evaluation, studies, reports, and the command coca."""


def main() -> int:
    """The command ``coca``."""
    from coca_lab.cli import main as command  # the other parts do not need it

    return command()
