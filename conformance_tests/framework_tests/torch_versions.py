"""Limits of older torch, declared by its version."""

from __future__ import annotations

import torch


def has_torch(least: str) -> bool:
    """True if the installed torch is of version `least`, as ``"2.8"``, or newer."""
    installed = torch.__version__.split("+")[0].split(".")[:2]
    return tuple(map(int, installed)) >= tuple(map(int, least.split(".")))
