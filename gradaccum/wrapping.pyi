"""The types of `gradaccum.wrap`. They tell a type checker which wrapped optimizer is
returned for each framework, without importing a framework at run time.
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

# MindSpore comes first, because to a type checker its cells have every attribute, so
# they would also match torch's protocol.
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
