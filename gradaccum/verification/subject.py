"""The `Subject` that a framework supplies to `gradaccum.verify`: a model, a loss and
one batch, run in parts under conditions.

The core decides what to run. A `Subject` runs it and restores everything of the user's.
Gradients are opaque here: arrays or tensors in float64 that know ``+``, ``-`` and
``* float``.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from gradaccum.errors import ArgumentTypeError, explain

Gradient: TypeAlias = Any
"""The gradient of one parameter in float64: an array or a tensor of the parameter's
shape, dense.
"""
Items: TypeAlias = Sequence[int]
"""Places along the batch axis, in the order in which they form a micro-batch."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a window. The defaults are those of training, with the same
    random numbers in every window.
    """

    training: bool = True
    """False: the model in evaluation mode. A framework without modes ignores it."""
    carry_state: bool = True
    """State that the forward pass changes goes on to the next micro-batch, as in
    training. False: put back before each.
    """
    seed: int = 0
    """0: random numbers as the user's random state gives them. Another seed: other
    numbers.
    """
    replay: bool = True
    """Each item meets the random numbers that it meets in the whole batch. False: each
    micro-batch draws its own.
    """
    scale: float = 1.0
    """A factor of the loss before it is differentiated; gradients and loss come back
    undivided.
    """
    perturbation: int | None = None
    """None, or the number of a perturbation: floating-point inputs and parameters move
    by one rounding, up or down, as that number has it.

    An integer value (a mask, a label, a padding) in the inputs stays. The rounding is
    the coarsest floating dtype's in the program.
    """


class Run(NamedTuple):
    """One micro-batch, run forward and backward."""

    loss: float
    gradients: Mapping[str, Gradient]
    """By parameter name; a parameter that the loss did not reach is left out."""
    weight: float
    """The micro-batch's ``weight=``, or its number of items."""
    changed: tuple[str, ...] = ()
    """Names of the model's state (buffers, attributes) that the forward pass changed.
    """


class Precision(NamedTuple):
    """The precision of a parameter's gradient."""

    roundoff: float
    """Distance from 1 to the next number in the program's coarsest floating dtype."""
    smallest: float
    """The smallest positive number of the gradient's dtype, subnormals included."""
    elements: int
    """How many numbers it has."""
    terms: int = 1
    """About how many numbers are added up into each: items times the positions of an
    item.
    """


class Column(NamedTuple):
    """A leaf of the batch as plain numbers, in which the core looks for counts and
    labels.
    """

    where: str
    """Its path: ``batch[1]['mask']``."""
    rows: Sequence[Sequence[float]]
    """The numbers of each item, flat."""
    integers: bool
    """Its dtype is one of integers or booleans."""
    sequence: bool
    """It has two dimensions, the batch axis first: a token per position."""


class Subject(Protocol):
    """A model, its loss and one batch."""

    items: int
    """The number of items of the batch."""
    names: Sequence[str]
    """The parameters that the loss is differentiated by."""

    def window(self, parts: Sequence[Items], conditions: Conditions) -> list[Run]:
        """Run each of `parts` in order as one micro-batch, from the user's model and
        random state, and restore both.
        """
        ...

    def dot(self, a: Gradient, b: Gradient) -> float:
        """Return the sum of the products of their elements, in float64."""
        ...

    def precision(self, name: str) -> Precision: ...

    def columns(self) -> Sequence[Column]:
        """Return the leaves of the batch that are split and small enough to be read as
        numbers.
        """
        ...

    def statistics_layers(self) -> Sequence[str]:
        """Name the layers that use statistics of the batch in training mode, as far as
        the framework shows them.
        """
        ...

    def fixed_draws(self) -> Sequence[str]:
        """Name the random draws that ignore the random state, so that every micro-batch
        gets the same numbers.
        """
        ...

    def unreplayed_draws(self) -> Sequence[str]:
        """Name the random operations whose numbers `Conditions.replay` cannot replay
        for the same items.
        """
        ...

    def custom_rules(self) -> Sequence[str]:
        """Name the custom derivatives that do not carry their incoming gradient."""
        ...


# A loss function as `verify` calls it, what it refers to, and the random generators of
# Python and NumPy that it may draw from.
#
# Beside ``loss_fn(model, *batch)`` two conventions are recognised by the number of
# arguments: the usual criterion, ``criterion(output, *targets)``, and a function that
# closes over its model, ``loss_fn(*batch)``.


DEPTH = 3
"""How far the walk goes."""
OUTPUTS = (
    "input",
    "inputs",
    "output",
    "outputs",
    "out",
    "logits",
    "pred",
    "preds",
    "prediction",
    "predictions",
    "y_pred",
    "y_hat",
)
"""A criterion's first argument, where the number of arguments does not tell."""
FRAMEWORKS = ("torch", "torchvision", "mindspore", "jax", "optax")
NOBODYS = 0x5EED0
"""Far from the seeds that users write."""
LossFunction = Callable[..., Any]


def as_loss(
    loss_fn: Any,
    model: Any,
    batch: tuple[Any, ...],
    is_model: Callable[[object], bool] | None,
) -> tuple[LossFunction, tuple[Any, ...]]:
    """Return the loss in the convention ``loss_fn(model, *batch)``, and the batch as
    its arguments.

    `loss_fn` may also be ``loss_fn(*batch)``, which calls `model` itself, or a
    criterion, ``loss_fn(outputs, targets)``. A list as the only argument, as a loader
    yields it, is taken apart where `loss_fn` asks for it; a dictionary whose keys are
    names of arguments is passed by keywords. `is_model` is True for the model and what
    wraps it; None: the framework's model cannot be called.

    Raises:
        ArgumentTypeError: `loss_fn` is no function, or takes another number of
            arguments.
    """
    if is_model:
        expected = "a function loss_fn(model, *batch)"
    else:
        expected = "a function loss_fn(params, *batch)"
    fix = "Write verify(model, lambda model, x, y: criterion(model(x), y), (x, y))."
    if is_model is None:
        fix = (
            "Write verify(params, lambda params, x, y: criterion(apply(params, x),"
            " y).mean(), (x, y))."
        )
    if not callable(loss_fn):
        raise explain(
            ArgumentTypeError, "loss_fn", expected=expected, got=loss_fn, fix=fix
        )
    if len(batch) == 1 and _takes_keywords(loss_fn, batch[0]):
        return lambda model, keywords: loss_fn(model, **keywords), batch
    listed = batch[0] if len(batch) == 1 and isinstance(batch[0], list) else []
    if listed and (
        not _takes(loss_fn, 2) or (_is_usual(loss_fn) and _takes(loss_fn, len(listed)))
    ):
        batch = tuple(listed)
    shorter = _takes(loss_fn, len(batch))
    if _takes(loss_fn, len(batch) + 1) and not (shorter and _is_criterion(loss_fn)):
        return loss_fn, batch
    if not shorter or is_model is None:
        if not shorter:
            found = f"one that does not take {len(batch) + 1} arguments"
        else:
            found = f"a criterion, which takes {len(batch)} arguments"
        raise explain(
            ArgumentTypeError,
            "loss_fn",
            expected=f"{expected}, {len(batch) + 1} arguments",
            found=found,
            fix=fix,
        )
    if any(is_model(value) for _, value in reached(loss_fn)):
        return lambda model, *arguments: loss_fn(*arguments), batch
    return lambda model, x, *targets: loss_fn(model(x), *targets), batch


def first_of(loss_fn: LossFunction) -> LossFunction:
    """Return a loss function without the aux that `loss_fn` returns beside the loss."""
    return lambda *arguments: loss_fn(*arguments)[0]


def _takes(loss_fn: Any, number: int) -> bool:
    try:
        _signature(loss_fn).bind(*[None] * number)
    except TypeError:
        return False
    return True


def _takes_keywords(loss_fn: Any, batch: object) -> bool:
    """True if a dictionary's keys are the arguments after the model."""
    if not isinstance(batch, dict) or not all(isinstance(key, str) for key in batch):
        return False
    signature = _signature(loss_fn)
    if not batch.keys() <= signature.parameters.keys() and _takes(loss_fn, 2):
        return False
    try:
        signature.bind(None, **batch)
    except TypeError:
        return False
    return True


def _signature(loss_fn: Any) -> inspect.Signature:
    """Return the signature; for a compiled function, which has none, any number of
    arguments.
    """
    try:
        return inspect.signature(_body(loss_fn))
    except ValueError:
        return inspect.signature(lambda *arguments: None)


def _body(loss_fn: Any) -> Any:
    return getattr(loss_fn, "forward", getattr(loss_fn, "construct", loss_fn))


def _is_criterion(loss_fn: Any) -> bool:
    """True if the number of arguments decides nothing, since defaults follow
    ``(output, *targets)``.
    """
    return (
        _is_usual(loss_fn) or next(iter(_signature(loss_fn).parameters), "") in OUTPUTS
    )


def _is_usual(loss_fn: Any) -> bool:
    """True if `loss_fn` is a layer or a function of the framework."""
    function = inspect.unwrap(
        loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    )
    return (
        _body(function) is not function
        or str(getattr(function, "__module__", "")).partition(".")[0] in FRAMEWORKS
    )


def reached(*roots: object) -> Iterator[tuple[str, object]]:
    """Yield, once each with its name, what functions close over, read as globals or are
    bound to, and objects' attributes.
    """
    seen: dict[int, object] = {}
    waiting = [("loss_fn", root, DEPTH) for root in roots]
    while waiting:
        name, value, left = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield name, value
            waiting += (
                [(inner, part, left - 1) for inner, part in _parts(value)]
                if left
                else []
            )


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from (
            ("func", value.func),
            *(("argument", given) for given in value.args),
            *value.keywords.items(),
        )
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, types.FunctionType):
        names = dict.fromkeys(
            name for code in _codes(value.__code__) for name in code.co_names
        )
        yield from (
            (name, value.__globals__[name])
            for name in names
            if name in value.__globals__
        )
        for name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # Nothing was assigned to the variable yet.
                yield name, cell.cell_contents
        yield from (("default", given) for given in value.__defaults__ or ())
        yield from vars(value).items()
    elif isinstance(value, dict):
        yield from ((str(key), entry) for key, entry in value.items())
    elif not isinstance(value, type | types.ModuleType) and isinstance(
        getattr(value, "__dict__", None), dict
    ):
        yield from vars(value).items()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


class HostRandom:
    """The random generators of Python and NumPy: the global ones, and those that
    `roots` (the loss, the model's layers) refer to.

    Each micro-batch gets the same numbers. That is right only for a number drawn once
    per micro-batch; `per_item` finds the others.
    """

    def __init__(self, *roots: object) -> None:
        numpy = sys.modules.get("numpy")
        everybodys = [("random", random)] + (
            [] if numpy is None else [("numpy.random", numpy.random)]
        )
        self._generators: list[tuple[str, Any]] = everybodys + [
            pair for pair in reached(*roots) if _is_generator(pair[1])
        ]
        self._before = [_state(generator) for _, generator in self._generators]

    def begin(self, seed: int = 0) -> None:
        """Restore the user's states; with a `seed` other than 0, draw other numbers."""
        for (_, generator), before in zip(self._generators, self._before, strict=True):
            _set_state(generator, before)
            if seed and hasattr(generator, "seed"):
                generator.seed(NOBODYS + seed)
            elif seed:
                generator.bit_generator.state = type(generator.bit_generator)(
                    NOBODYS + seed
                ).state

    def states(self) -> list[bytes]:
        return [pickle.dumps(_state(generator)) for _, generator in self._generators]

    def per_item(self, large: Sequence[bytes], small: Sequence[bytes]) -> list[str]:
        """Return the generators from which a loss drew more numbers for more items, by
        the states after a large and a small batch.
        """
        pairs = zip(self._generators, large, small, strict=True)
        return [
            f"{name}, a number for each item"
            for (name, _), one, other in pairs
            if one != other
        ]

    def seeded(self, one: Sequence[bytes], other: Sequence[bytes]) -> list[str]:
        """Return the generators that the loss seeds: the states after two runs from
        different beginnings are equal.
        """
        pairs = zip(self._generators, one, other, strict=True)
        return [f"{name}, which the loss seeds" for (name, _), a, b in pairs if a == b]


def _is_generator(value: object) -> bool:
    """True if `value` has a state; the operating system's has none."""
    numpys = type(value).__module__.startswith("numpy.random") and type(
        value
    ).__name__ in ("Generator", "RandomState")
    return numpys or (
        isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    )


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
