"""The largest micro-batch that fits, decided before anything runs.

XLA knows the memory of a compiled program: the whole batch is compiled, then half of
it, and so on, until a program is within the limit. If the device runs out all the same,
the size is halved again. Several processes decide alike by the user's limit.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np

from gradaccum import ArgumentTypeError, AutoMicroBatchSize
from gradaccum.kit import explain, unknown_limit_error
from gradaccum_jax.arrays import Array, Tree, is_constant, typeof
from gradaccum_jax.large_batch.batch import Source, Splitting, make_batch
from gradaccum_jax.xla import call_jitted

_NUMBERS: Iterator[int] = itertools.count()


class Fitting:
    """The programs of one call, compiled for the sizes that were tried."""

    def __init__(
        self, jitted: Any, splitting: Splitting, sizes: AutoMicroBatchSize
    ) -> None:
        self._jitted = jitted
        self._splitting = splitting
        self._sizes = sizes
        # An address would come again: the process's own sizes outlive this call.
        self._number = next(_NUMBERS)
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, given: Tree, batch: tuple[Tree, ...]) -> Any:
        _require_concrete(given, batch)
        items = max(1, make_batch(batch, self._splitting.axes).items)
        if self._sizes.memory_limit is not None:
            limit = self._sizes.memory_limit
        else:
            limit = _free_bytes((given, batch))
        key = (
            self._number,
            jax.tree.structure((given, batch)),
            *map(_type_of, jax.tree.leaves((given, batch))),
        )
        size = self._sizes.start(key, items)
        failure = None
        while True:
            made, failure = self._attempt(
                (key, size), given, self._source(batch, size), limit
            )
            if failure is None:
                self._sizes.remember(key, size)
                return made
            try:
                size = self._sizes.after_failure(size)
            # no size is left; JAX's own error, if there was one, is the cause
            except Exception as error:
                raise error from (failure if isinstance(failure, Exception) else None)

    def _attempt(
        self, name: Hashable, given: Tree, source: Source, limit: int
    ) -> tuple[Any, Exception | str | None]:
        """Return the result and None, or None and why it did not fit, without the
        error's frames, which hold arrays.
        """
        try:
            known = self._programs.get(name)
            if known is not None:
                return known(given, source), None
            compiled = self._compiled(given, source)
            need = _bytes_of(compiled, (given, source))
            if need > limit:
                return None, f"{need} bytes"
            # A device may tell that memory ran out only at the end.
            made = _awaited(compiled(given, source))
        except jax.errors.JaxRuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._programs.pop(name, None)
            return None, error.with_traceback(None)
        self._programs[name] = compiled
        return made, None

    def _source(self, batch: tuple[Tree, ...], size: int) -> Source:
        return self._splitting.source(
            batch, division=self._splitting.division._replace(micro_batch_size=size)
        )

    def _compiled(self, given: Tree, source: Source) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return self._jitted.lower(given, source).compile()


def _awaited(made: Any) -> Any:
    library: Any = jax
    return library.block_until_ready(made)


def _is_out_of_memory(error: Exception) -> bool:
    """True if the error is GPU's or TPU's RESOURCE_EXHAUSTED, or XLA:CPU's INTERNAL
    with "Out of memory allocating ... bytes".
    """
    return (
        str(error).startswith("RESOURCE_EXHAUSTED")
        or "out of memory" in str(error).lower()
    )


def fitting(jitted: Any, splitting: Splitting) -> Fitting | None:
    """Return the `Fitting` of a call with an automatic size; None for any other."""
    sizes = splitting.division.micro_batch_size
    if isinstance(sizes, AutoMicroBatchSize):
        return Fitting(jitted, splitting, sizes)
    return None


def _bytes_of(compiled: Any, arguments: Tree) -> int:
    """Return the bytes that a run needs beside arguments on the device already, on the
    device that needs most.
    """
    stats = compiled.memory_analysis()
    moved = sum(
        np.asarray(leaf).nbytes
        for leaf in jax.tree.leaves(arguments)
        if not isinstance(leaf, jax.Array)
    )
    return (
        int(
            stats.temp_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
            + stats.generated_code_size_in_bytes
        )
        + moved
    )


def _free_bytes(arguments: Tree) -> int:
    if jax.process_count() > 1:
        raise unknown_limit_error(
            f"{jax.process_count()} processes, each with free memory of its own"
        )
    return min(_free_of(device) for device in _devices_of(arguments))


def _devices_of(arguments: Tree) -> set[Any]:
    """Return the devices that hold the arrays, or the first device."""
    arrays = [
        leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)
    ]
    return {device for leaf in arrays for device in leaf.devices()} or {
        jax.devices()[0]
    }


def _free_of(device: Any) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise unknown_limit_error(f"{device.device_kind} ({device.platform})")
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def _type_of(leaf: Array) -> Hashable:
    """Return what a program is compiled for: a constant's value, an array's type."""
    if is_constant(leaf):
        return type(leaf), leaf
    return typeof(leaf), getattr(leaf, "sharding", None)


def _require_concrete(given: Tree, batch: Tree) -> None:
    """Raise unless all values are data: a surrounding program's memory is known only
    when that program is compiled.
    """
    traced = [
        leaf
        for leaf in jax.tree.leaves((given, batch))
        if isinstance(leaf, jax.core.Tracer)
    ]
    others = [
        leaf
        for leaf in jax.tree.leaves(given)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
    ]
    if traced or others:
        fix = (
            "Call it outside of jax.jit, as it compiles itself, with arrays; or write a"
            " number of items."
        )
        if traced:
            found = f"a traced one: {traced[0]}"
        else:
            found = f"a {type(others[0]).__name__}"
        raise explain(
            ArgumentTypeError,
            "micro_batch_size",
            expected="concrete arrays beside an automatic size",
            found=found,
            fix=fix,
        )


# The call that takes a large batch: it compiles itself for the sizes of micro-batch
# that are asked for, and runs.


class Call(ABC):
    """A function of given arguments and a batch."""

    splitting: Splitting

    @abstractmethod
    def _run(self, given: Any, source: Source) -> Any:
        """Run on a batch that is cut."""

    def _bound(self, keywords: dict[str, Any], make: Callable[..., Any]) -> Any:
        """Return the call that `make` makes of `keywords`: constants, with a program
        for each of their values.
        """
        for name, value in keywords.items():
            _require_constant(name, value)
        key = tuple((name, type(value), value) for name, value in keywords.items())
        if key not in self._by_keywords:
            self._by_keywords[key] = make(keywords)
        return self._by_keywords[key]

    @cached_property
    def _by_keywords(self) -> dict[Hashable, Any]:
        return {}

    def _of_batch(self, given: Any, batch: tuple[Tree, ...]) -> Any:
        if self._fitting:
            return self._fitting(given, batch)
        source = self.splitting.source(batch, given)
        return call_jitted(self._jitted, self._run, given, source)

    @cached_property
    def _fitting(self) -> Fitting | None:
        return fitting(self._jitted, self.splitting)

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self._run)


def _require_constant(name: str, value: object) -> None:
    try:
        is_constant = hash(value) is not None and not hasattr(value, "dtype")
    except TypeError:
        is_constant = False
    if not is_constant:
        fix = (
            "Pass arrays and random keys by position, as a part of the batch; axes=None"
            " for what every micro-batch is given whole."
        )
        raise explain(
            ArgumentTypeError,
            name,
            expected="a constant, such as True, by keyword",
            found=f"a {type(value).__name__}",
            fix=fix,
        )
