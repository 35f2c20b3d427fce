"""Analysis of a model's predictions: errors, confusions and calibration, example by example.

May import: report, prediction, tasks and everything below.
"""
