"""Fuzzers: random damage to files and processes, for a bounded time (`make fuzz`)."""
