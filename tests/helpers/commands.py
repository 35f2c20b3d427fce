"""Command lines, run in the process of a test."""

from bothways.cli.main import app


def run_line(*words: object) -> None:
    """Run `bothways WORDS`; its mistakes are raised, and Ctrl-C."""
    app([*map(str, words)], result_action="return_value")
