"""What is refused of `recompute`, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.torch_private import MODES, TABLES, require_name

_OPERATION = type(torch.ops.aten.add.Tensor)
"""An operation of ``torch.ops`` with its overload."""


def require_options(policy: object, preserve_rng_state: object) -> None:
    """Raises ArgumentTypeError: `policy` is neither a list of operations nor a function, or the flag is no bool.

    UsageError: in the installed torch no replay can put parameters and buffers into a module, or no policy can be kept from seeing the
    library's own operations.
    """
    for name in TABLES:
        require_name(name, "recompute", "Write torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False).")
    if not isinstance(preserve_rng_state, bool):
        fix = "Write preserve_rng_state=True, or leave it out."
        raise explain(ArgumentTypeError, "preserve_rng_state", expected="a bool", got=preserve_rng_state, fix=fix)
    listed = isinstance(policy, (list, tuple, set, frozenset)) and all(isinstance(each, _OPERATION) for each in policy)
    if policy is not None and not callable(policy) and not listed:
        expected = "a list of operations of torch.ops with their overload, or a function of (context, operation, *args, **kwargs)"
        raise explain(ArgumentTypeError, "policy", expected=expected, got=policy, fix="Write policy=[torch.ops.aten.mm.default].")
    if policy is not None:
        require_name(MODES, "policy", "Leave policy= out.")


def require_callable(function: object) -> None:
    """Raises ArgumentTypeError: `function` cannot be called."""
    if not callable(function):
        fix = "Write recompute(function) and call what it returns, or recompute(model)."
        raise explain(ArgumentTypeError, "function", expected="a function or a torch.nn.Module", got=function, fix=fix)


def require_no_parts(segments: object, submodules: object) -> None:
    """Raises ArgumentTypeError: an option of modules was given beside a function."""
    for name, value in (("segments", segments), ("submodules", submodules)):
        if value is not None:
            fix = f"Leave {name}= out, or give the module in place of the function."
            raise explain(ArgumentTypeError, name, expected="none beside a function, which has no parts", got=value, fix=fix)


def require_chain(segments: object, module: nn.Module) -> None:
    """Raises ArgumentTypeError: `segments` of a module whose layers are not known to run one after the other."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise explain(
            ArgumentTypeError,
            "segments",
            expected="an nn.Sequential, whose layers are known to run one after the other",
            found=f"segments={segments} for {type(module).__name__}",
            fix="Name the parts: recompute(model, submodules=model.layers).",
        )


def require_replaceable(module: nn.Module, argument: str) -> None:
    """Raises ArgumentTypeError: `module` has no ``forward`` to replace; UsageError: it is a parallel wrapper."""
    kind = type(module).__name__
    if isinstance(module, nn.parallel.DistributedDataParallel):
        fix = "Write DistributedDataParallel(recompute(model, ...))."
        raise explain(UsageError, argument, expected="the model inside of the parallel wrapper", found=kind, fix=fix)
    if isinstance(module, torch.jit.ScriptModule):
        fix = "Recompute the module that torch.jit.script was given, or a function that calls the script."
        raise explain(ArgumentTypeError, argument, expected="a module whose forward can be replaced", found=kind, fix=fix)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        expected = "a module that is called"
        raise explain(ArgumentTypeError, argument, expected=expected, found=f"{kind}, a container", fix="Write submodules=list(container).")


def recomputed_twice_error(argument: str, found: str) -> UsageError:
    """The error for recomputing what is recomputed: it would run three times, and save nothing more."""
    fix = "Call recompute() once. Parts inside of each other may both be recomputed."
    return explain(UsageError, argument, expected="a part that is not recomputed yet", found=found, fix=fix)


def changed_argument_error(argument: Tensor) -> UsageError:
    """The error for a part that writes into what it is given, which its second run would find changed."""
    return explain(
        UsageError,
        "recompute",
        expected="a part that leaves its arguments as they are",
        found=f"one that wrote into an argument of shape {tuple(argument.shape)} in place",
        fix="Begin the part one layer earlier or later, or give its first layer inplace=False.",
    )


def changed_tensor_error(module: nn.Module, name: str) -> UsageError:
    """The error for a second run that would compute with another parameter or buffer than the first."""
    return explain(
        UsageError,
        "recompute",
        expected="parameters and buffers as they were in the forward pass",
        found=f"{name!r} of {type(module).__name__}, which was written into between forward and backward",
        fix="Call backward() before optimizer.step(), and before anything else that changes the model.",
    )


def lazy_module_error(module: nn.Module) -> UsageError:
    """The error for a module that makes its parameters in its first call, which is run twice."""
    found = f"{type(module).__name__}, which makes its parameters in its first call"
    fix = "Call the model once under torch.no_grad() before it trains."
    return explain(UsageError, "recompute", expected="modules that have their parameters", found=found, fix=fix)


def drawing_in_place_error(operation: Any) -> UsageError:
    """The error for an operation that draws random numbers in place, after another draw was kept."""
    return explain(
        UsageError,
        "policy",
        expected="one that keeps no random numbers, or all of them",
        found=f"{operation}, which draws in place and cannot be kept, beside a draw that is kept",
        fix="Do not keep operations that draw random numbers, such as attention with dropout.",
    )
