"""Analysis of a model's predictions: what it does well and badly, example by example.

May import: report, prediction, tasks and everything below.
"""
