"""Compile a function of a large batch, and find the largest micro-batch that fits in
memory.

XLA reports how much memory a compiled program needs. The program is compiled for the
whole batch, then for micro-batches of half the size, and so on, until it fits within
the memory limit. If the device still runs out of memory, the size is halved again. All
processes choose the same size if the user passes the limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from gradaccum import ArgumentValueError, AutoMicroBatchSize, kit
from gradaccum_jax.arrays import Tree, is_constant, typeof
from gradaccum_jax.large_batch.batch import LargeBatch, Splitting, cut_batch, read_batch
from gradaccum_jax.xla import call_jitted


@dataclass(frozen=True, eq=False)
class LargeBatchFunction(ABC):
    """The base class of functions that split a large batch into micro-batches."""

    splitting: Splitting

    @abstractmethod
    def run(self, model_arguments: Any, batch: LargeBatch) -> Any:
        """Run the function on a batch that `cut_batch` has split into micro-batches."""

    def call(
        self,
        model_arguments: Any,
        arguments: tuple[Tree, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Split the batch into micro-batches, and run the compiled function on them."""
        batch = read_batch(arguments, keywords, self.splitting)
        sizes = self.splitting.division.micro_batch_size
        if isinstance(sizes, AutoMicroBatchSize):
            return self._size_search(sizes, model_arguments, batch)
        size = kit.divided(self.splitting.division, batch.items)[0].items
        batch = cut_batch(batch, size, model_arguments)
        return call_jitted(self._jitted, model_arguments, batch)

    @cached_property
    def _size_search(self) -> SizeSearch:
        return SizeSearch(self._jitted)

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self.run)


class SizeSearch:
    """The search for the largest micro-batch size that fits in memory, with the
    programs that were compiled for the sizes tried.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.programs: dict[Hashable, Callable[..., Any]] = {}
        self.identity = object()
        """A part of the key under which an `AutoMicroBatchSize` stores a size. It
        identifies the function `jitted`, because several functions may use the same
        `AutoMicroBatchSize`. It is not an ``id()``, because Python may reuse the
        ``id()`` of a deleted object.
        """

    def __call__(
        self, sizes: AutoMicroBatchSize, model_arguments: Tree, batch: LargeBatch
    ) -> Any:
        limit = sizes.memory_limit
        if limit is None:
            limit = free_bytes((model_arguments, batch))
        leaves, structure = jax.tree.flatten((model_arguments, batch))
        key = (self.identity, structure, *map(_type_of, leaves))

        def attempt(size: int, smaller_size: int) -> Any:
            small_batch = cut_batch(batch, size, model_arguments)
            try:
                return self.attempt((key, size), model_arguments, small_batch, limit)
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise kit.SmallerSizeError(smaller_size) from error

        return sizes.search(key, batch.items, attempt)

    def attempt(
        self, name: Hashable, model_arguments: Tree, batch: LargeBatch, limit: int
    ) -> Any:
        """Run the function on a batch. If the program needs more than `limit` bytes,
        raise the error that the device would raise.
        """
        if name in self.programs:
            return self.programs[name](model_arguments, batch)
        program = self.compile(model_arguments, batch)
        needed_bytes = bytes_of(program, (model_arguments, batch))
        if needed_bytes > limit:
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: {needed_bytes} bytes"
            )
        # Wait for the result, because a device that runs out of memory may report this
        # only at the end of the run.
        result = jax.block_until_ready(program(model_arguments, batch))  # type: ignore[no-untyped-call]
        self.programs[name] = program
        return result

    def compile(self, model_arguments: Tree, batch: LargeBatch) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return self.jitted.lower(model_arguments, batch).compile()


def is_out_of_memory(error: Exception) -> bool:
    """True if `error` says that the device does not have enough memory. GPUs and TPUs
    raise RESOURCE_EXHAUSTED in this case, and XLA:CPU raises INTERNAL with "Out of
    memory allocating ... bytes".
    """
    message = str(error)
    return (
        message.startswith("RESOURCE_EXHAUSTED") or "out of memory" in message.lower()
    )


def bytes_of(program: Any, arguments: Tree) -> int:
    """Return the number of bytes that a run of `program` needs in addition to the
    arguments already on the device. If the devices need different amounts of memory,
    return the largest amount.
    """
    stats = program.memory_analysis()
    host_arrays = [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(arguments)
        if not isinstance(leaf, jax.Array)
    ]
    return int(
        stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.generated_code_size_in_bytes
        + sum(array.nbytes for array in host_arrays)
    )


def free_bytes(arguments: Tree) -> int:
    """Return the number of free bytes on the device with the least free memory, among
    the devices that store the arguments.
    """
    sizes = []
    for device in devices_of(arguments):
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ArgumentValueError(
                "micro_batch_size: expected a device that reports its memory limit; got"
                f" 'auto' on {device.device_kind} ({device.platform}). Write"
                " micro_batch_size=AutoMicroBatchSize(memory_limit=2 * 1024**3) with the"
                " number of bytes that the call may use, or pass a number of items."
            )
        sizes.append(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return min(sizes)


def devices_of(arguments: Tree) -> set[Any]:
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array):
            devices |= leaf.devices()
    return devices or {jax.devices()[0]}


def _type_of(leaf: Any) -> Hashable:
    """Return the properties of a leaf on which a compiled program depends: the type and
    value of a constant, or the type and sharding of an array.
    """
    if is_constant(leaf):
        return type(leaf), leaf
    return typeof(leaf), getattr(leaf, "sharding", None)
