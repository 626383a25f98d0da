"""Calls for code under torch.compile: made between two graphs, nothing inside them traced.

A module of its own because `torch.compiler.disable` loads the compiler, which takes a second: it is imported while a
graph is traced, when the compiler is there anyway.
"""

import torch


@torch.compiler.disable
def call(function, *args, **kwargs):
    """Returns function(*args, **kwargs)."""
    return function(*args, **kwargs)
