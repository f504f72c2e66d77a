"""The harness of a backend: it builds a model from a spec, trains it, and shows its
state to the suite.

A backend has one subclass of `Harness`. It stands in ``gradaccum_harnesses``, or its package
registers it under the backend's name in the entry-point group ``gradaccum.harnesses``. Everything that goes in or comes out
is NumPy. "Second door" means: read the framework's own objects (parameters, checkpoint
entries, state trees), never the API under test.
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
"""Dtype of the model's parameters. NumPy has no bfloat16: such arrays go in and come
out as float32.
"""
GradientTree = Mapping[str, Array | None]
"""Gradients by parameter name. None: the parameter took no part in this micro-batch."""
Option = Any
"""The value of one argument of `gradaccum.wrap`: a right one, or in some tests a wrong
one.
"""
WrapOptions = Mapping[str, Option]
"""Arguments of `gradaccum.wrap` by name, ``steps`` among them."""


class Setup(NamedTuple):
    """What a session is started with."""

    model: Model
    weights: Arrays
    """The model's parameters at the start."""
    optimizer: Optimizer
    dtype: Dtype = "float32"
    mode: str | None = None
    """One of the harness's `modes`; None: the default."""
    options: WrapOptions | None = None
    """`gradaccum.wrap`'s, with ``steps``; None: do not wrap."""


class Captured(NamedTuple):
    """The calls that a ``capture`` optimizer received."""

    calls: int
    """Their number."""
    gradient: Arrays
    """The gradient of the last call; empty before the first."""


class Session(ABC):
    """One model under one optimizer, wrapped or (for the large batch) bare."""

    @abstractmethod
    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        """Forward, backward and the optimizer's call, as a user of the framework writes
        them; returns the (unscaled) loss.

        `loss` is the mean or the sum over the items. If the wrapper has a loss scale,
        it is applied as users apply it. The wrapper is told the loss, as users tell it.
        """

    @abstractmethod
    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        """One micro-batch whose gradient is exactly `tree` times the loss scale; values
        may be inf or NaN.
        """

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        """One micro-batch as `gradients` makes it, where the wrapper is told this
        unscaled loss, NaN for one that is not known; False if the session has no such
        call, and made none.
        """
        return False

    def gradients_in(self, tree: Arrays) -> None:
        """One micro-batch whose gradients are views of memory, which the caller writes
        over for the next micro-batch.

        A framework that can take NumPy's memory as a gradient takes it without a copy.
        The parameters are float64.
        """
        self.gradients({name: gradient.copy() for name, gradient in tree.items()})

    @abstractmethod
    def flush(self, denominator: Option = None) -> None:
        """Close the open window; `denominator` is the call's own, if one is given."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the open window."""

    def listen(self, listener: Listener) -> bool:
        """Have the wrapped optimizer tell `listener` of each window that closes; False
        if it has no listeners.
        """
        return False

    def on_update(self, function: Callable[[], object]) -> bool:
        """Have the wrapped optimizer call `function` after each update; False if it
        calls nothing.
        """
        return False

    def idle(self) -> None:  # noqa: B027 - most backends do nothing
        """No micro-batch on this worker while others have one: nothing to do, unless
        all workers run one program.
        """

    @abstractmethod
    def result(self) -> StepResult:
        """The API's `StepResult`, in Python numbers."""

    @abstractmethod
    def state(self) -> State:
        """Second door: the seven fields, in Python numbers."""

    @abstractmethod
    def accumulator(self) -> Arrays:
        """Second door: the sum as the backend stores it now, undivided, by parameter
        name; zeros where it stores none.
        """

    @abstractmethod
    def parameters(self) -> Arrays:
        """Second door: the model's parameters."""

    @abstractmethod
    def masters(self) -> Arrays:
        """Second door: the float32 master weights, by parameter name; only for sessions
        with ``master_weights=True``.
        """

    @abstractmethod
    def optimizer_state(self) -> Arrays:
        """Second door: every array of the inner optimizer's state, by any stable
        name.
        """

    @abstractmethod
    def captured(self) -> Captured:
        """Second door: the calls of the ``capture`` optimizer; only for sessions that
        have one.
        """

    @abstractmethod
    def predict(self, x: Array) -> Array:
        """The model's output for inputs (batch, *input_shape)."""

    @abstractmethod
    def snapshot(self) -> Any:
        """A copy of model and optimizer in memory, taken through the framework's own
        state functions. Only sessions of the same backend look into it.
        """

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot of this session or of one built alike. The snapshot can
        be used again.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write model and optimizer to files in the framework's own format."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read what `save` wrote, also into a freshly built session."""


class Harness(ABC):
    """A backend, as the suite drives it. One instance per process."""

    name: ClassVar[str]
    """The backend's name: that of its entry points."""
    modes: ClassVar[tuple[str, ...]] = ("eager",)
    """Ways to run a training step (``"eager"``, ``"jit"``, ``"graph"``); the first is
    the default.
    """
    deep_modes: ClassVar[tuple[str, ...]] = ()
    """The `modes` that only ``--deep`` runs."""
    brief_modes: ClassVar[tuple[str, ...]] = ()
    """The `modes` that without ``--deep`` run only the tests marked ``every_mode``: one
    that compiles what another mode compiles too.
    """
    gradient_shapes_reach_gradaccum: ClassVar[bool] = True
    """False if the framework itself refuses a gradient of another shape."""

    @abstractmethod
    def start(self, setup: Setup) -> Session:
        """A session over a fresh model."""

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
        """The framework's own gradient of the whole batch, without gradaccum."""


Returns = Callable[[Any, Any], Any]
"""What a loss function returns, of its loss and the logits (items, classes), which have
NumPy's methods.
"""


class LargeBatchCall(NamedTuple):
    """A call that takes the large batch, and the model that it is made for."""

    model: Model
    weights: Arrays
    dtype: Dtype = "float32"
    mode: str | None = None
    """One of the harness's `large_batch_modes`; None: the first."""
    loss: Loss = "mean"
    """What the loss function returns of a micro-batch."""
    options: Mapping[str, Option] = MappingProxyType({})
    """The call's own: ``steps``, ``micro_batch_size``, ``reduction``, ``weight`` (a
    NumPy array, one per item, or a function of a micro-batch's two arrays), ``axes``,
    ``has_aux`` and ``merge_aux``.

    With ``has_aux`` `returns` gives the loss and a dict of arrays.
    """
    extra: Any = None
    """If given, a nest of NumPy arrays and plain values, the batch's third argument.
    The loss function takes it and does not read it.
    """
    returns: Returns | None = None
    """If given, what the loss function returns in place of the loss; a coupled one's
    logits are ``left``.
    """


class Outcome(NamedTuple):
    """What a call that took the large batch gives back."""

    loss: float
    gradient: Arrays
    aux: Any
    """What the call returned as aux, in NumPy's arrays; where it has one aux for each
    micro-batch, a dict of arrays with a row for each micro-batch.
    """


class LargeBatchHarness(Harness):
    """A backend that takes the large batch in one call and splits it."""

    large_batch_modes: ClassVar[tuple[str, ...]]
    """The `modes` in which it can; the first is the default."""
    half_dtypes: ClassVar[tuple[Dtype, ...]] = ("bfloat16",)
    """The half-precision dtypes in which the framework runs a model on this machine."""

    @abstractmethod
    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        """The backend's splitting call; `batch` reaches it as a nest of two arrays,
        ``(x, y)``.
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
        """A whole window of `session`'s wrapped optimizer in one call; returns the
        (unscaled) loss.

        `returns` is as that of `LargeBatchCall`. `session` was started with
        ``steps=None`` in one of the `large_batch_modes`.
        """

    @abstractmethod
    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        """The backend's call for losses that couple the items of a batch; its options
        are ``steps`` and the like.

        The outputs of a micro-batch are a dict: ``left``, the model's of ``x``, and
        ``right``, the model's of `mirrored` ``x``. The loss of all outputs is
        `contrast`, with its parameter ``temperature``, a scalar that begins at
        `TEMPERATURE`. The gradient has an entry of that name.
        """


class VerifyCall(NamedTuple):
    """A call of `gradaccum.verify`."""

    loss: Callable[..., Any]
    """What the loss function returns, of the model's outputs (items, classes), its
    parameters by name, and the arrays of the batch. All of them have NumPy's methods.
    """
    batch: tuple[Array, ...]
    """The model takes the first array."""
    options: Mapping[str, Option] = MappingProxyType({})
    """``steps``, ``reduction``, ``weight`` and ``axes``."""
    dtype: Dtype = "float32"


class VerifyingHarness(Harness):
    """A backend that `gradaccum.verify` has a check for."""

    @abstractmethod
    def verify(
        self, model: Model, weights: Arrays, call: VerifyCall
    ) -> VerificationReport:
        """The report of `gradaccum.verify`."""


class WorkersHarness(Harness):
    """A backend whose windows several workers can share, one process each."""

    worker_modes: ClassVar[tuple[str, ...]]
    """The `modes` in which they can."""

    @abstractmethod
    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        """Make this process, in which nothing has run yet, worker number `rank`.

        The workers meet in the empty `folder` that they share, or at the free `port` of
        this machine: as the engine wants it.
        """

    @abstractmethod
    def start_shared(self, setup: Setup) -> Session:
        """In a process that joined: as `start`, wrapped, but a window is that of all
        workers.

        Every worker makes the same calls in the same order, this one and those of the
        session; `idle` stands for a micro-batch.
        """
