"""The commands: one file per command, which parses, calls a public function and prints."""

from bothways.cli.main import app as app
