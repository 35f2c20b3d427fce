"""The papers' tables, sweeps and significance, the first run, speed comparisons."""
