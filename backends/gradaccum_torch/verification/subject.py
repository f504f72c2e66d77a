"""A torch model, its loss and one batch, run under conditions; everything of the user's
is restored.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import data

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import (
    Column,
    Conditions,
    HostRandom,
    Precision,
    Run,
    explain,
    require_weight,
    scalar_loss_error,
)
from gradaccum_torch.large_batch.replay import RandomState
from gradaccum_torch.torch_private.names import Division, input_dtypes, last_division
from gradaccum_torch.verification.batch import Batch, perturbed
from gradaccum_torch.verification.custom_backward import graph_of, verify_loss_scaling
from gradaccum_torch.verification.draws import Draw, Drawing, Recording, repeated

REPETITIONS = 6
"""Runs in a row that are compared for fixed random numbers: eight fair bits are the
same in all of them once in 2^40 times.
"""


class TorchSubject:
    """The `gradaccum.kit.Subject` of torch."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        batch: Batch,
        weight: Callable[[Sequence[int]], float],
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._weight = weight
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        self._random = RandomState(
            [torch.device("cuda", index) for index in range(devices)]
        )
        self._kept = Kept(model, loss_fn)
        self._host = HostRandom(loss_fn, *model.modules())
        self._modules = {
            _joined(path, name): inner
            for path, outer in self._kept.modules.items()
            for name, inner in outer.named_modules()
        }
        self._parameters = _parameters(self._kept.modules)
        self._every = dict.fromkeys(
            parameter
            for outer in self._kept.modules.values()
            for parameter in outer.parameters()
        )
        self._generators: dict[torch.Generator, Tensor] = {}
        self._recordings: dict[tuple[int, bool], Recording] = {}
        self.items: int = batch.items
        self.names: Sequence[str] = list(self._parameters)

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        recording = self._recording(conditions) if conditions.replay else None
        with self._isolated(conditions):
            return [self._run(part, conditions, recording) for part in parts]

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(torch.dot(a.flatten(), b.flatten()))

    def precision(self, name: str) -> Precision:
        limits = torch.finfo(self._parameters[name].dtype)
        return Precision(
            self._roundoff,
            limits.smallest_normal * limits.eps,
            self._parameters[name].numel(),
            self._batch.terms,
        )

    def columns(self) -> Sequence[Column]:
        return self._batch.columns()

    def statistics_layers(self) -> Sequence[str]:
        return [
            name
            for name, module in self._modules.items()
            if module.training and "BatchNorm" in type(module).__name__
        ]

    def fixed_draws(self) -> Sequence[str]:
        every = range(self.items)
        hosts = self._host.seeded(
            self._host_after(every, 0), self._host_after(every, 1)
        )
        if not self._draws(every, Conditions())[0]:
            return hosts
        runs: list[Sequence[Draw]] = []
        with self._isolated(Conditions()):
            for _ in range(REPETITIONS):
                with Drawing() as drawing:
                    self._loss(self._batch.part(every))
                self._generators.update({**drawing.generators, **self._generators})
                runs.append(drawing.draws)
        return [*repeated(runs), *hosts]

    def _host_after(self, items: Sequence[int], seed: int) -> list[bytes]:
        with self._isolated(Conditions(seed=seed)):
            self._loss(self._batch.part(items))
            return self._host.states()

    def unreplayed_draws(self) -> Sequence[str]:
        fewer = range(-(-self.items // 2))
        hosts = self._host.per_item(
            self._host_after(range(self.items), 0), self._host_after(fewer, 0)
        )
        return (*self._recording(Conditions()).unreplayed, *hosts)

    def division(self) -> Division | None:
        """Return the division of the large batch's loss by a number, if it is the
        loss's last operation.
        """
        with self._isolated(Conditions()):
            return last_division(self._loss(self._batch.part(range(self.items))))

    def custom_rules(self) -> Sequence[str]:
        with self._isolated(Conditions()):
            arguments = self._batch.part(range(self.items))
            return verify_loss_scaling(
                lambda: self._loss(arguments), self._parameters
            ).culprits

    def _run(
        self, part: Sequence[int], conditions: Conditions, recording: Recording | None
    ) -> Run:
        if not conditions.carry_state:
            self._kept.put_back()
            self._prepare(conditions)
        if conditions.replay:
            self._host.begin(conditions.seed)
        arguments = self._batch.part(
            part,
            self._roundoff if conditions.perturbation is not None else 0.0,
            conditions.perturbation,
        )
        with recording.replayed(part) if recording is not None else nullcontext():
            loss = self._loss(arguments)
            found = torch.autograd.grad(
                loss * conditions.scale,
                list(self._parameters.values()),
                allow_unused=True,
            )
        pairs = zip(self._parameters, found, strict=True)
        gradients = {
            name: _wide(gradient) / conditions.scale
            for name, gradient in pairs
            if gradient is not None
        }
        return Run(
            float(loss.detach()),
            gradients,
            self._weight(part),
            self._kept.changed() if conditions.perturbation is None else (),
        )

    def _loss(self, arguments: Sequence[Any]) -> Tensor:
        with torch.enable_grad():
            loss = self._loss_fn(self._model, *arguments)
        self._require_no_backward()
        return _require_loss(loss)

    def _require_no_backward(self) -> None:
        """Raise unless every ``.grad`` is None: otherwise the loss function called
        ``backward()``.
        """
        if any(parameter.grad is not None for parameter in self._every):
            fix = (
                "Leave backward() out of loss_fn, and return the loss: verify"
                " differentiates it."
            )
            raise explain(
                UsageError,
                "loss_fn",
                expected="a function that returns its loss",
                found="one that calls backward()",
                fix=fix,
            )

    def _recording(self, conditions: Conditions) -> Recording:
        key = (conditions.seed, conditions.training)
        if key not in self._recordings:
            plain = Conditions(seed=conditions.seed, training=conditions.training)
            fewer = -(-self.items // 2)
            whole, _ = self._draws(range(self.items), plain)
            part = self._draws(range(fewer), plain)[0] if whole else []
            self._recordings[key] = Recording(whole, part, self.items, fewer)
        return self._recordings[key]

    def _draws(
        self, items: Sequence[int], conditions: Conditions
    ) -> tuple[list[Draw], float]:
        drawing = Drawing()
        with self._isolated(conditions), drawing:
            loss = self._loss(self._batch.part(items))
        self._generators.update({**drawing.generators, **self._generators})
        return drawing.draws, max(
            (torch.finfo(dtype).eps for dtype in _differentiated(loss)), default=0.0
        )

    @functools.cached_property
    def _roundoff(self) -> float:
        """One rounding of the coarsest floating dtype that is differentiated,
        autocast's copies included.
        """
        return self._draws(range(self.items), Conditions())[1]

    @contextmanager
    def _isolated(self, conditions: Conditions) -> Iterator[None]:
        """Restore the user's state at start and end; in between parameters are
        perturbed, without ``.grad``.
        """
        with ExitStack() as ending:
            ending.callback(self._put_back)
            ending.enter_context(_without_grad(self._every))
            ending.enter_context(_uncompiled())
            ending.enter_context(torch.enable_grad())
            self._random.put_back()
            if conditions.seed:
                torch.manual_seed(0x5EED0 + conditions.seed)
            self._host.begin(conditions.seed)
            self._prepare(conditions)
            yield

    def _put_back(self) -> None:
        self._kept.put_back()
        self._random.put_back()
        self._host.begin()
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _prepare(self, conditions: Conditions) -> None:
        """Set the mode and perturb the parameters, which have the user's values."""
        if not conditions.training:
            for module in self._kept.modules.values():
                module.eval()
        for place, parameter in enumerate(
            self._parameters.values() if conditions.perturbation is not None else ()
        ):
            number = (conditions.perturbation or 0) + 97 * place
            parameter.data.copy_(
                perturbed(parameter.data, self._roundoff, number, integers=True)
            )


def _parameters(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), (_joined(path, name), parameter))
    return dict(found.values())


def _differentiated(loss: Tensor) -> set[torch.dtype]:
    """Return the floating dtypes in the graph of `loss`.

    Raises:
        UsageError: it holds a reentrant checkpoint, which hides its parameters from
            `torch.autograd.grad`.
    """
    nodes = graph_of(loss)
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
        fix = (
            "Write torch.utils.checkpoint.checkpoint(..., use_reentrant=False); it has"
            " the same gradient."
        )
        raise explain(
            UsageError,
            "loss_fn",
            expected="a graph that holds its parameters",
            found="a reentrant checkpoint",
            fix=fix,
        )
    found = {loss.dtype}.union(*map(input_dtypes, nodes))
    return {dtype for dtype in found if dtype.is_floating_point}


@contextmanager
def _without_grad(parameters: dict[nn.Parameter, None]) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _uncompiled() -> Any:
    """Run compiled modules as they are written, so that operations can be seen."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _require_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise explain(
            ArgumentTypeError,
            "loss_fn",
            expected="a function that returns a scalar tensor",
            got=loss,
            fix="Return the loss alone.",
        )
    if loss.shape != ():
        raise scalar_loss_error(f"a tensor of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        fix = (
            "Compute it from the model that loss_fn is given, without .detach(),"
            " .item() or torch.no_grad()."
        )
        raise explain(
            ArgumentValueError,
            "loss_fn",
            expected="a loss that depends on parameters",
            found="one without a graph",
            fix=fix,
        )
    return loss


def weight_of(weight: Any, batch: Batch) -> Callable[[Sequence[int]], float]:
    if weight is None:
        return lambda items: float(len(items))
    if callable(weight):
        return lambda items: require_weight(weight(*batch.part(items)))
    per_item = [
        require_weight(value)
        for value in (weight.tolist() if hasattr(weight, "tolist") else weight)
    ]
    if len(per_item) != batch.items:
        fix = "Give one number per item, or a callable of the micro-batch."
        raise explain(
            ArgumentValueError,
            "weight",
            expected=f"{batch.items} numbers",
            found=f"{len(per_item)}",
            fix=fix,
        )
    return lambda items: sum(per_item[item] for item in items)


def _wide(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if not dense.is_complex():
        return dense.to(torch.float64)
    return torch.view_as_real(dense.to(torch.complex128))


# The contents of the user's objects, noted before a run and put back after it: buffers,
# attributes, modes, hooks, random generators.
#
# The walk begins at the model and at what the loss function closes over. It notes each
# container's entries and each tensor's numbers, and puts back the same objects with the
# same numbers: who holds a buffer elsewhere sees it unchanged. A value that changes
# nowhere on that way (a file, a global variable) is out of reach; `repeatable` of the
# core notices if the loss depends on it.


DEPTH = 3
"""How many containers and objects deep the walk goes from a module or the loss
function: a trainer must not drag in all that it has.
"""
LEFT_ALONE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.optim.Optimizer,
    data.Dataset,
    data.DataLoader,
)
"""Types of values into which the walk does not go: no forward pass changes them, and a
copy of their tensors would be large.
"""


class Note:
    """One object as it was: a tensor, a dict, a list, a variable or a random
    generator's state.
    """

    def __init__(
        self, path: str | None, read: Callable[[], Any], write: Callable[[Any], object]
    ) -> None:
        self._path = path
        self._read = read
        self._write = write
        before = read()
        self._before = before.clone() if isinstance(before, Tensor) else before

    def changed(self) -> Iterator[str]:
        """Yield the names of what changed, except random numbers."""
        before = self._before
        now = self._read()
        if self._path is not None and isinstance(before, dict):
            keys = [*before, *(key for key in now if key not in before)]
            yield from (
                _joined(self._path, str(key))
                for key in keys
                if not _same(before.get(key, self), now.get(key, self))
            )
        elif self._path is not None and not _alike(before, now, _same):
            yield self._path

    def put_back(self) -> None:
        if not _alike(self._before, self._read(), is_):
            self._write(self._before)


def _note_of(path: str, value: Any) -> Note | None:
    if (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_meta
    ):
        # By .data: the versions of parameters, which others watch, stay.
        return Note(path, value.detach, value.data.copy_)
    if isinstance(value, torch.Generator):
        return Note(None, value.get_state, value.set_state)
    if isinstance(value, types.CellType):
        return Note(
            path,
            lambda: [value.cell_contents],
            lambda before: setattr(value, "cell_contents", before[0]),
        )
    if isinstance(value, list | deque | dict):
        kind = dict if isinstance(value, dict) else list
        return Note(path, lambda: kind(value), functools.partial(_refill, value))
    return None


def _refill(container: Any, before: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(before)


def _alike(before: Any, now: Any, same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(before, Tensor):
        return before.shape == now.shape and bool(torch.equal(before, now))
    a, b = (
        [*each, *each.values()] if isinstance(each, dict) else each
        for each in (before, now)
    )
    return len(a) == len(b) and all(map(same, a, b))


class Kept:
    """Everything that was noted, from several roots."""

    def __init__(self, model: object, loss_fn: Callable[..., object]) -> None:
        self._notes: list[Note] = []
        self._seen: dict[int, object] = {}
        self.modules: dict[str, nn.Module] = {}
        """The outermost modules found, by path; the model's is ""."""
        self._walk("", model, DEPTH)
        for name, value in _closed_over(loss_fn, set()):
            self._walk(name, value, DEPTH)

    def changed(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for note in self._notes for name in note.changed())
        # The mode is a condition, not state.
        return tuple(name for name in names if name.rpartition(".")[2] != "training")

    def put_back(self) -> None:
        with torch.no_grad():
            for note in self._notes:
                note.put_back()

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, LEFT_ALONE) or depth < 0:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            return self._walk_module(path, value)
        if (note := _note_of(path, value)) is not None:
            self._notes.append(note)
        if isinstance(value, types.CellType):
            self._walk(path, value.cell_contents, depth)
        elif isinstance(value, dict):
            self._walk_all(path, value.items(), depth)
        elif isinstance(value, list | deque | tuple):
            self._walk_all(path, enumerate(value), depth)
        elif not isinstance(value, Tensor | torch.Generator) and isinstance(
            getattr(value, "__dict__", None), dict
        ):
            self._walk(path, vars(value), depth)

    def _walk_module(self, path: str, module: nn.Module) -> None:
        if not any(
            module is inner
            for outer in self.modules.values()
            for inner in outer.modules()
        ):
            self.modules[path] = module
        for name, value in [("", vars(module)), *vars(module).items()]:
            if isinstance(value, dict) and (
                name == "" or name in ("_parameters", "_buffers", "_modules")
            ):
                self._seen[id(value)] = value
                self._notes.extend(filter(None, [_note_of(path, value)]))
                if name:
                    self._walk_all(path, value.items(), DEPTH)
            else:
                self._walk(_joined(path, name), value, DEPTH)

    def _walk_all(
        self, path: str, pairs: Iterable[tuple[object, Any]], depth: int
    ) -> None:
        for key, value in list(pairs):
            self._walk(_joined(path, str(key)), value, depth - 1)


def _closed_over(loss_fn: Any, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield what a callable refers to besides its arguments; its variables as their
    cells.
    """
    if id(loss_fn) in seen:
        return
    seen.add(id(loss_fn))
    if isinstance(loss_fn, functools.partial):
        yield from _closed_over(loss_fn.func, seen)
        yield "loss_fn", [*loss_fn.args, *loss_fn.keywords.values()]
    elif isinstance(loss_fn, types.MethodType):
        yield from _closed_over(loss_fn.__func__, seen)
        yield "loss_fn", loss_fn.__self__
    elif isinstance(loss_fn, types.FunctionType):
        yield from (("loss_fn", vars(loss_fn)), ("loss_fn", loss_fn.__defaults__))
        for name, cell in zip(
            loss_fn.__code__.co_freevars, loss_fn.__closure__ or (), strict=True
        ):
            # An empty one is that of a variable without a value yet.
            if cell != types.CellType():
                yield name, cell
                if isinstance(
                    cell.cell_contents,
                    types.FunctionType | types.MethodType | functools.partial,
                ):
                    yield from _closed_over(cell.cell_contents, seen)
    else:
        yield "loss_fn", loss_fn


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _same(a: object, b: object) -> bool:
    return a is b or (
        type(a) is type(b)
        and isinstance(a, bool | int | float | str | bytes)
        and a == b
    )
