"""The one exception that the command line turns into a single line and exit code 2."""


class UserError(ValueError):
    """Something outside the program is wrong: a file, a setting, an argument.

    The message says what was expected, what came, and what to do.
    """
