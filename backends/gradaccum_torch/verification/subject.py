"""A torch model, its loss and one batch, run under conditions, with everything of the user's as it was before and after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Column, Conditions, HostRandom, Layer, Precision, Run, explain, require_weight, scalar_loss_error
from gradaccum_torch.linearity import verify_loss_scaling
from gradaccum_torch.torch_private import input_dtypes
from gradaccum_torch.verification.batch import Batch
from gradaccum_torch.verification.draws import Draw, Drawing, Recording, repeated
from gradaccum_torch.verification.kept import Kept
from gradaccum_torch.verification.layers import Calls, mixing_layers
from gradaccum_torch.verification.perturbing import perturbed
from gradaccum_torch.verification.random_state import RandomState

REPETITIONS = 6
"""Runs in a row that are compared for fixed random numbers: eight fair bits are the same in all of them once in 2^40 times."""


class TorchSubject:
    """The `gradaccum.kit.Subject` of torch.

    Args:
        model: the model.
        loss_fn: ``loss_fn(model, *batch)``.
        batch: the batch.
        weight: the weight of a micro-batch.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, weight: Callable[[Sequence[int]], float]) -> None:
        self._model, self._loss_fn, self._batch, self._weight = model, loss_fn, batch, weight
        self._random, self._kept = RandomState.now(), Kept(model, loss_fn)
        self._host = HostRandom(loss_fn, *model.modules())
        self._modules = {_joined(path, name): inner for path, outer in self._kept.modules.items() for name, inner in outer.named_modules()}
        self._parameters = _parameters(self._kept.modules)
        self._every = dict.fromkeys(parameter for outer in self._kept.modules.values() for parameter in outer.parameters())
        self._generators: dict[torch.Generator, Tensor] = {}
        self._recordings: dict[tuple[int, bool], Recording] = {}
        self._epsilon = 0.0
        self.items: int = batch.items
        self.names: Sequence[str] = list(self._parameters)

    def window(self, parts: Sequence[Sequence[int]], conditions: Conditions) -> list[Run]:
        """See `Subject.window`."""
        recording = self._recording(conditions) if conditions.replay else None
        with self._isolated(conditions):
            return [self._run(part, conditions, recording) for part in parts]

    def dot(self, a: Tensor, b: Tensor) -> float:
        """See `Subject.dot`."""
        return float(torch.dot(a.flatten(), b.flatten()))

    def precision(self, name: str) -> Precision:
        """See `Subject.precision`."""
        limits = torch.finfo(self._parameters[name].dtype)
        return Precision(self._roundoff(), limits.smallest_normal * limits.eps, self._parameters[name].numel(), self._batch.terms)

    def columns(self) -> Sequence[Column]:
        """See `Subject.columns`."""
        return self._batch.columns()

    def mixing_layers(self) -> Sequence[Layer]:
        """See `Subject.mixing_layers`."""
        every, fewer = range(self.items), -(-self.items // 2)
        calls = Calls(self._modules, self.items, fewer)
        for items, part in ((every, False), (range(fewer), True)):
            with self._isolated(Conditions()), calls.watching(part=part):
                self._loss(self._batch.part(items))
        isolated = lambda: self._isolated(Conditions(), gradients=False)  # noqa: E731
        return mixing_layers(self._modules, calls, self.items, fewer, self._roundoff(), isolated)

    def fixed_draws(self) -> Sequence[str]:
        """See `Subject.fixed_draws`."""
        every = range(self.items)
        hosts = self._host.seeded(self._host_after(every, 0), self._host_after(every, 1))
        if not self._draws(every, Conditions()):
            return hosts
        runs: list[Sequence[Draw]] = []
        with self._isolated(Conditions()):
            for _ in range(REPETITIONS):
                with Drawing() as drawing:
                    self._loss(self._batch.part(every))
                self._generators |= {found: state for found, state in drawing.generators.items() if found not in self._generators}
                runs.append(drawing.draws)
        return [*repeated(runs), *hosts]

    def _host_after(self, items: Sequence[int], seed: int) -> list[bytes]:
        """The states of Python's and NumPy's generators after a loss of `items`."""
        with self._isolated(Conditions(seed=seed)):
            self._loss(self._batch.part(items))
            return self._host.states()

    def unreplayed_draws(self) -> Sequence[str]:
        """See `Subject.unreplayed_draws`."""
        fewer = range(-(-self.items // 2))
        hosts = self._host.per_item(self._host_after(range(self.items), 0), self._host_after(fewer, 0))
        return (*self._recording(Conditions()).unreplayed, *hosts)

    def custom_rules(self) -> Sequence[str]:
        """See `Subject.custom_rules`."""
        with self._isolated(Conditions()):
            arguments = self._batch.part(range(self.items))
            return verify_loss_scaling(lambda: self._loss(arguments), self._parameters).culprits

    def _run(self, part: Sequence[int], conditions: Conditions, recording: Recording | None) -> Run:
        if not conditions.carry_state:
            self._kept.put_back()
            self._set_mode(conditions)
        if conditions.replay:
            self._host.begin(conditions.seed)
        arguments = self._batch.part(part, self._roundoff() if conditions.perturbation is not None else 0.0, conditions.perturbation)
        with recording.replayed(part) if recording is not None else nullcontext():
            loss = self._loss(arguments)
            found = torch.autograd.grad(loss * conditions.scale, list(self._parameters.values()), allow_unused=True)
        pairs = zip(self._parameters, found, strict=True)
        gradients = {name: _wide(gradient) / conditions.scale for name, gradient in pairs if gradient is not None}
        return Run(float(loss.detach()), gradients, self._weight(part), self._kept.changed() if conditions.perturbation is None else ())

    def _loss(self, arguments: Sequence[Any]) -> Tensor:
        with torch.enable_grad():
            loss = self._loss_fn(self._model, *arguments)
        self._require_no_backward()
        return _require_loss(loss)

    def _require_no_backward(self) -> None:
        """`_isolated` took every ``.grad`` away, so one that is there was filled by the loss function itself."""
        if any(parameter.grad is not None for parameter in self._every):
            fix = "Leave backward() out of loss_fn, and return the loss: verify differentiates it."
            raise explain(UsageError, "loss_fn", expected="a function that returns its loss", found="one that calls backward()", fix=fix)

    def _recording(self, conditions: Conditions) -> Recording:
        """The draws of the large batch at that seed and in that mode."""
        key = (conditions.seed, conditions.training)
        if key not in self._recordings:
            plain, fewer = Conditions(seed=conditions.seed, training=conditions.training), -(-self.items // 2)
            whole = self._draws(range(self.items), plain)
            part = self._draws(range(fewer), plain) if whole else []
            self._recordings[key] = Recording(whole, part, self.items, fewer)
        return self._recordings[key]

    def _draws(self, items: Sequence[int], conditions: Conditions) -> list[Draw]:
        drawing = Drawing()
        with self._isolated(conditions), drawing:
            loss = self._loss(self._batch.part(items))
        self._generators |= {found: state for found, state in drawing.generators.items() if found not in self._generators}
        self._epsilon = max([self._epsilon, *(torch.finfo(dtype).eps for dtype in _differentiated(loss))])
        return drawing.draws

    def _roundoff(self) -> float:
        """One rounding of the coarsest floating dtype that is differentiated: autocast's copies of the parameters count."""
        if not self._epsilon:
            self._draws(range(self.items), Conditions())
        return self._epsilon

    @contextmanager
    def _isolated(self, conditions: Conditions, *, gradients: bool = True) -> Iterator[None]:
        """The user's state at its start and at its end; parameters perturbed and without ``.grad`` in between."""
        with ExitStack() as ending:
            ending.callback(self._put_back)
            ending.enter_context(_without_grad(self._every))
            ending.enter_context(_uncompiled())
            ending.enter_context(torch.set_grad_enabled(gradients))
            self._random.put_back()
            if conditions.seed:
                torch.manual_seed(0x5EED0 + conditions.seed)
            self._host.begin(conditions.seed)
            self._set_mode(conditions)
            if conditions.perturbation is not None:
                self._perturb(conditions.perturbation)
            yield

    def _put_back(self) -> None:
        self._kept.put_back()
        self._random.put_back()
        self._host.begin()
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _set_mode(self, conditions: Conditions) -> None:
        if not conditions.training:
            for module in self._kept.modules.values():
                module.eval()

    def _perturb(self, number: int) -> None:
        epsilon = self._roundoff()
        for place, parameter in enumerate(self._parameters.values()):
            parameter.data.copy_(perturbed(parameter.data, epsilon, number + 97 * place, integers=True))


def _parameters(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """The parameters to differentiate by, each once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), (_joined(path, name), parameter))
    return dict(found.values())


def _differentiated(loss: Tensor) -> set[torch.dtype]:
    """The floating dtypes in the graph of `loss`.

    Raises:
        UsageError: a reentrant checkpoint is in it, which hides its parameters from `torch.autograd.grad`: they would seem to be unused.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    if any(node is not None and node.name() == "CheckpointFunctionBackward" for node in seen):
        fix = "Write torch.utils.checkpoint.checkpoint(..., use_reentrant=False); it has the same gradient."
        raise explain(UsageError, "loss_fn", expected="a graph that holds its parameters", found="a reentrant checkpoint", fix=fix)
    found = set().union({loss.dtype}, *(input_dtypes(node) for node in seen if node is not None))
    return {dtype for dtype in found if dtype.is_floating_point}


@contextmanager
def _without_grad(parameters: dict[nn.Parameter, None]) -> Iterator[None]:
    """The user's ``.grad`` is put aside: not a number of it is touched."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _uncompiled() -> Any:
    """Compiled modules run as they are written: a compiled program has no operations to look at."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _require_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise explain(
            ArgumentTypeError, "loss_fn", expected="a function that returns a scalar tensor", got=loss, fix="Return the loss alone."
        )
    if loss.shape != ():
        raise scalar_loss_error(f"a tensor of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        fix = "Compute it from the model that loss_fn is given, without .detach(), .item() or torch.no_grad()."
        raise explain(ArgumentValueError, "loss_fn", expected="a loss that depends on parameters", found="one without a graph", fix=fix)
    return loss


def weight_of(weight: Any, batch: Batch) -> Callable[[Sequence[int]], float]:
    """The weight of the micro-batch of some items, as accumulation will have it.

    Args:
        weight: None (the number of items), a callable of the micro-batch, or one number per item.
        batch: the batch.
    """
    if weight is None:
        return lambda items: float(len(items))
    if callable(weight):
        return lambda items: require_weight(weight(*batch.part(items)))
    per_item = [require_weight(value) for value in (weight.tolist() if hasattr(weight, "tolist") else weight)]
    if len(per_item) != batch.items:
        fix = "Give one number per item, or a callable of the micro-batch."
        raise explain(ArgumentValueError, "weight", expected=f"{batch.items} numbers", found=f"{len(per_item)}", fix=fix)
    return lambda items: sum(per_item[item] for item in items)


def _wide(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to(torch.float64) if not dense.is_complex() else torch.view_as_real(dense.to(torch.complex128))


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
