"""The command `bothways`, which is also `python -m bothways` and what torchrun starts."""

import signal


def main() -> None:
    """Run the command line. While it is imported, Ctrl-C ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not if the shell lets Ctrl-C be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bothways.cli.main import run_command_line

    signal.signal(signal.SIGINT, handler)
    run_command_line()


if __name__ == "__main__":
    main()
