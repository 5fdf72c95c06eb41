"""Optimizers that torch lacks and whose update rules the core has."""

from fp16core.optim.lion import Lion

__all__ = ["Lion"]
