"""Functions whose activations are recomputed, and the modules' state in their second
run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from gradaccum import UsageError
from gradaccum.kit import explain, leaves_of, with_leaves
from gradaccum_torch.large_batch.replay import reached_by
from gradaccum_torch.private.names import buffers_of, is_sharded, parameters_of, version


class Recomputed:
    """A recomputed `function`. A copy or a pickle holds a copy of it, so that a bound
    method stays its object's.
    """

    def __init__(self, function: Callable[..., Any], preserve_rng_state: bool) -> None:
        self._function, self._preserve_rng_state = function, preserve_rng_state
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._function

    @functools.cached_property
    def _modules(self) -> list[nn.Module]:
        """The modules that the function reaches at its first call."""
        return reached_by(self._function).modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modules = () if torch.compiler.is_compiling() else self._modules
        return run(self._function, modules, args, kwargs, self._preserve_rng_state)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_modules"}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


# One call under `torch.utils.checkpoint`, in its non-reentrant form: a first segment
# whose input needs no gradient trains too.
#
# `torch.utils.checkpoint` itself replays random numbers and autocast. `Surroundings`
# adds what it leaves to its user: buffers and modes of modules. All tensors among the
# arguments go through autograd, in keyword arguments and nests too, because autograd
# notices a change of those that it has saved.


MOVES_TWICE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""The compiler moves the buffers of a recomputed part in both runs. Measured: torch 2.8
does, torch 2.11 does not.
"""


def run(
    function: Callable[..., Any],
    modules: Iterable[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
) -> Any:
    """Call ``function(*args, **kwargs)``, keeping none of its activations.

    Raises:
        UsageError: `function` changed an argument in place.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        if MOVES_TWICE:
            # Dynamo leaves this call out of its graph, and under fullgraph=True refuses
            # it. It cannot trace how a UsageError is made.
            raise RuntimeError(
                "before torch 2.11 the compiler moves the buffers of a recomputed part"
                " twice: leave fullgraph=True out"
            )
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    leaves = [leaf.value for leaf in leaves_of((args, kwargs))]
    surroundings = Surroundings(
        [*modules, *(leaf for leaf in leaves if isinstance(leaf, nn.Module))]
    )
    before = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]

    def of_leaves(*leaves: Any) -> Any:
        again: Any = with_leaves((args, kwargs), iter(leaves))
        return function(*again[0], **again[1])

    out = checkpoint(
        of_leaves,
        *leaves,
        use_reentrant=False,
        context_fn=surroundings.contexts,
        preserve_rng_state=preserve_rng_state,
    )
    for leaf, noted in zip(leaves, before, strict=True):
        if isinstance(leaf, Tensor) and version(leaf) != noted:
            raise _changed_argument_error(leaf)
    return out


class _Anew:
    """A context made anew each time it is entered: a retained graph has several
    backward passes.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


# The surroundings of a forward pass: the state of modules, so that its replay finds the
# same and leaves nothing behind.
#
# A replay would move BatchNorm's statistics a second time, and read buffers and modes
# that other calls have changed since. So each module is noted before its first call:
# its mode, and copies of its buffers. A replay puts them into the module, and
# afterwards takes them out again. Nothing is written into a tensor, as autograd would
# take that for a change of what it has saved.
#
# torch does not count what BatchNorm writes into its statistics. So a buffer of up to
# `SMALL` elements is copied in any case, and compared with its copy only if it is
# larger: to compare waits for the device.


Table = dict[str, Tensor | None]
"""A module's parameters or buffers, by name."""

SMALL = 2**16
"""Elements of the largest buffer whose copy is kept without a look at whether it
changed; BatchNorm's have one for each channel.
"""


class _Noted(NamedTuple):
    module: nn.Module
    training: bool
    parameters: Table
    buffers: Table


class _Held(NamedTuple):
    tensor: Tensor
    version: int
    copy: Tensor | None


class Surroundings:
    """The modules of one call.

    `watches`: a replay raises if a parameter was changed since, which the caller cannot
    rule out by itself.
    """

    def __init__(self, modules: Iterable[nn.Module], *, watches: bool = True) -> None:
        self._watches = watches
        self._noted: dict[int, _Noted] = {}
        self._held: dict[int, _Held] = {}
        """By the tensor's id, so that a buffer of two modules stays one."""
        for module in modules:
            for each in module.modules():
                self._note(each)

    def contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._noting(), _Anew(self._replaying)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note each further module before its first call; drop copies of what did not
        change.
        """
        thread = threading.get_ident()

        def note(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                self._note(module)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        for key, (tensor, noted, copy) in self._held.items():
            if (
                copy is not None
                and copy.numel() > SMALL
                and version(tensor) == noted
                and torch.equal(tensor, copy)
            ):
                self._held[key] = _Held(tensor, noted, None)

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Restore the modules for the second run, and their present state afterwards.

        Raises:
            UsageError: a parameter, or a large buffer, was changed since the forward
                pass.
        """
        noted = self._noted.values()
        if self._watches:
            self._require_unchanged()
        copies = {
            key: held.copy.detach().clone()
            for key, held in self._held.items()
            if held.copy is not None
        }
        now = [(each.module.training, dict(buffers_of(each.module))) for each in noted]
        try:
            for module, training, _, buffers in noted:
                _restore(
                    module,
                    training,
                    {
                        name: copies.get(id(buffer), buffer)
                        for name, buffer in buffers.items()
                    },
                )
            yield
        finally:
            for each, state in zip(noted, now, strict=True):
                _restore(each.module, *state)

    def _note(self, module: nn.Module) -> None:
        if id(module) in self._noted:
            return
        noted = self._noted[id(module)] = _Noted(
            module,
            module.training,
            dict(parameters_of(module)),
            dict(buffers_of(module)),
        )
        for parameter in noted.parameters.values():
            if parameter is not None and not is_sharded(parameter):
                self._held.setdefault(
                    id(parameter), _Held(parameter, version(parameter), None)
                )
        for buffer in noted.buffers.values():
            if buffer is not None and id(buffer) not in self._held:
                with torch.no_grad():
                    self._held[id(buffer)] = _Held(
                        buffer, version(buffer), buffer.detach().clone()
                    )

    def _require_unchanged(self) -> None:
        for module, _, parameters, buffers in self._noted.values():
            for name, tensor in (*parameters.items(), *buffers.items()):
                held, now = (
                    None if tensor is None else self._held.get(id(tensor)),
                    parameters_of(module).get(name, tensor),
                )
                # FSDP exchanges its parameters itself, also while a replay runs.
                exchanged = now is not tensor and not any(
                    each is not None and is_sharded(each) for each in (now, tensor)
                )
                if exchanged or (
                    held is not None
                    and held.copy is None
                    and version(held.tensor) != held.version
                ):
                    raise _changed_tensor_error(module, name)


def _restore(module: nn.Module, training: bool, buffers: Table) -> None:
    module.training = training
    table = buffers_of(module)
    table.clear()
    table.update(buffers)


def _changed_argument_error(argument: Tensor) -> UsageError:
    found = f"one that wrote into an argument of shape {tuple(argument.shape)} in place"
    fix = (
        "Begin the part one layer earlier or later, or give its first layer"
        " inplace=False."
    )
    return explain(
        UsageError,
        "recompute",
        expected="a part that leaves its arguments as they are",
        found=found,
        fix=fix,
    )


def _changed_tensor_error(module: nn.Module, name: str) -> UsageError:
    found = (
        f"{name!r} of {type(module).__name__}, which was written into or replaced"
        " between forward and backward"
    )
    fix = (
        "Call backward() before optimizer.step(), and before anything else that changes"
        " the model."
    )
    return explain(
        UsageError,
        "recompute",
        expected="parameters and buffers as they were in the forward pass",
        found=found,
        fix=fix,
    )
