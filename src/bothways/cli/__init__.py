"""The command line: one file per command, on top of the public functions."""
