"""The commands by subject: each parses words, calls a public function and prints its result."""

from bothways.cli.main import app as app
