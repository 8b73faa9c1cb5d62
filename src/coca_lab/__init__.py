"""The laboratory: training, evaluation, analysis, studies, reports, and the command coca."""


def main() -> int:
    """The command ``coca``; without the extra ``lab``, one line says what to install."""
    try:
        from coca_lab import cli
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"coca: error: the command needs {error.name}: install the extra lab, for example "
            "pip install '.[lab]' in the source tree"
        ) from error
    return cli.main()
