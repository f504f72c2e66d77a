"""Faults in the large batch in one call. Most are of hand-written loops that split a
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from gradaccum import ArgumentValueError

from .planting import SELECTED, Module, around, mutants, put

Plant = Callable[[Module], None]


def caught(test: str, **plants: Plant) -> None:
    """Register faults in the example's `plain_large_batch`, and the tests of the suite
    that are to catch them.
    """
    for name, plant in plants.items():
        SELECTED[name] = ("-k", f"(test_one_call or test_coupled) and {test}")
        mutants(
            **{name: lambda m, plant=plant: plant(import_module("plain_large_batch"))}
        )


def caught_by(test: str) -> Callable[[Plant], Plant]:
    """Register a fault of several lines, as `caught` does."""
    return lambda plant: caught(test, **{plant.__name__: plant}) or plant  # type: ignore[func-returns-value]


def change_parts(m: Module, change: Callable[[list[Any]], list[Any]]) -> None:
    """Let every call see other micro-batches."""
    around(
        m,
        "micro_batches",
        lambda original, *arguments, **how: change(list(original(*arguments, **how))),
    )


def size(part_with_weight: Any) -> int:
    """The items of a micro-batch."""
    return len(part_with_weight[0][0])


caught(
    "test_gradient_of_the_large_batch",
    # Each micro-batch counts alike, the last short one too.
    mean_of_the_means=lambda m: change_parts(
        m, lambda parts: [(part, 1.0) for part, _ in parts]
    ),
    drop_the_short_last_micro_batch=lambda m: change_parts(
        m, lambda parts: [p for p in parts if size(p) == size(parts[0])]
    ),
    begin_each_micro_batch_an_item_early=lambda m: around(
        m,
        "divided",
        lambda divided, *arguments: [
            cut._replace(start=max(cut.start - 1, 0)) for cut in divided(*arguments)
        ],
    ),
)
caught(
    "test_list_as_long_as_the_batch",
    believe_a_list_to_hold_all_items=lambda m: put(
        m, lists_of_one_kind=lambda batch, axes: []
    ),
)
caught(
    "test_weights_of_items",
    count_items_in_place_of_weights=lambda m: change_parts(
        m, lambda parts: [(part, float(len(part[0]))) for part, _ in parts]
    ),
)
caught(
    "test_every_mode",
    # By the number of items, as a mean is.
    divide_a_sum_in_one_call=lambda m: around(
        m,
        "make_options",
        lambda original, steps, reduction: original(
            steps, reduction="sum_per_item" if reduction == "sum" else reduction
        ),
    ),
)
caught(
    "test_outputs_of_each_micro_batch",
    last_output_only=lambda m: put(
        m, merged=lambda auxes, weights, merge_aux: auxes[-1]
    ),
)
caught(
    "test_outputs_merged_by_a_function",
    merge_by_equal_weights=lambda m: around(
        m,
        "merged",
        lambda merged, auxes, weights, merge_aux: merged(
            auxes, [1.0] * len(weights), merge_aux
        ),
    ),
)
caught(
    "test_outputs_concatenated",
    outputs_in_reversed_order=lambda m: around(
        m,
        "merged",
        lambda merged, auxes, *others: merged(auxes[::-1], *others),
    ),
)
caught(
    "test_weight_by_a_function",
    ask_no_function_for_weights=lambda m: put(
        m, weight_of=lambda part, weight: float(len(part[0]))
    ),
)
caught(
    "test_loss_per_item",
    believe_every_loss=lambda m: put(m, checked=lambda returned, declared: returned),
)


@caught_by("test_last_batch_of_fewer_items_than_steps")
def refuse_more_steps_than_items(m: Module) -> None:
    def divided(original: Any, division: Any, items: int) -> Any:
        if (division.steps or 0) > items:
            raise ArgumentValueError("more steps than items")
        return original(division, items)

    around(m, "divided", divided)


def change_step(m: Module, change: Callable[..., Any]) -> None:
    """Let `update` call an optimizer's step through
    `change(optimizer, step, gradient, weight, loss)`.
    """

    def update(
        original: Any, optimizer: Any, loss_fn: Any, batch: Any, **arguments: Any
    ) -> Any:
        step = optimizer.step
        optimizer.step = lambda *given: change(optimizer, step, *given)
        try:
            return original(optimizer, loss_fn, batch, **arguments)
        finally:
            optimizer.step = step

    around(m, "update", update)


caught(
    "test_one_call_window",
    close_the_window_at_each_micro_batch=lambda m: change_step(
        m, lambda optimizer, step, *given: (step(*given), optimizer.flush())
    ),
    forget_the_weights_of_a_window=lambda m: change_step(
        m, lambda optimizer, step, gradient, weight, loss: step(gradient, None, loss)
    ),
)


@caught_by("test_weight_zero_adds_nothing")
def multiply_by_a_weight_of_zero(m: Module) -> None:
    def add(original: Any, self: Any, loss: Any, gradient: Any, weight: float) -> None:
        original(
            self,
            loss,
            {name: g * (1 if weight else 0) for name, g in gradient.items()},
            weight or 1e-300,
        )

    around(m.Total, "add", add)


@caught_by("test_error_of_the_loss_passes")
def count_micro_batches_before_all_are_there(m: Module) -> None:
    def update(original: Any, optimizer: Any, *given: Any, **arguments: Any) -> Any:
        optimizer.step(
            {
                name: np.zeros_like(p)
                for name, p in optimizer.optimizer.parameters.items()
            },
            1.0,
        )
        return original(optimizer, *given, **arguments)

    around(m, "update", update)


@caught_by("test_coupled and test_gradient_of_the_large_batch")
def temperature_once_per_micro_batch(m: Module) -> None:
    """As OpenCLIP's first accumulation had it: the loss's own parameter is
    differentiated in every backward pass.
    """

    def changed(
        original: Any, outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any
    ) -> Any:
        parts = len(list(m.micro_batches(batch, None, **how)))
        loss, gradient = original(outputs_fn, loss_fn, batch, **how)
        return loss, gradient | {"temperature": parts * gradient["temperature"]}

    around(m, "coupled_value_and_grad", changed)


@caught_by("test_coupled and test_gradient_of_the_large_batch")
def couple_within_micro_batches_only(m: Module) -> None:
    def changed(
        original: Any, outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any
    ) -> Any:
        parts = [part for part, *_ in m.micro_batches(batch, None, **how)]
        made = [original(outputs_fn, loss_fn, part, steps=1) for part in parts]
        return np.mean([loss for loss, _ in made]), {
            n: np.mean([g[n] for _, g in made], axis=0) for n in made[0][1]
        }

    around(m, "coupled_value_and_grad", changed)


@caught_by("test_coupled and test_gradient_of_the_large_batch")
def gradient_of_the_first_micro_batch_for_all(m: Module) -> None:
    """The second pass forgets to move on."""

    def changed(
        original: Any, outputs_fn: Any, loss_fn: Any, batch: Any, **how: Any
    ) -> Any:
        def shifted(outputs: Any) -> Any:
            loss, gradients, own = loss_fn(outputs)
            first = size(parts[0])
            return (
                loss,
                {
                    n: np.concatenate([g[:first]] * len(parts))[: len(g)]
                    for n, g in gradients.items()
                },
                own,
            )

        parts = list(m.micro_batches(batch, None, **how))
        return original(outputs_fn, shifted, batch, **how)

    around(m, "coupled_value_and_grad", changed)
