"""Faults in a window that several workers share. Most were made by real programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .planting import SELECTED, Module, around, mutant

Plant = Callable[[Module], None]
Sums = dict[str, Any]


def caught_by(test: str) -> Callable[[Plant], Plant]:
    """Register a fault, and the tests of the suite that are to catch it."""

    def register(plant: Plant) -> Plant:
        SELECTED[plant.__name__] = ("-k", f"test_workers and {test}")
        return mutant(plant)

    return register


def watch(m: Module) -> None:
    """Keep, in each accumulation, its sums as they were before its last micro-batch and
    after its first.
    """

    def watched(step: Any, self: Any, *given: Any) -> None:
        self.before = self.total()
        if self.machine.micro_step == 1:
            self.first = self.total()
        step(self, *given)

    m.Accumulation.before = m.Accumulation.first = None
    around(m.Accumulation, "step", watched)


def change_join(m: Module, changed: Callable[[Any, Callable[[], None]], None]) -> None:
    """Replace the exchange; `changed(accumulation, join)` may call the original one."""

    def joined(original: Any, self: Any) -> int:
        counted: list[int] = []
        changed(self, lambda: counted.append(original(self)))
        return counted[-1]

    around(m.Accumulation, "_join", joined)


def change_joined(m: Module, change: Callable[..., dict[str, Any]]) -> None:
    """Replace fields of the state of all workers; `change(own, weight, overflow)` names
    them.
    """
    m.joined = lambda own, weight, overflow: own._replace(
        **{"weight": weight, "overflow": overflow, **change(own, weight, overflow)}
    )


def last_term(self: Any) -> Sums:
    return (
        {name: total - self.before[name] for name, total in self.sums.items()}
        if self.before
        else self.sums
    )


@caught_by("test_gradient_is_that_of_all_workers")
def reduce_the_last_micro_batch_only(m: Module) -> None:
    watch(m)

    def changed(self: Any, join: Callable[[], None]) -> None:
        self.sums = last_term(self)
        join()

    change_join(m, changed)


@caught_by("test_gradient_is_that_of_all_workers")
def reduce_the_first_micro_batch_only(m: Module) -> None:
    watch(m)

    def changed(self: Any, join: Callable[[], None]) -> None:
        self.sums = self.first or self.sums
        join()

    change_join(m, changed)


@caught_by("test_full_windows_need_no_flush")
def add_the_last_micro_batch_after_the_reduction(m: Module) -> None:
    watch(m)

    def changed(self: Any, join: Callable[[], None]) -> None:
        own = last_term(self)
        self.sums = self.before or self.sums
        join()
        self.sums = {name: total + own[name] for name, total in self.sums.items()}

    change_join(m, changed)


@caught_by("test_gradient_is_that_of_all_workers and mean")
def average_the_workers(m: Module) -> None:
    """As DistributedDataParallel does: right only while all have the same weight."""

    def changed(self: Any, join: Callable[[], None]) -> None:
        own = self.machine.weight or 1.0
        self.sums = {
            name: (total / own).astype(total.dtype) for name, total in self.sums.items()
        }
        join()
        self.sums = {
            name: (total * self.machine.weight / self.workers.workers).astype(
                total.dtype
            )
            for name, total in self.sums.items()
        }

    change_join(m, changed)


@caught_by("test_one_worker_drops_a_micro_batch")
def keep_the_overflow_to_oneself(m: Module) -> None:
    change_joined(m, lambda own, weight, overflow: {"overflow": own.overflow})


@caught_by("test_limits_are_of_the_reduced_norm")
def measure_the_norm_of_one_worker(m: Module) -> None:
    measure = m.measure

    def changed(self: Any, join: Callable[[], None]) -> None:
        own = measure(self.sums)
        join()
        m.measure = lambda sums: own

    change_join(m, changed)


@caught_by("test_overflow_on_one_worker")
def judge_overflow_before_the_reduction(m: Module) -> None:
    measure = m.measure

    def changed(self: Any, join: Callable[[], None]) -> None:
        finite = measure(self.sums)[1]
        join()
        m.measure = lambda sums: (measure(sums)[0], finite)

    change_join(m, changed)


@caught_by("test_window_leaves_nothing_to_the_next")
def reduce_into_the_last_window(m: Module) -> None:
    """A buffer for the reduction that nobody clears."""

    def changed(self: Any, join: Callable[[], None]) -> None:
        join()
        buffer = getattr(self, "buffer", {})
        self.buffer = {
            name: total + buffer.get(name, 0) for name, total in self.sums.items()
        }
        self.sums = {name: total.copy() for name, total in self.buffer.items()}

    change_join(m, changed)


@caught_by("test_gradient_is_that_of_all_workers and mean")
def divide_by_the_weight_of_one_worker(m: Module) -> None:
    change_joined(m, lambda own, weight, overflow: {"weight": own.weight})


@caught_by("test_gradient_is_that_of_all_workers and mean")
def update_the_first_worker_only(m: Module) -> None:
    def changed(self: Any, join: Callable[[], None]) -> None:
        join()
        if self.workers.rank > 0:
            self.optimizer.step = lambda gradient: None

    change_join(m, changed)


@caught_by("test_worker_without_micro_batches")
def leave_out_the_window_of_others(m: Module) -> None:
    """A worker that has nothing in the window takes part in the exchange, and then
    forgets it.
    """

    def changed(self: Any, join: Callable[[], None]) -> None:
        had = self.machine.micro_step
        join()
        if had == 0:
            self.machine = self.machine._replace(micro_step=0)

    change_join(m, changed)


@caught_by("test_half_precision_gradients")
def reduce_in_half_precision(m: Module) -> None:
    def changed(self: Any, join: Callable[[], None]) -> None:
        if self.optimizer.parameters["0.weight"].dtype == ml_dtypes.bfloat16:
            self.sums = {
                name: total.astype(ml_dtypes.bfloat16).astype(np.float32)
                for name, total in self.sums.items()
            }
        join()

    change_join(m, changed)
