"""Faults in the large batch in one call. Most are of hand-written loops that split a batch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from gradaccum import ArgumentValueError

from .planting import SELECTED, Module, mutant

Plant = Callable[[Module], None]


def caught_by(test: str) -> Callable[[Plant], Plant]:
    """Register a fault in the example's `plain_large_batch`, and the tests of the suite that are to catch it."""

    def register(plant: Plant) -> Plant:
        def planted(m: Module) -> None:
            plant(import_module("plain_large_batch"))

        planted.__name__ = plant.__name__
        SELECTED[plant.__name__] = ("-k", f"(test_one_call or test_coupled) and {test}")
        mutant(planted)
        return plant

    return register


def change_parts(m: Module, change: Callable[[list[Any]], list[Any]]) -> None:
    """Let every call see other micro-batches."""
    original = m.micro_batches
    m.micro_batches = lambda *arguments, **how: change(list(original(*arguments, **how)))


@caught_by("test_gradient_of_the_large_batch")
def mean_of_the_means(m: Module) -> None:
    """Each micro-batch counts alike, the last short one too."""
    change_parts(m, lambda parts: [(part, items, 1.0) for part, items, _ in parts])


@caught_by("test_gradient_of_the_large_batch")
def drop_the_short_last_micro_batch(m: Module) -> None:
    change_parts(m, lambda parts: [p for p in parts if p[1] == parts[0][1]])


@caught_by("test_gradient_of_the_large_batch")
def begin_each_micro_batch_an_item_early(m: Module) -> None:
    def divided(*arguments: Any) -> Any:
        return [cut._replace(start=max(cut.start - 1, 0)) for cut in original(*arguments)]

    original, m.divided = m.divided, divided


@caught_by("test_last_batch_of_fewer_items_than_steps")
def refuse_more_steps_than_items(m: Module) -> None:
    def divided(division: Any, items: int, weights: Any) -> Any:
        if (division.steps or 0) > items:
            raise ArgumentValueError("more steps than items")
        return original(division, items, weights)

    original, m.divided = m.divided, divided


@caught_by("test_list_as_long_as_the_batch")
def believe_a_list_to_hold_all_items(m: Module) -> None:
    m.mark_lists = lambda batch, axes: (batch, [])


@caught_by("test_weights_of_items")
def count_items_in_place_of_weights(m: Module) -> None:
    change_parts(m, lambda parts: [(part, items, float(items)) for part, items, _ in parts])


@caught_by("test_every_mode")
def divide_a_sum(m: Module) -> None:
    """By the number of items, as a mean is."""
    make_options = m.make_options
    m.make_options = lambda steps, reduction: make_options(steps, reduction="item_mean" if reduction == "sum" else reduction)


@caught_by("test_outputs_merge")
def mean_output_of_equal_micro_batches(m: Module) -> None:
    original = m.Outputs.add
    m.Outputs.add = lambda self, given, items, weight: original(self, given, 1, weight)


@caught_by("test_outputs_merge")
def last_output_only(m: Module) -> None:
    m.Outputs.joined = lambda self, kind, so_far, more: more


@caught_by("test_largest_of_negative_outputs")
def largest_from_zero(m: Module) -> None:
    m.Ops.maximum = lambda a, b: np.maximum(np.maximum(a, b), 0)


@caught_by("test_one_call_window")
def close_the_window_at_each_micro_batch(m: Module) -> None:
    step: Any = None

    def update(optimizer: Any, loss_fn: Any, batch: Any, **arguments: Any) -> Any:
        nonlocal step
        step = optimizer.step
        optimizer.step = lambda gradient, weight: (step(gradient, weight), optimizer.flush())
        try:
            return original(optimizer, loss_fn, batch, **arguments)
        finally:
            optimizer.step = step

    original, m.update = m.update, update


@caught_by("test_weight_by_a_function")
def ask_no_function_for_weights(m: Module) -> None:
    m.weight_of = lambda part, weight: float(len(part[0]))


@caught_by("test_own_split")
def divide_what_the_user_has_divided(m: Module) -> None:
    own_parts = m.own_parts
    m.own_parts = lambda split, batch, steps: [tuple(leaf[:1] for leaf in part) for part in own_parts(split, batch, steps)]


@caught_by("test_weight_zero_adds_nothing")
def multiply_by_a_weight_of_zero(m: Module) -> None:
    def add(self: Any, loss: Any, gradient: Any, weight: float) -> None:
        original(self, loss, {name: g * (1 if weight else 0) for name, g in gradient.items()}, weight or 1e-300)

    original, m.Total.add = m.Total.add, add


@caught_by("test_error_of_the_loss_passes")
def count_micro_batches_before_all_are_there(m: Module) -> None:
    def update(optimizer: Any, loss_fn: Any, batch: Any, **arguments: Any) -> Any:
        optimizer.step({name: np.zeros_like(p) for name, p in optimizer.optimizer.parameters.items()}, 1.0)
        return whole(optimizer, loss_fn, batch, **arguments)

    whole, m.update = m.update, update


@caught_by("test_loss_function_that_returns_something_else")
def believe_every_loss(m: Module) -> None:
    m.checked = lambda returned, declared: returned


@caught_by("test_one_call_window")
def forget_the_weights_of_a_window(m: Module) -> None:
    def update(optimizer: Any, loss_fn: Any, batch: Any, **arguments: Any) -> Any:
        step = optimizer.step
        optimizer.step = lambda gradient, weight: step(gradient)
        try:
            return original(optimizer, loss_fn, batch, **arguments)
        finally:
            optimizer.step = step

    original, m.update = m.update, update


@caught_by("test_gradient_of_the_large_batch and contrast")
def temperature_once_per_micro_batch(m: Module) -> None:
    """As OpenCLIP's first accumulation had it: the loss's own parameter is differentiated in every backward pass."""
    original = m.coupled_value_and_grad

    def changed(outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any) -> Any:
        parts = len(list(m.micro_batches(batch, None, **how)))
        loss, gradient = original(outputs_fn, loss_fn, batch, **how)
        return loss, gradient | {"temperature": parts * gradient["temperature"]}

    m.coupled_value_and_grad = changed


@caught_by("test_gradient_of_the_large_batch and covariance")
def couple_within_micro_batches_only(m: Module) -> None:
    original = m.coupled_value_and_grad

    def changed(outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any) -> Any:
        parts = [part for part, *_ in m.micro_batches(batch, None, **how)]
        made = [original(outputs_fn, loss_fn, part, steps=1) for part in parts]
        return np.mean([loss for loss, _ in made]), {n: np.mean([g[n] for _, g in made], axis=0) for n in made[0][1]}

    m.coupled_value_and_grad = changed


@caught_by("test_gradient_of_the_large_batch and contrast")
def gradient_of_the_first_micro_batch_for_all(m: Module) -> None:
    """The second pass forgets to move on."""
    original = m.coupled_value_and_grad

    def changed(outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any) -> Any:
        def shifted(outputs: Any) -> Any:
            loss, gradients, own = loss_fn(outputs)
            size = parts[0][1]
            return loss, {n: np.concatenate([g[:size]] * len(parts))[: len(g)] for n, g in gradients.items()}, own

        parts = list(m.micro_batches(batch, None, **how))
        return original(outputs_fn, shifted, batch, **how)

    m.coupled_value_and_grad = changed
