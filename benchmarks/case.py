"""The contestants of a question, which do the same work, one of them the baseline; or
curves and distances, where nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

LIMIT = "limit, MiB"
"""The count of a curve that is a limit on its y axis."""


class Case(NamedTuple):
    """One comparison."""

    name: str
    """Its size or setting, such as ``"1 M parameters, foreach"``."""
    baseline: str
    """The contestant that the others are divided by."""
    contestants: Mapping[str, Callable[[], object]]
    """Each does one whole window and waits for its result."""
    counts: Mapping[str, Mapping[str, float]] = {}
    """What is counted and not timed, by contestant: bytes, buffers, calls."""
    x: float | None = None
    """Where the case stands on the question's axis, if it has one: the cases are then
    drawn as lines.
    """
    rates: Mapping[str, Mapping[str, float]] = {}
    """Work that one run does, by contestant and by the unit of what it comes to per
    second, such as ``tokens/s``.
    """
    clock: Callable[[], float] | None = None
    """In seconds, such as `time.process_time`, which leaves out other processes and
    waits; None: `time.perf_counter`.
    """


class Curve(NamedTuple):
    """One line of a plot in which nothing is timed."""

    name: str
    """The plot it belongs to."""
    contestant: str
    xs: Sequence[float]
    ys: Sequence[float]
    x_label: str
    y_label: str
    counts: Mapping[str, float] = {}
    """What the line comes to: its last value, its distance to another."""


class Distances(NamedTuple):
    """One loop's distances to the large batch; nothing is timed."""

    name: str
    """The framework."""
    contestant: str
    distances: Mapping[str, float | None]
    """By job; None where the loop was refused."""
    told: str
    """silent, warned or refused."""


class Question(Protocol):
    """A module of `benchmarks.questions`."""

    def cases(self, quick: bool) -> Iterator[Case | Curve | Distances]:
        """The comparisons, one after another; `quick` leaves out the large ones."""
        ...


class Entry(NamedTuple):
    """What is known of a question without its framework."""

    title: str
    needs: tuple[str, ...]
    """Packages without which it cannot be asked."""
    axis: str = ""
    """What the `x` of its cases is."""
    gpu: bool = False
    """Whether it is about GPUs: without one it is asked by name only, and then small.
    """


QUESTIONS = {
    "torch_streaming": Entry(
        "torch: one window of 8 micro-batches, float32, AdamW", ("torch",)
    ),
    "torch_steps": Entry(
        "torch: step() and zero_grad() alone, 100 micro-batches inside a window",
        ("torch",),
        "parameters",
    ),
    "torch_promises": Entry(
        "torch: one window of 8 micro-batches, AdamW, with fewer and fewer promises",
        ("torch",),
    ),
    "torch_layered": Entry(
        "torch: one window layer by layer, float32, AdamW, micro-batches of 4 items",
        ("torch",),
    ),
    "jax_layered": Entry(
        "JAX: one window layer by layer, float32, AdamW, micro-batches of 4 items",
        ("jax", "optax"),
    ),
    "torch_workers": Entry(
        "torch: one window of 2 workers, float32, AdamW", ("torch",)
    ),
    "torch_slow_link": Entry(
        "torch: one window of 2 workers over a slow network, float32, SGD", ("torch",)
    ),
    "torch_narrow": Entry(
        "torch: one window of 32 micro-batches, bfloat16 gradients summed in"
        " float32, SGD",
        ("torch",),
    ),
    "jax_streaming": Entry(
        "JAX: one window of 8 micro-batches, float32, AdamW, jitted and donated",
        ("jax", "optax"),
    ),
    "jax_compile": Entry(
        "JAX: compiling the step of a model of many small tensors", ("jax", "optax")
    ),
    "torch_transformer": Entry(
        "torch: a transformer in bfloat16, AdamW fused, one window of 8 micro-batches",
        ("torch",),
        gpu=True,
    ),
    "jax_transformer": Entry(
        "JAX: a transformer in bfloat16, AdamW, one window of 8 micro-batches",
        ("jax", "optax"),
        gpu=True,
    ),
    "mindspore_streaming": Entry(
        "MindSpore: one window of 8 micro-batches, float32, Adam, GRAPH_MODE",
        ("mindspore",),
    ),
    "mindspore_cells": Entry(
        "MindSpore: the training cell, one window of 8 micro-batches, float32, Adam,"
        " GRAPH_MODE",
        ("mindspore",),
    ),
    "mindspore_jit": Entry(
        "MindSpore: one window of 8 micro-batches, float32, Adam, mindspore.jit",
        ("mindspore",),
    ),
    "mindspore_pynative": Entry(
        "MindSpore: one window of 8 micro-batches, float32, Adam, PyNative",
        ("mindspore",),
    ),
    "torch_bandwidth": Entry(
        "torch: the accumulation alone, in GB/s that must be moved, beside NumPy's"
        " triad",
        ("torch",),
    ),
    "jax_bandwidth": Entry(
        "JAX: a micro-batch without its gradient, in GB/s that must be moved, beside"
        " NumPy's triad",
        ("jax", "optax"),
    ),
    "mindspore_bandwidth": Entry(
        "MindSpore: the accumulation alone, in GB/s that must be moved, beside NumPy's"
        " triad",
        ("mindspore",),
    ),
    "torch_window_length": Entry(
        "torch: 256 micro-batches in windows of 1 to 256",
        ("torch",),
        "micro-batches per window",
    ),
    "torch_tensors": Entry(
        "torch: a window of 4 micro-batches, 1 M parameters in ever more tensors",
        ("torch",),
        "tensors",
    ),
    "jax_window_length": Entry(
        "JAX: 256 micro-batches in windows of 1 to 256",
        ("jax", "optax"),
        "micro-batches per window",
    ),
    "jax_tensors": Entry(
        "JAX: a window of 4 micro-batches, 1 M parameters in ever more tensors",
        ("jax", "optax"),
        "tensors",
    ),
    "jax_workers": Entry(
        "JAX: one window on each of 2 devices of the CPU, float32, AdamW",
        ("jax", "optax"),
        "micro-batches per window",
    ),
    "mindspore_window_length": Entry(
        "MindSpore: 256 micro-batches in windows of 1 to 256",
        ("mindspore",),
        "micro-batches per window",
    ),
    "mindspore_tensors": Entry(
        "MindSpore: a window of 4 micro-batches, 1 M parameters in ever more tensors",
        ("mindspore",),
        "tensors",
    ),
    "mindspore_workers": Entry(
        "MindSpore: a window over two workers, Adam, GRAPH_MODE",
        ("mindspore",),
        "micro-batches per window",
    ),
    "torch_split": Entry(
        "torch: the gradient of a large batch in 8 micro-batches, float32", ("torch",)
    ),
    "jax_split": Entry(
        "JAX: the gradient of a large batch in 8 micro-batches, float32",
        ("jax", "optax"),
    ),
    "mindspore_split": Entry(
        "MindSpore: the gradient of a large batch in 8 micro-batches, float32,"
        " GRAPH_MODE",
        ("mindspore",),
    ),
    "torch_memory": Entry(
        "torch: memory and time of one gradient of a BERT-like encoder", ("torch",)
    ),
    "jax_memory": Entry(
        "JAX: memory and time of one gradient of a BERT-like encoder", ("jax",)
    ),
    "everyday": Entry(
        "The loops that people have: their distance to the large batch, in float64",
        ("sklearn",),
    ),
    "quality": Entry(
        "Held-out accuracy and loss on digits, where an epoch's last window is short"
        " and uneven",
        ("sklearn",),
    ),
}


def load_question(name: str) -> Question:
    """The module of the question called `name`, one of `QUESTIONS`; imports its
    framework.
    """
    return cast(Question, import_module(f"benchmarks.questions.{name}"))
