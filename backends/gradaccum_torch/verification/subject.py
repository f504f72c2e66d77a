"""Runs a torch model and its loss on one batch under various conditions, and restores
the user's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.kit import Batch, Conditions, HostRandom, Precision, Run
from gradaccum_torch.large_batch.gradients import REENTRANT_NODE, leaves_of_graph
from gradaccum_torch.large_batch.replay import RandomState, random_devices
from gradaccum_torch.torch_private.names import Division, last_division

UNUSUAL_SEED = 0x5EED0
"""A seed that users are unlikely to choose."""


class TorchSubject:
    """Runs a torch model for `gradaccum_torch.verify`: the torch implementation of
    `gradaccum.kit.Subject`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        batch: Batch,
        weight: Callable[[Sequence[int]], float],
        has_aux: bool,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._weight = weight
        self._has_aux = has_aux
        self._state = ModelState(model)
        self._random = RandomState(random_devices(model.parameters()))
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.items: int = batch.items
        self.names: Sequence[str] = list(self._parameters)
        self.division: Division | None = None
        """The last operation that computed the loss, if it divides by a number. It is
        known once the loss was computed.
        """

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        with self._isolated():
            self._prepare(conditions)
            runs = []
            for part in parts:
                if not conditions.carry_state:
                    self._state.restore()
                    self._prepare(conditions)
                self._set_random_state(conditions.seed)
                runs.append(self._run(part, conditions))
            return runs

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(torch.dot(a.flatten(), b.flatten()))

    def precision(self, name: str) -> Precision:
        limits = self._coarsest
        smallest = limits.smallest_normal * limits.eps
        elements = self._parameters[name].numel()
        return Precision(limits.eps, smallest, elements, self._batch.terms)

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return self._batch.arrays(part)

    def statistics_layers(self) -> Sequence[str]:
        return [
            name
            for name, module in self._model.named_modules()
            if module.training and "BatchNorm" in type(module).__name__
        ]

    def random_layers(self) -> Sequence[str]:
        return self._random_layers

    @cached_property
    def _random_layers(self) -> list[str]:
        """The names of the training-mode modules that draw random numbers in their own
        forward pass, outside of their submodules.
        """
        names = {module: name for name, module in self._model.named_modules()}
        running: list[nn.Module] = []
        drawing: dict[str, None] = {}
        devices = random_devices(self._model.parameters())
        state = RandomState(devices)

        def note() -> None:
            nonlocal state
            if state.has_torch_moved():
                state = RandomState(devices)
                if running:
                    drawing[names[running[-1]]] = None

        def enter(module: nn.Module, _: Any) -> None:
            note()
            running.append(module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            note()
            running.pop()

        with self._isolated(), ExitStack() as hooks:
            for module in names:
                handle = module.register_forward_pre_hook(enter, prepend=True)
                hooks.callback(handle.remove)
                handle = module.register_forward_hook(leave)
                hooks.callback(handle.remove)
            self._loss(range(self.items))
        return [name for name in drawing if self._model.get_submodule(name).training]

    @cached_property
    def _coarsest(self) -> torch.finfo:
        """The least precise dtype among the parameters and the tensors that autograd
        saves for the backward pass, including copies made by autocast.
        """
        dtypes = {parameter.dtype for parameter in self._parameters.values()}

        def note(tensor: Tensor) -> Tensor:
            dtypes.add(tensor.dtype)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with self._isolated(), hooks:
            loss = self._loss(range(self.items))
        leaves_of_graph([loss], set(), {REENTRANT_NODE})
        self.division = last_division(loss)
        dtypes.add(loss.dtype)
        floating = [torch.finfo(each) for each in dtypes if each.is_floating_point]
        return max(floating, key=lambda limits: limits.eps)

    def _loss(self, part: Sequence[int]) -> Any:
        loss = self._loss_fn(self._model, *self._batch.part(part))
        return loss[0] if self._has_aux else loss

    def _run(self, part: Sequence[int], conditions: Conditions) -> Run:
        loss = self._loss(part) * conditions.scale
        parameters = list(self._parameters.values())
        gradient_list = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = {}
        for name, gradient in zip(self._parameters, gradient_list, strict=True):
            if gradient is not None:
                gradients[name] = wide(gradient) / conditions.scale
        is_exact = conditions.perturbation is None
        changed_state = self._state.changed_names() if is_exact else ()
        return Run(gradients, self._weight(part), changed_state)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Clear every ``.grad`` inside the block. Afterwards, restore the gradients,
        the model and the random states.
        """
        gradients = [
            (parameter, parameter.grad) for parameter in self._model.parameters()
        ]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            # A compiled model would be recompiled for each size of micro-batch.
            with torch.compiler.set_stance("force_eager"), torch.enable_grad():
                yield
        finally:
            self._state.restore()
            self._random.put_back()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _set_random_state(self, seed: int) -> None:
        """Restore the user's random states if `seed` is 0. Otherwise set random states
        that depend on `seed`.
        """
        self._random.put_back()
        if seed:
            HostRandom().restore(seed)
            torch.manual_seed(UNUSUAL_SEED + seed)

    def _prepare(self, conditions: Conditions) -> None:
        """Set the training mode of the modules, and perturb the parameters, as
        `conditions` demands.
        """
        if not conditions.training:
            self._model.eval()
        if not conditions.random_layers:
            for name in self._random_layers:
                self._model.get_submodule(name).training = False
        if conditions.perturbation is None:
            return
        generator = torch.Generator().manual_seed(conditions.perturbation)
        for parameter in self._parameters.values():
            bits = torch.randint(0, 2, parameter.shape, generator=generator)
            signs = 2 * bits.double().to(parameter.device) - 1
            parameter.data.copy_(parameter.data * (1 + self._coarsest.eps * signs))


class ModelState:
    """A copy of a model's parameters, buffers and module attributes, with which the
    model can be restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._attributes = {
            name: dict(vars(module)) for name, module in self._modules.items()
        }
        self._buffers = {
            name: dict(module._buffers) for name, module in self._modules.items()
        }
        self._tensors = {
            name: (tensor, tensor.detach().clone())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }

    def restore(self) -> None:
        for name, module in self._modules.items():
            attributes = module.__dict__
            for attribute in attributes.keys() - self._attributes[name].keys():
                del attributes[attribute]
            attributes.update(self._attributes[name])
            module._buffers.clear()
            module._buffers.update(self._buffers[name])
        for tensor, value in self._tensors.values():
            # Write through .data, so that the versions of the parameters, which may be
            # watched, do not change.
            tensor.data.copy_(value)

    def changed_names(self) -> tuple[str, ...]:
        """Return the names of all buffers, parameters and plain attributes that have
        changed.
        """
        names = [
            name
            for name, (tensor, value) in self._tensors.items()
            if not torch.equal(tensor, value)
        ]
        for path, module in self._modules.items():
            for before, now in (
                (self._attributes[path], vars(module)),
                (self._buffers[path], module._buffers),
            ):
                names += [
                    f"{path}.{name}".lstrip(".")
                    for name, value in now.items()
                    if value is not before.get(name)
                    and isinstance(value, int | float | Tensor)
                ]
        return tuple(dict.fromkeys(names))


def wide(gradient: Tensor) -> Tensor:
    """Return `gradient` as a dense float64 tensor, in which a complex number becomes
    two real numbers.
    """
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.double()
