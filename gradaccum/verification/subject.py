"""What a framework supplies to `gradaccum.verify`: a model, a loss and one batch, to be run again and again, in parts, under conditions.

The core decides what to run and reads the results. A `Subject` runs it and leaves everything of the user's as it was, also if the loss
raises in the middle. Gradients are opaque here: arrays or tensors in float64 that know ``+``, ``-`` and ``* float``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

Gradient: TypeAlias = Any
"""The gradient of one parameter in float64: an array or a tensor of the parameter's shape, dense."""
Items: TypeAlias = Sequence[int]
"""Places along the batch axis, in the order in which they form a micro-batch."""


@dataclass(frozen=True)
class Conditions:
    """What a window is run under. The defaults are those of training, with the same random numbers in every window."""

    training: bool = True
    """False: the model in evaluation mode. A framework without modes ignores it."""
    carry_state: bool = True
    """Whether state that the forward pass changes goes on from micro-batch to micro-batch, as in training. False: put back before each."""
    seed: int = 0
    """The random numbers. 0: as the user's random state gives them. Another seed: other numbers."""
    replay: bool = True
    """Whether each item meets the random numbers that it meets in the batch as a whole. False: each micro-batch draws its own."""
    scale: float = 1.0
    """The loss is multiplied by it before it is differentiated; gradients and loss come back undivided."""
    perturbation: int | None = None
    """None, or the number of a perturbation: floating-point inputs and parameters move by one rounding, up or down, as that number has it.

    A value that is an integer (a mask, a label, a padding) is left alone in the inputs. One rounding is that of the coarsest floating
    dtype in the program: under autocast that of the narrow one."""


class Run(NamedTuple):
    """One micro-batch, run forward and backward."""

    loss: float
    gradients: Mapping[str, Gradient]
    """By parameter name; a parameter that the loss did not reach is left out."""
    weight: float
    """What ``weight=`` gives for the micro-batch; without it the number of items."""
    changed: tuple[str, ...] = ()
    """Names of the model's state (buffers, attributes) that the forward pass changed."""


class Precision(NamedTuple):
    """How exactly a parameter's gradient can be known."""

    roundoff: float
    """Distance from 1 to the next number in the coarsest floating dtype of the program."""
    smallest: float
    """The smallest positive number of the gradient's dtype, subnormal numbers included."""
    elements: int
    """How many numbers it has."""
    terms: int = 1
    """About how many numbers are added up into each of them: items times the positions of an item."""


class Layer(NamedTuple):
    """A layer whose output for one item depends on the other items of the batch."""

    name: str
    """Where it stands in the model: ``encoder.norm1``; "" for the model itself."""
    kind: str
    """The name of its class."""
    in_evaluation: bool
    """Whether it does so in evaluation mode too."""


class Column(NamedTuple):
    """A leaf of the batch as plain numbers, in which the core looks for counts and labels."""

    where: str
    """Its path: ``batch[1]['mask']``."""
    rows: Sequence[Sequence[float]]
    """The numbers of each item, flat."""
    integers: bool
    """Whether its dtype is one of integers or of booleans."""
    sequence: bool
    """Whether it has two dimensions, the batch axis first: a token per position."""


class Subject(Protocol):
    """A model, its loss and one batch."""

    items: int
    """The number of items of the batch."""
    names: Sequence[str]
    """The parameters that the loss is differentiated by."""

    def window(self, parts: Sequence[Items], conditions: Conditions) -> list[Run]:
        """Run each of `parts` in order as one micro-batch.

        The model's state and the random state are the user's at the start of each call, and again after it, however it ends.
        An error of the loss function passes through.
        """
        ...

    def dot(self, a: Gradient, b: Gradient) -> float:
        """The sum of the products of their elements, in float64."""
        ...

    def precision(self, name: str) -> Precision:
        """How exactly the gradient of that parameter can be known."""
        ...

    def columns(self) -> Sequence[Column]:
        """The leaves of the batch that are split and small enough to be read as plain numbers."""
        ...

    def mixing_layers(self) -> Sequence[Layer]:
        """The innermost layers whose output for an item depends on the other items, found by running them; () without layers."""
        ...

    def fixed_draws(self) -> Sequence[str]:
        """Where the loss draws random numbers that do not follow the random state, so that every micro-batch gets the same ones."""
        ...

    def unreplayed_draws(self) -> Sequence[str]:
        """Random operations whose numbers `Conditions.replay` cannot give to the items again."""
        ...

    def custom_rules(self) -> Sequence[str]:
        """Names of custom derivatives that do not carry the gradient that they are handed."""
        ...
