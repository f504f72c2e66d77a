"""The words of this package's type hints. The compiler reads no hint, so one hint serves Python's side of a window and the compiled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from numpy.typing import NDArray

Array = NDArray[Any]
"""The memory of a Tensor, as NumPy reads it."""
DType: TypeAlias = ms.Type
"""A dtype of MindSpore's, such as ``mindspore.float32``."""
Number = float | Tensor
"""A Python number, or a Tensor of one element."""
Weight = Number | None
"""How many items a micro-batch has; None stands for 1."""
Loss = Number | None
"""The loss of a micro-batch, not scaled; None if it is not told."""
Sums = Sequence[Parameter]
"""One sum per parameter of the model, in their order."""
Gradients = Sequence[Tensor | None]
"""One gradient per parameter, in their order; None for a parameter that took no part."""
NamedGradients = Mapping[str, Tensor | None]
"""Gradients by the parameter's name."""
Sizes = int | tuple[tuple[int, int], ...] | Callable[[Any], Any]
"""The sizes of windows: one, pairs, or a function of the optimizer step."""
Optimizer = nn.Optimizer | optim.Optimizer
"""An optimizer of MindSpore's, of either family."""
Shape = tuple[int, ...]
Spec = tuple[str, Shape, DType]
"""(name, shape, dtype) of a parameter of the model."""
Specs = tuple[Spec, ...]
Saved = Mapping[str, Parameter | Tensor]
"""A checkpoint as `mindspore.load_checkpoint` returns it, by the Parameter's name."""
