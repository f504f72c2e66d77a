"""Lets torchvision be imported beside a torch of another build, as in a venv with the
CPU build of torch and PyPI's torchvision.

Lightning (through torchmetrics) and timm import torchvision. Its compiled operators do
not load there, and its Python code then fails as it names two of them. No test here
calls an operator of torchvision, so declarations without a kernel are enough: importing
this makes them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

NAMES = ("nms", "qnms")


def declare() -> Any:
    """Declare the operators that torchvision names as it is imported, unless it is
    whole or missing.
    """
    if find_spec("torchvision") is None:
        return None
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in NAMES:
            library.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return library
    return None


LIBRARY = declare()
"""Kept alive: a library takes its declarations with it."""
