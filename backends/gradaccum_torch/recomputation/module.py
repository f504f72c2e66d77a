"""Modules whose activations are recomputed: `forward` of the instance is replaced, the module is not wrapped.

So the parameters, the submodules and the keys of ``state_dict()`` stay as they are, and hooks of the module itself run once, outside of
what is recomputed. What replaces ``forward`` refers to the module as an attribute, and so a copy or a pickle refers to the copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain, segment_cuts
from gradaccum_torch.recomputation.checks import recomputed_twice_error, require_chain, require_replaceable
from gradaccum_torch.recomputation.run import Rules, run

M = TypeVar("M", bound=nn.Module)


def recompute_module(module: M, segments: int | None, submodules: Iterable[str | nn.Module] | None, rules: Rules) -> M:
    """`module`, recomputed in segments, in submodules or as a whole. If anything is refused, nothing is replaced."""
    if submodules is not None:
        if segments is not None:
            fix = "Leave one of them out."
            raise explain(ArgumentValueError, "segments, submodules", expected="one of the two", found="both", fix=fix)
        for each in _parts_of(module, submodules):
            _replace(each, _Whole(each, rules))
        return module
    _require_ordinary(module, "function")
    if segments is None and type(module).forward is not nn.Sequential.forward:
        _replace(module, _Whole(module, rules))
        return module
    require_chain(segments, module)
    number = len(segment_cuts(len(_layers(module)), segments))
    _replace(module, _Segments(module, number, rules))
    return module


class _Whole:
    """Stands in for ``module.forward`` and recomputes all of it; an own ``forward`` of the instance is what it calls."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        self._module, self._rules = module, rules
        self._own = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self._forward(), (self._module,), args, kwargs, self._rules)

    def _forward(self) -> Callable[..., Any]:
        return self._own or functools.partial(type(self._module).forward, self._module)


class _Segments(_Whole):
    """Stands in for ``forward`` of an `nn.Sequential`, as long as it is when it is called."""

    def __init__(self, module: nn.Module, segments: int, rules: Rules) -> None:
        super().__init__(module, rules)
        self._segments = segments

    def __call__(self, input: Any) -> Any:
        layers = _layers(self._module)
        for cut in segment_cuts(len(layers), min(self._segments, len(layers))):
            part = layers[cut.start : cut.stop]
            input = run(functools.partial(_chain, part), part, (input,), {}, self._rules)
        return input


def _require_ordinary(module: nn.Module, argument: str) -> None:
    """It has a ``forward`` of its own, and no stand-in for it."""
    if isinstance(module.__dict__.get("forward"), _Whole):
        raise recomputed_twice_error(argument, f"a {type(module).__name__} that is recomputed")
    require_replaceable(module, argument)


def _replace(module: nn.Module, forward: _Whole) -> None:
    module.__dict__["forward"] = forward


def _layers(module: nn.Module) -> list[nn.Module]:
    assert isinstance(module, nn.Sequential)
    return list(module)


def _chain(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _parts_of(module: nn.Module, submodules: Iterable[str | nn.Module]) -> list[nn.Module]:
    """The submodules that are named or given, each of which can be recomputed."""
    if isinstance(submodules, str) or not isinstance(submodules, Iterable):
        expected, fix = "a list of names or modules", "Write submodules=[...]."
        raise explain(ArgumentTypeError, "submodules", expected=expected, got=submodules, fix=fix)
    named = dict(module.named_modules(remove_duplicate=False))
    own = {id(each): each for each in named.values()}
    parts: dict[int, nn.Module] = {}
    for index, wanted in enumerate(submodules):
        argument = f"submodules[{index}]"
        part = _part(wanted, named, own, argument)
        _require_ordinary(part, argument)
        if id(part) in parts:
            fix = "Give each submodule once."
            raise explain(ArgumentValueError, argument, expected="another submodule than before", found="the same one again", fix=fix)
        parts[id(part)] = part
    if not parts:
        fix = 'Write submodules=model.layers, or submodules=["layers.0"].'
        raise explain(ArgumentValueError, "submodules", expected="at least one submodule", found="none", fix=fix)
    return list(parts.values())


def _part(wanted: object, named: dict[str, nn.Module], own: dict[int, nn.Module], argument: str) -> nn.Module:
    if isinstance(wanted, str):
        if wanted not in named:
            fix = f"Its submodules are {', '.join(repr(name) for name in named if name)}."
            raise explain(ArgumentValueError, argument, expected="the name of a submodule", got=wanted, fix=fix)
        return named[wanted]
    if not isinstance(wanted, nn.Module):
        fix = "Write the name of the submodule, or the submodule itself."
        raise explain(ArgumentTypeError, argument, expected="a name or a torch.nn.Module", got=wanted, fix=fix)
    if id(wanted) not in own:
        found = f"a {type(wanted).__name__} that is no part of the {type(named['']).__name__}"
        fix = "Give the module that it is a part of."
        raise explain(ArgumentValueError, argument, expected="a submodule of the module", found=found, fix=fix)
    return wanted
