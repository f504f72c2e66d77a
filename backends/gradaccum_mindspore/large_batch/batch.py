"""The options of a call with a large batch, and the split into micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
from mindspore import Tensor, nn

from gradaccum import ArgumentTypeError, kit
from gradaccum.kit import Division, MicroBatch, Nest, Options
from gradaccum_mindspore.mindspore_private import is_graph_mode

Batch = tuple[Nest, ...]
Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""How micro-batches are weighted: by a function of the micro-batch's arguments, by a
sequence with one number per item, or by None, which gives each item weight 1.
"""


class CallOptions(NamedTuple):
    """The options of a function that processes a large batch."""

    division: Division
    reduction: Options
    """The options that determine how gradients and losses are weighted."""
    weight: Any = None
    axes: Nest = 0
    has_aux: bool = False
    merge_aux: Any = None

    def micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        large = kit.LargeBatch(batch, self.axes, self.weight)
        for micro_batch in large.micro_batches(self.division, self.reduction):
            if is_graph_mode():
                arguments = tuple(map(graph_argument, micro_batch.arguments))
                micro_batch = micro_batch._replace(arguments=arguments)
            yield micro_batch


def positional(fn: Callable[..., Any], batch: Batch, keywords: dict[str, Any]) -> Batch:
    """Return the arguments of a call as a tuple, in the order of the parameters of
    `fn`.

    Raises:
        ArgumentTypeError: one of `keywords` is a keyword-only parameter of `fn`.
    """
    if not keywords:
        return batch
    function = fn.construct if isinstance(fn, nn.Cell) else fn
    call = inspect.signature(function).bind(*batch, **keywords)
    call.apply_defaults()
    if call.kwargs:
        name = next(iter(call.kwargs))
        raise ArgumentTypeError(
            f"{name}: expected a parameter that can also be passed by position; got a"
            f" keyword-only parameter. Wrap the function: lambda x, {name}: forward(x,"
            f" {name}={name})."
        )
    return call.args


def graph_argument(argument: Nest) -> Nest:
    """Return a copy of `argument` for a function that is compiled in graph mode. The
    copy is needed because such a function cannot return a slice that shares the batch's
    memory.
    """
    leaves = [leaf.value for leaf in kit.leaves_of(argument)]
    argument = kit.mapped(
        lambda leaf: leaf.copy() if isinstance(leaf, Tensor) else leaf, argument
    )
    holds_tensors = all(isinstance(leaf, Tensor) for leaf in leaves)
    if kit.children_of(argument) and holds_tensors:
        # Graph mode treats a container of Tensors as a constant, so it would compile
        # the function again for each micro-batch.
        return ms.mutable(argument)
    return argument
