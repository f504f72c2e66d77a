"""The harness of a backend: it builds a model from a spec, trains it, and shows its
state to the suite.

A backend has one subclass of `Harness`. It is in ``gradaccum_harnesses``, or its
package registers it under the backend's name in the entry-point group
``gradaccum.harnesses``. All inputs and outputs are NumPy arrays. "Second door" means
that the method reads the framework's own objects (parameters, checkpoint entries, state
trees), and never the API under test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from gradaccum import StepResult, VerificationReport
from gradaccum.kit import Listener, State
from gradaccum_conformance.specs import Array, Arrays, Batch, Model, Optimizer

Loss = Literal["mean", "sum"]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
"""Dtype of the model's parameters. NumPy has no bfloat16, so bfloat16 arrays are passed
and returned as float32.
"""
GradientTree = Mapping[str, Array | None]
"""Gradients by parameter name. None means that the parameter has no gradient in this
micro-batch.
"""
Option = Any
"""The value of one argument of `gradaccum.wrap`. In some tests it is a wrong value."""
WrapOptions = Mapping[str, Option]
"""Arguments of `gradaccum.wrap` by name, including ``steps``."""


class Setup(NamedTuple):
    """The arguments with which a session is started."""

    model: Model
    weights: Arrays
    """The model's parameters at the start."""
    optimizer: Optimizer
    dtype: Dtype = "float32"
    mode: str | None = None
    """One of the harness's `modes`; None means the default."""
    options: WrapOptions | None = None
    """The arguments of `gradaccum.wrap`, with ``steps``; None means: do not wrap."""


class Captured(NamedTuple):
    """The calls that a ``capture`` optimizer received."""

    calls: int
    """The number of calls."""
    gradient: Arrays
    """The gradient of the last call; empty before the first call."""


class Session(ABC):
    """One model with one optimizer, which is wrapped, or bare for the large batch."""

    @abstractmethod
    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        """Run the forward pass, the backward pass and the optimizer's call, as a user
        of the framework writes them; return the unscaled loss.

        `loss` is the mean or the sum over the items. If the wrapper has a loss scale,
        it is applied as users apply it. The loss is passed to the wrapper, as users
        pass it.
        """

    @abstractmethod
    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        """Run one micro-batch whose gradient is exactly `tree` times the loss scale.
        The values may be inf or NaN.
        """

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        """Run one micro-batch as `gradients` does, and pass this unscaled loss to the
        wrapper; NaN means that the loss is not known. Return False, and do nothing, if
        the session has no such call.
        """
        return False

    def gradients_in(self, tree: Arrays) -> None:
        """Run one micro-batch whose gradients are views of memory, which the caller
        overwrites for the next micro-batch.

        A framework that can use NumPy's memory as a gradient uses it without a copy.
        The parameters are float64.
        """
        self.gradients({name: gradient.copy() for name, gradient in tree.items()})

    @abstractmethod
    def flush(self, denominator: Option = None) -> None:
        """Close the open window. The `denominator` is passed to the call, unless it is
        None.
        """

    @abstractmethod
    def discard(self) -> None:
        """Discard the open window."""

    def listen(self, listener: Listener) -> bool:
        """Have the wrapped optimizer call `listener` for each window that closes;
        return False if it has no listeners.
        """
        return False

    def on_update(self, function: Callable[[], object]) -> bool:
        """Have the wrapped optimizer call `function` after each update; return False if
        it cannot.
        """
        return False

    def idle(self) -> None:  # noqa: B027 - most backends do nothing
        """Run no micro-batch on this worker while other workers run one. There is
        nothing to do unless all workers run the same program.
        """

    @abstractmethod
    def result(self) -> StepResult:
        """Return the `StepResult` of the API under test, in Python numbers."""

    @abstractmethod
    def state(self) -> State:
        """Second door: return the seven fields, in Python numbers."""

    @abstractmethod
    def accumulator(self) -> Arrays:
        """Second door: return the sum as the backend stores it now, undivided, by
        parameter name; zeros if it stores no sum.
        """

    @abstractmethod
    def parameters(self) -> Arrays:
        """Second door: return the model's parameters."""

    @abstractmethod
    def masters(self) -> Arrays:
        """Second door: return the float32 master weights, by parameter name. This is
        called only for sessions with ``master_weights=True``.
        """

    @abstractmethod
    def optimizer_state(self) -> Arrays:
        """Second door: return every array of the inner optimizer's state, under any
        stable name.
        """

    @abstractmethod
    def captured(self) -> Captured:
        """Second door: return the calls of the ``capture`` optimizer. This is called
        only for sessions that have one.
        """

    @abstractmethod
    def predict(self, x: Array) -> Array:
        """Return the model's output for inputs (batch, *input_shape)."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Return a copy of model and optimizer in memory, taken through the framework's
        own state functions. Only sessions of the same backend read it.
        """

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Restore a snapshot of this session, or of a session that was built in the
        same way. The snapshot can be used again.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model and optimizer to files in the framework's own format."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Load what `save` wrote. The session may be a freshly built one."""


class OptimizerSession(Session):
    """A session of an object that holds its own state and has listeners."""

    optimizer: Any

    def listen(self, listener: Listener) -> bool:
        self.optimizer.add_listener(listener)
        return True

    def on_update(self, function: Callable[[], object]) -> bool:
        self.optimizer.on_update(function)
        return True

    def result(self) -> StepResult:
        result: StepResult = self.optimizer.result
        return result


class Harness(ABC):
    """A backend, as the suite uses it. There is one instance per process."""

    name: ClassVar[str]
    """The backend's name, which is the name of its entry points."""
    modes: ClassVar[tuple[str, ...]] = ("eager",)
    """Ways to run a training step (``"eager"``, ``"jit"``, ``"graph"``); the first is
    the default.
    """
    deep_modes: ClassVar[tuple[str, ...]] = ()
    """The `modes` that only ``--deep`` runs."""
    brief_modes: ClassVar[tuple[str, ...]] = ()
    """The `modes` that run only the tests marked ``every_mode``, unless ``--deep`` is
    passed. Such a mode compiles what another mode compiles too.
    """
    gradient_shapes_reach_gradaccum: ClassVar[bool] = True
    """False if the framework itself rejects a gradient of another shape."""

    @abstractmethod
    def start(self, setup: Setup) -> Session:
        """Return a session with a fresh model."""

    @abstractmethod
    def gradient(
        self,
        model: Model,
        weights: Arrays,
        batch: Batch,
        *,
        dtype: Dtype,
        loss: Loss = "mean",
    ) -> Arrays:
        """Return the framework's own gradient of the whole batch, without gradaccum."""


Returns = Callable[[Any, Any], Any]
"""A function of the loss and the logits (items, classes), which have NumPy's methods.
It returns what a loss function should return.
"""


class LargeBatchCall(NamedTuple):
    """A call with the large batch, and the model for it."""

    model: Model
    weights: Arrays
    dtype: Dtype = "float32"
    mode: str | None = None
    """One of the harness's `large_batch_modes`; None means the first."""
    loss: Loss = "mean"
    """The loss of a micro-batch that the loss function returns."""
    options: Mapping[str, Option] = MappingProxyType({})
    """The options of the call: ``steps``, ``micro_batch_size``, ``reduction``,
    ``weight`` (a NumPy array with one weight per item, or a function of a micro-batch's
    two arrays), ``axes``, ``has_aux`` and ``merge_aux``.

    With ``has_aux``, `returns` returns the loss and a dict of arrays.
    """
    extra: Any = None
    """The batch's third argument, unless it is None: a nest of NumPy arrays and plain
    values. The loss function accepts it and does not read it.
    """
    returns: Returns | None = None
    """If it is not None, the loss function returns its result instead of the loss.
    The logits of a coupled loss are ``left``.
    """


class Outcome(NamedTuple):
    """The results of a call with the large batch."""

    loss: float
    gradient: Arrays
    aux: Any
    """What the call returned as aux, in NumPy arrays. If it returns one aux for each
    micro-batch, this is a dict of arrays with a row for each micro-batch.
    """


class LargeBatchHarness(Harness):
    """A backend that accepts the large batch in one call and splits it."""

    large_batch_modes: ClassVar[tuple[str, ...]]
    """The `modes` that support this call; the first is the default."""
    half_dtypes: ClassVar[tuple[Dtype, ...]] = ("bfloat16",)
    """The half-precision dtypes in which the framework runs a model on this machine."""

    @abstractmethod
    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        """Run the backend's splitting call. It receives `batch` as a nest of two
        arrays, ``(x, y)``.
        """

    @abstractmethod
    def update(
        self,
        session: Session,
        batch: Batch,
        *,
        loss: Loss = "mean",
        options: Mapping[str, Option],
        returns: Returns | None = None,
    ) -> float:
        """Run a whole window of `session`'s wrapped optimizer in one call; return the
        unscaled loss.

        `returns` is the same as in `LargeBatchCall`. `session` was started with
        ``steps=None`` in one of the `large_batch_modes`.
        """

    @abstractmethod
    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        """Run the backend's call for losses that couple the items of a batch. Its
        options are ``steps`` and the like.

        The outputs of a micro-batch are a dict: ``left`` is the model's output for
        ``x``, and ``right`` is its output for `mirrored` ``x``. The loss of all outputs
        is `contrast`, whose parameter ``temperature`` is a scalar that begins at
        `TEMPERATURE`. The gradient has an entry named ``temperature``.
        """


class VerifyCall(NamedTuple):
    """A call of `gradaccum.verify`."""

    loss: Callable[..., Any]
    """The loss, as a function of the model's outputs (items, classes), its parameters
    by name, and the arrays of the batch. All of them have NumPy's methods.
    """
    batch: tuple[Array, ...]
    """The first array is the model's input."""
    options: Mapping[str, Option] = MappingProxyType({})
    """``steps``, ``reduction``, ``weight`` and ``axes``."""
    dtype: Dtype = "float32"


class VerifyingHarness(Harness):
    """A backend that supports `gradaccum.verify`."""

    @abstractmethod
    def verify(
        self, model: Model, weights: Arrays, call: VerifyCall
    ) -> VerificationReport:
        """Return the report of `gradaccum.verify`."""


class WorkersHarness(Harness):
    """A backend whose windows can be shared by several workers, each in its own
    process.
    """

    worker_modes: ClassVar[tuple[str, ...]]
    """The `modes` in which workers can share a window."""

    @abstractmethod
    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        """Make this process, in which nothing has run yet, worker number `rank`.

        The workers find each other through the empty `folder` that they share, or
        through the free `port` of this machine, whichever the framework needs.
        """

    @abstractmethod
    def start_shared(self, setup: Setup) -> Session:
        """Return a wrapped session, as `start` does, in a process that has joined. All
        workers share its windows.

        Every worker makes the same calls in the same order: this call, and the calls of
        the session. `idle` counts as a micro-batch.
        """
