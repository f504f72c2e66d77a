"""The types of `gradaccum.wrap`. Through them a type checker knows each framework's
wrapped optimizer, and at run time no framework is imported.
"""

from collections.abc import Callable
from typing import Any, Protocol, Unpack, overload

from gradaccum.registry import Steps
from gradaccum_jax.backend import JaxOptions, Wrapped
from gradaccum_mindspore import AccumulatingOptimizer as MindSporeOptimizer
from gradaccum_mindspore.backend import MindSporeOptions
from gradaccum_torch import AccumulatingOptimizer as TorchOptimizer
from gradaccum_torch.backend import TorchOptions

class _TorchOptimizer(Protocol):
    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...

class _OptaxTransformation(Protocol):
    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...

class _MindSporeOptimizer(Protocol):
    def construct(self, *gradients: Any) -> Any: ...

class _Scheduler(Protocol):
    optimizer: Any

    def step(self) -> Any: ...

# MindSpore comes first, because its cells have any attribute that a type checker asks
# for, so they would also match torch's protocol.
@overload
def wrap(
    optimizer: _MindSporeOptimizer, steps: Steps, **options: Unpack[MindSporeOptions]
) -> MindSporeOptimizer: ...
@overload
def wrap(
    optimizer: _TorchOptimizer, steps: Steps, **options: Unpack[TorchOptions]
) -> TorchOptimizer: ...
@overload
def wrap(
    optimizer: _OptaxTransformation, steps: Steps, **options: Unpack[JaxOptions]
) -> Wrapped: ...
@overload
def wrap(optimizer: _Scheduler) -> Any: ...
