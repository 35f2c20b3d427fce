"""The papers' tables, sweeps and significance, the first run, example data, speed comparisons."""
