"""The public call, and modules whose activations are recomputed: the instance's
``forward`` is replaced, the module is not wrapped.

The replacement refers to the module as an attribute, so that a copy or a pickle refers
to the copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, segment_cuts
from gradaccum_torch.recomputation.function import Recomputed, run

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)


@overload
def recompute(
    function: M,
    *,
    segments: int | None = None,
    submodules: Iterable[str | nn.Module] | None = None,
    preserve_rng_state: bool = True,
) -> M: ...
@overload
def recompute(function: F, *, preserve_rng_state: bool = True) -> F: ...
def recompute(
    function: Any,
    *,
    segments: int | None = None,
    submodules: Iterable[str | nn.Module] | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Return `function`, or the module itself, such that the backward pass recomputes
    its activations.

    Gradients have the same bits as without. The second run draws the same random
    numbers, and finds the buffers, the autocast and the ``train()`` or ``eval()`` mode
    of the first. BatchNorm's statistics move once. Hooks of submodules inside run
    twice. Under `torch.compile` the compiler recomputes, and random numbers are its
    own; only ``backend="eager"`` draws new ones.

    A module stays the same object, with the same ``state_dict()``: only its ``forward``
    is replaced.

    Args:
        function: a function of tensors, or nests of them, or a module. Of an
            `nn.Sequential` segments are recomputed, of another module all.
        segments: equal parts to cut an `nn.Sequential` into, about the square root of
            its length by default. The memory is that of all segments' inputs and the
            activations of one.
        submodules: names of ``named_modules()``, or modules, such as ``model.layers``.
        preserve_rng_state: False, which is faster, is right only where no random
            numbers are drawn.

    Raises:
        ArgumentTypeError: `function` cannot be called, or an argument is of the wrong
            type.
        ArgumentValueError: more segments than layers, a submodule that is none of the
            module's, or `segments` beside `submodules` or a function.
        UsageError: it is recomputed already, or cannot be replaced. The second run
            raises it, too, for parameters that changed since.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(9)]
        >>> model = recompute(torch.nn.Sequential(*layers))  # In three segments.
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> len(model.state_dict())
        18
    """
    is_module = isinstance(function, nn.Module)
    if (segments is not None) + (submodules is not None) > is_module:
        expected, fix = (
            "one of the two beside a module, none beside a function",
            "Leave one of them out, or give a module.",
        )
        raise explain(
            ArgumentValueError,
            "segments, submodules",
            expected=expected,
            found="more",
            fix=fix,
        )
    if is_module and submodules is not None:
        for part in _parts_of(function, submodules):
            part.__dict__["forward"] = _Whole(part, preserve_rng_state)
        return function
    _require_replaceable(function, "function")
    if not is_module:
        return Recomputed(function, preserve_rng_state)
    chain = (
        isinstance(function, nn.Sequential)
        and type(function).forward is nn.Sequential.forward
    )
    if segments is not None and not chain:
        wanted, found = (
            "an nn.Sequential, whose layers run one after the other",
            f"segments={segments} for {type(function).__name__}",
        )
        fix = "Name the parts: recompute(model, submodules=model.layers)."
        raise explain(
            ArgumentTypeError, "segments", expected=wanted, found=found, fix=fix
        )
    # Cut now, so that a wrong number is refused here.
    cuts = len(segment_cuts(len(function), segments)) if chain else 0
    function.__dict__["forward"] = (
        _Segments(function, cuts, preserve_rng_state)
        if chain
        else _Whole(function, preserve_rng_state)
    )
    return function


class _Whole:
    """The replacement of ``module.forward`` that recomputes all of an instance's own
    ``forward``.
    """

    def __init__(self, module: nn.Module, preserve_rng_state: bool) -> None:
        self._module, self._preserve_rng_state = module, preserve_rng_state
        self._own = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(
            self._forward(), (self._module,), args, kwargs, self._preserve_rng_state
        )

    def _forward(self) -> Callable[..., Any]:
        return self._own or functools.partial(type(self._module).forward, self._module)


class _Segments(_Whole):
    """The replacement of ``forward`` of an `nn.Sequential`, in segments."""

    def __init__(
        self, module: nn.Sequential, segments: int, preserve_rng_state: bool
    ) -> None:
        super().__init__(module, preserve_rng_state)
        self._segments = segments

    def __call__(self, input: Any) -> Any:
        assert isinstance(self._module, nn.Sequential)
        layers = list(self._module)
        for cut in segment_cuts(len(layers), min(self._segments, len(layers))):
            part = layers[cut.start : cut.stop]
            input = run(
                functools.partial(_chain, part),
                part,
                (input,),
                {},
                self._preserve_rng_state,
            )
        return input


def _chain(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


_NOT_CALLED = (
    nn.parallel.DistributedDataParallel,
    torch.jit.ScriptModule,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
)
"""Modules whose ``forward`` is not theirs to call, or cannot be replaced."""


def _require_replaceable(part: object, argument: str) -> None:
    if isinstance(part, Recomputed) or (
        isinstance(part, nn.Module) and isinstance(part.__dict__.get("forward"), _Whole)
    ):
        fix = (
            "Call recompute() once. Parts inside of each other may both be recomputed."
        )
        found = f"a {type(part).__name__} that is recomputed"
        raise explain(
            UsageError,
            argument,
            expected="a part that is not recomputed yet",
            found=found,
            fix=fix,
        )
    if isinstance(part, _NOT_CALLED) or not callable(part):
        expected = "a function, or a torch.nn.Module whose forward can be replaced"
        fix = (
            "Give what is called inside of it: the model of a DistributedDataParallel,"
            " submodules=list(container)."
        )
        raise explain(
            ArgumentTypeError,
            argument,
            expected=expected,
            found=f"a {type(part).__name__}",
            fix=fix,
        )


def _parts_of(
    module: nn.Module, submodules: Iterable[str | nn.Module]
) -> list[nn.Module]:
    named = dict(module.named_modules(remove_duplicate=False))
    parts: list[nn.Module] = []
    for index, wanted in enumerate(
        [submodules] if isinstance(submodules, str) else submodules
    ):
        part = named.get(wanted) if isinstance(wanted, str) else wanted
        if part is None or not any(part is each for each in named.values()):
            expected = (
                "a submodule of the module, or one of the names"
                f" {', '.join(repr(name) for name in named if name)}"
            )
            raise explain(
                ArgumentValueError,
                f"submodules[{index}]",
                expected=expected,
                got=wanted,
                fix="Check the name.",
            )
        _require_replaceable(part, f"submodules[{index}]")
        parts += [] if any(part is each for each in parts) else [part]
    if not parts:
        fix = 'Write submodules=model.layers, or submodules=["layers.0"].'
        raise explain(
            ArgumentValueError,
            "submodules",
            expected="at least one submodule",
            found="none",
            fix=fix,
        )
    return parts
