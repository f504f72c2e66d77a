"""`gradaccum.verify`: one call for every framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from gradaccum.errors import ArgumentTypeError, BackendNotFoundError, explain
from gradaccum.nests import leaves_of
from gradaccum.registry import BACKENDS, TYPES, available_backends, load_backend, owners
from gradaccum.verification.report import VerificationReport


@runtime_checkable
class VerifyingBackend(Protocol):
    """A backend that can tell whether accumulation is right for a loss."""

    def verifies(self, model: object) -> bool:
        """Whether `model` is of its framework: a module of it, or a nest whose leaves are its arrays."""
        ...

    def verify(self, model: Any, loss_fn: Callable[..., Any], batch: Any, steps: int, **options: Any) -> VerificationReport:
        """As `gradaccum.verify`."""
        ...


def verify(model_or_params: Any, loss_fn: Callable[..., Any], batch: Any, steps: int = 4, **options: Any) -> VerificationReport:
    """Tell whether gradient accumulation is right for a loss, and if not, why.

    The gradient of one batch is computed under many partitions and orders of the batch. Where it moves by more than rounding moves it, the
    cause is looked for by experiment. Nothing of the user's is changed: no parameter, buffer, ``.grad``, random state, mode or hook.

    Args:
        model_or_params: a `torch.nn.Module`, a `mindspore.nn.Cell`, or a nest of JAX arrays.
        loss_fn: ``loss_fn(model_or_params, *batch)``, a scalar. With a module or a Cell also the usual criterion, ``criterion(output,
            *targets)``, and a function that closes over its model, ``loss_fn(*batch)``: the number of arguments tells.
        batch: a tuple of nests of arrays, with the batch axis first; a few real items with their padding, at least `steps`.
        steps: micro-batches that the batch is divided into, at least 2.
        options: ``reduction`` ("mean", "sum" or "item_mean"), ``weight`` and ``axes``, as accumulation will have them, and options of one
            backend.

    Returns:
        The report: ``print(report)``, ``report.equivalent``, ``report.causes``.

    Raises:
        ArgumentTypeError: `model_or_params` is of no installed framework; another argument has the wrong type.
        ArgumentValueError: an argument has a value that makes no sense.
    """
    for name in _likeliest_first(model_or_params):
        try:
            backend = load_backend(name)
        except BackendNotFoundError:  # Its framework is here, something else that it needs is not.
            continue
        if isinstance(backend, VerifyingBackend) and backend.verifies(model_or_params):
            return backend.verify(model_or_params, loss_fn, batch, steps, **options)
    raise explain(
        ArgumentTypeError,
        "model_or_params",
        expected="a torch.nn.Module, a mindspore.nn.Cell or a nest of JAX arrays, of a framework that is installed",
        found=f"an object of type {type(model_or_params).__name__}",
        fix=f"Frameworks installed here: {', '.join(available_backends()) or 'none'}.",
    )


def _likeliest_first(model: object) -> Iterator[str]:
    """Names of the installed backends: of the model's or its first leaf's type, those imported by now, then the rest, which it imports."""
    packages, named = owners(TYPES), owners(BACKENDS)
    first = leaves_of(model)[:1]
    bases = [base for thing in (model, *(leaf.value for leaf in first)) for base in type(thing).__mro__]
    own = {packages[top].value for top in (base.__module__.partition(".")[0] for base in bases) if top in packages}
    imported = {entry.value for top, entry in packages.items() if top in sys.modules}
    if all(type(leaf.value).__module__ == "builtins" for leaf in leaves_of(model)):
        return  # Numbers and texts: not worth importing every framework.
    yield from sorted(available_backends(), key=lambda name: (named[name].value not in own, named[name].value not in imported, name))
