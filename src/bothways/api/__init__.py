"""The public functions: the steps from text to predictions, one function each.

They accept what users have (paths, strings, rows, DataFrames, data sets) and call the packages
that do the work. Whatever a command does, one of these functions does in Python.

It may import all packages but `bothways.cli`.
"""
