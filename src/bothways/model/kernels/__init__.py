"""Kernels: compiled code for what PyTorch has no fast operators for on a CPU, and the fallbacks.

Each module has one subject, its compiled kernel and the PyTorch operators that compute the same
elsewhere; a table in its docstring says which input goes where. May import `core`.
"""
