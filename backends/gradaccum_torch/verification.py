"""The torch model, loss and batch that `gradaccum.verify` examines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum.kit import Conditions, HostRandom, ModelState, Subject, places_of
from gradaccum_torch.extensions import is_divided_by
from gradaccum_torch.large_batch.gradients import (
    REENTRANT_NODE,
    leaves_of_graph,
    result_and_dtypes,
)
from gradaccum_torch.large_batch.replay import RandomState, random_devices
from gradaccum_torch.torch_private.fsdp import units_of
from gradaccum_torch.torch_private.names import Division, last_division
from gradaccum_torch.workers.checks import refuse_fully_shard


class TorchSubject(Subject):
    """Gradients come from `torch.autograd.grad`, which does not use ``.grad``. Hooks on
    tensors and modules run, but hooks on the accumulation into ``.grad`` do not.
    """

    def __init__(self, model: nn.Module, *arguments: Any, **options: Any) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        refuse_fully_shard("model", units_of(model))
        super().__init__(model, *arguments, **options)
        self.state = TorchState(model)
        self.random_state = TorchRandom(random_devices(model.parameters()))
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.places = places_of(
            {
                name: parameter.numel() * (2 if parameter.is_complex() else 1)
                for name, parameter in self._parameters.items()
            }
        )

    def is_model(self, value: object) -> bool:
        if not isinstance(value, nn.Module):
            return False
        return not {*self.model.parameters()}.isdisjoint(value.parameters())

    @staticmethod
    def is_array(value: object) -> bool:
        return isinstance(value, Tensor | np.ndarray)

    @staticmethod
    def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
        """Return a copy of the slices of `array` that belong to `items`, or of the
        whole array if `axis` is None. A copy is needed because a loss may write into
        its inputs.
        """
        if isinstance(array, Tensor):
            array = array.detach()
            if axis is None:
                return array.clone()
            index = torch.tensor(items, device=array.device)
            return array.index_select(axis, index)
        return array.copy() if axis is None else array.take(items, axis)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        gradients = [
            (parameter, parameter.grad) for parameter in self.model.parameters()
        ]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            # Run eagerly, because a compiled model would be recompiled for each
            # micro-batch size.
            with (
                torch.compiler.set_stance("force_eager"),
                torch.enable_grad(),
                super().isolated(),
            ):
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def perturb(self, seed: int) -> None:
        roundoff, _ = self.precision
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters.values():
            bits = torch.randint(0, 2, parameter.shape, generator=generator)
            signs = 2 * bits.double().to(parameter.device) - 1
            parameter.data.copy_(parameter.data * (1 + roundoff * signs))

    def named_layers(self) -> Any:
        return self.model.named_modules()

    def gradient(self, part: Sequence[int], conditions: Conditions) -> Tensor:
        loss = self.loss(self.model, self.batch.part(part)) * conditions.scale
        gradients = torch.autograd.grad(
            loss, list(self._parameters.values()), materialize_grads=True
        )
        return torch.cat([wide(gradient) for gradient in gradients]) / conditions.scale

    def random_layers(self) -> list[str]:
        """Return the names of the modules in training mode whose own forward code, not
        counting their submodules, draws random numbers.
        """
        devices = random_devices(self.model.parameters())
        state = RandomState(devices)
        running: list[nn.Module] = []
        drawing: list[nn.Module] = []

        def note_draws() -> None:
            nonlocal state
            if running and state.has_torch_moved():
                drawing.append(running[-1])
            state = RandomState(devices)

        def enter(module: nn.Module, _: Any) -> None:
            note_draws()
            running.append(module)

        def leave(*_: Any) -> None:
            note_draws()
            running.pop()

        # Register the hooks on each module, because torch.compile warns about hooks
        # that are registered for all modules at once.
        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(
                    module.register_forward_pre_hook(enter, prepend=True)
                )
                hooks.enter_context(module.register_forward_hook(leave))
            self.loss(self.model, self.batch.part(range(self.batch.items)))
        self.state.restore()
        return [
            name
            for name, module in self.model.named_modules()
            if module in drawing and module.training
        ]

    def unreached_parameters(self) -> list[str]:
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter not in self._graph.leaves
        ]

    def is_divided_by(self, steps: int, reduction: str) -> bool:
        return is_divided_by(self._graph.division, steps, reduction)

    @property
    def precision(self) -> tuple[float, float]:
        """The precision of the coarsest dtype among the parameters, the loss and the
        tensors that autograd saves for the backward pass, including copies made by
        autocast.
        """
        dtypes = self._graph.dtypes
        floating = [torch.finfo(each) for each in dtypes if each.is_floating_point]
        coarsest = max(floating, key=lambda limits: limits.eps)
        return coarsest.eps, coarsest.smallest_normal * coarsest.eps

    @cached_property
    def _graph(self) -> LossGraph:
        arguments = self.batch.part(range(self.batch.items))
        loss, dtypes = result_and_dtypes(lambda: self.loss(self.model, arguments))
        self.state.restore()
        dtypes |= {each.dtype for each in [loss, *self._parameters.values()]}
        leaves = {*leaves_of_graph([loss], set(), {REENTRANT_NODE})}
        return LossGraph(dtypes, leaves, last_division(loss))


class LossGraph(NamedTuple):
    """The graph with which autograd differentiates the loss of the whole batch."""

    dtypes: set[torch.dtype]
    """The dtypes of the parameters, of the saved tensors and of the loss."""
    leaves: set[Tensor]
    """The leaf tensors with respect to which the loss is differentiated."""
    division: Division | None
    """The last operation in the computation of the loss, if this operation is a
    division by a number. Otherwise None.
    """


class TorchRandom(HostRandom):
    """The random states of torch, Python and NumPy."""

    def __init__(self, devices: set[torch.device]) -> None:
        super().__init__()
        self._torch = RandomState(devices)

    def restore(self, seed: int = 0) -> None:
        self._torch.put_back()
        super().restore(seed)
        if seed:
            torch.manual_seed(seed)


class TorchState(ModelState):
    """A copy of a model's parameters, buffers and module attributes, with which the
    model can be restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {
            name: (tensor, tensor.detach().clone())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self._dictionaries = [
            (path, dictionary, dict(dictionary))
            for path, module in model.named_modules()
            for dictionary in (vars(module), module._buffers)
        ]
        """Two entries for each module, one for its attributes and one for its buffers.
        An entry contains the module's path, the dictionary, and a copy of the
        dictionary.
        """

    def restore(self) -> None:
        for _, dictionary, before in self._dictionaries:
            dictionary.clear()
            dictionary.update(before)
        for tensor, value in self._tensors.values():
            # Write through .data, because such a write does not change the parameters'
            # versions, which other code may watch. A buffer's size may have changed,
            # because torch's quantization observers resize empty buffers in the first
            # forward pass.
            if tensor.numel() == value.numel():
                tensor.data.copy_(value)
            else:
                tensor.data = value.clone()

    def changed_names(self) -> tuple[str, ...]:
        """Return the names of all buffers, parameters and plain attributes that have
        changed.
        """
        names = [
            name
            for name, (tensor, value) in self._tensors.items()
            if not torch.equal(tensor, value)
        ]
        names += [
            f"{path}.{name}".lstrip(".")
            for path, dictionary, before in self._dictionaries
            for name, value in dictionary.items()
            if value is not before.get(name) and isinstance(value, int | float | Tensor)
            if name != "training"
        ]
        return tuple(dict.fromkeys(names))


def wide(gradient: Tensor) -> Tensor:
    """Return `gradient` as a dense float64 vector, in which a complex number becomes
    two real numbers.
    """
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.detach().cpu().double().flatten()
