"""Checks of the module, the parameters and the options that several workers pass to
`gradaccum.wrap`, and the errors for windows that several workers share.

If a check of a worker's own arguments fails, the error is raised only on that worker.
The other workers wait for that worker until the process group's timeout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumWarning,
    UsageError,
    kit,
)
from gradaccum_torch.arithmetic import sum_dtype
from gradaccum_torch.torch_private import names
from gradaccum_torch.torch_private.fsdp import Unit

FIX = (
    "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)),"
    " or module=fully_shard(model)."
)
UNEQUAL_PARAMETERS = (
    "gradaccum: the workers in process_group= have different parameters. The parameters"
    " will stay different, because every worker applies the same updates. Before the"
    " first step, send one worker's parameters to all workers with"
    " torch.distributed.broadcast, or load the same checkpoint on all workers."
)
CLOSE = 1e-3
"""A parameter counts as equal on two workers if the relative difference between the
sums of its elements is at most this number. The sums may be rounded differently.
"""


def parallel_module(module: torch.nn.Module) -> DistributedDataParallel:
    """Return `module` if it is a `DistributedDataParallel`. Otherwise return the
    `DistributedDataParallel` inside `module`, because Lightning Fabric wraps it in
    another module.
    """
    for inner_module in module.modules():
        if isinstance(inner_module, DistributedDataParallel):
            return inner_module
    raise ArgumentTypeError(
        "module: expected a DistributedDataParallel or fully_shard module; got an"
        f" object of type {type(module).__name__}. {FIX}"
    )


# A wrapper suppresses the gradient reduction of its module. Another optimizer for the
# same module must be wrapped too, because its gradients are not reduced otherwise.

REDUCING_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The inner optimizers that were wrapped with ``module=``."""
CHECKED_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that have already passed the check in `require_reduced`."""
STEP_HOOKS: list[RemovableHandle] = []
"""A list with at most one entry: the handle of the hook that calls `require_reduced`
before each step of any optimizer. The list is empty until a wrapper suppresses the
gradient reduction of a module for the first time.
"""


def require_reduced(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise if `optimizer` is about to update a parameter whose gradient is not reduced
    over the workers. This function is called before each step of any optimizer.

    A wrapper suppresses the gradient reduction of its module, and reduces only the
    gradients of its own optimizer. The gradients of the module's other parameters are
    reduced only if these parameters belong to another optimizer that was wrapped with
    ``module=``.
    """
    if optimizer in CHECKED_OPTIMIZERS:
        return
    waiting = map(names.reduced_parameters, names.waiting_modules())
    unreduced = ids_of(optimizer) & set(map(id, chain(*waiting)))
    unreduced.difference_update(*map(ids_of, REDUCING_OPTIMIZERS))
    if unreduced:
        kind = type(optimizer).__name__
        raise UsageError(
            "module: expected every optimizer that updates parameters of the"
            f" DistributedDataParallel model to be wrapped with module=; got a {kind}"
            f" that was not wrapped with module=, but updates {len(unreduced)} of these"
            " parameters. Pass the DistributedDataParallel model:"
            f" gradaccum.wrap({kind}(...), steps=..., module=parallel)."
        )
    CHECKED_OPTIMIZERS.add(optimizer)


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for parameter in names.parameters_of(optimizer)}


names.untraced(require_reduced)


def refuse_bare_steps(optimizer: torch.optim.Optimizer) -> None:
    """From now on, call `require_reduced` before each step of any optimizer, so that a
    step with unreduced gradients raises an error. The wrapper of `optimizer` has
    suppressed the gradient reduction of its module, but another optimizer that was not
    wrapped with ``module=`` may update parameters of the same module.
    """
    REDUCING_OPTIMIZERS.add(optimizer)
    CHECKED_OPTIMIZERS.clear()
    if not STEP_HOOKS:
        STEP_HOOKS.append(register_optimizer_step_pre_hook(require_reduced))


def require_parameters(
    module: torch.nn.Module,
    module_parameters: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> None:
    missing = set(map(id, parameters)).difference(map(id, module_parameters))
    if missing:
        raise ArgumentValueError(
            "module: expected the module that contains the optimizer's parameters; got"
            f" a {type(module).__name__} that lacks or ignores {len(missing)} of these"
            f" parameters. {FIX} Pass the parameters that the module ignores to a"
            " separate optimizer, and wrap that optimizer with"
            ' process_group="alone".'
        )


def refuse_fully_shard(argument: str, units: Sequence[Unit]) -> None:
    """Raise if FSDP2 shards parameters. `torch.autograd.grad` does not reach sharded
    parameters, so the gradients of single micro-batches cannot be measured.
    """
    if units:
        raise UsageError(
            f"{argument}: expected parameters that fully_shard does not manage, because"
            " the gradient of each micro-batch has to be measured; got parameters that"
            " fully_shard manages. Check a small copy of the model without fully_shard,"
            " in one process or with DistributedDataParallel."
        )


def require_all_sharded(parameters: Iterable[Tensor], units: Sequence[Unit]) -> None:
    """Raise if several workers share the model, but FSDP2 does not manage all trainable
    `parameters`.
    """
    sharded_ids = {id(parameter) for unit in units for parameter in unit.parameters}
    unreduced = [
        parameter
        for parameter in parameters
        if parameter.requires_grad and id(parameter) not in sharded_ids
    ]
    if unreduced and any(unit.workers > 1 for unit in units):
        raise ArgumentValueError(
            "optimizer: expected only parameters that fully_shard manages; got"
            f" {len(unreduced)} trainable parameters that fully_shard does not manage,"
            " so their gradients would not be reduced. Call fully_shard(model) on the"
            " whole model too, freeze these parameters, or pass them to a separate"
            " optimizer."
        )


def require_meshes_within(parameters: Iterable[Tensor], workers: Iterable[int]) -> None:
    """Raise if a parameter is sharded over ranks outside `workers`. This is an error
    because the gradient norm is reduced only over `workers`, and would not include the
    shards on other ranks.
    """
    ranks = set(workers)
    for parameter in filter(names.is_sharded, parameters):
        parameter_ranks = names.mesh_of(parameter).mesh.flatten().tolist()
        if not ranks.issuperset(parameter_ranks):
            raise ArgumentValueError(
                "optimizer: expected parameters sharded only over ranks"
                f" {sorted(ranks)}, because the gradient norm is computed over these"
                f" ranks; got a parameter sharded over ranks {parameter_ranks}. Shard"
                f" the parameter over some or all of ranks {sorted(ranks)}, or pass it"
                " to a separate optimizer."
            )


def describe_options(
    options: kit.Options, gradient_sync: str = "micro_batch"
) -> list[str]:
    """Return a line of text that describes the options, so that the options of
    different workers can be compared.
    """
    settings = options._asdict()
    # Functions and scalers cannot be compared, because each worker has its own objects.
    if not kit.is_known(options.steps):
        settings["steps"] = "a function"
    settings["scaler"] = type(options.scaler)
    return [f"the options {settings} {gradient_sync}"]


def describe_parameters(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None
) -> list[str]:
    """Return a line of text for each parameter, with the parameter's name (if known),
    shape and dtype. With these lines, the parameters of different workers can be
    compared.
    """
    module_names: dict[int, str] = {}
    if module is not None:
        for name, parameter in module.named_parameters():
            module_names[id(parameter)] = name
    lines: list[str] = []
    for group in optimizer.param_groups:
        given_names = group.get("param_names", [""] * len(group["params"]))
        for parameter, given_name in zip(group["params"], given_names, strict=True):
            name = module_names.get(id(parameter), given_name)
            lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    return lines


def require_same_lines(lines: Sequence[str], *groups: dist.ProcessGroup) -> None:
    """Raise an error on every worker if two workers of `groups` pass different `lines`.
    The lines describe the worker's options and parameters. This is a collective call.
    """
    everyone = [(dist.get_rank(), lines)]
    for group in groups:
        gathered: list[list[tuple[int, Sequence[str]]]]
        gathered = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sorted(chain(*gathered))
    _, first_lines = everyone[0]
    for rank, lines in everyone:
        for first, line in zip_longest(first_lines, lines, fillvalue="nothing"):
            if line != first:
                raise ArgumentValueError(
                    f"options, optimizer: expected {first} on every worker; got {line}"
                    f" on rank {rank}. Call gradaccum.wrap in the same way on every"
                    " worker, with the parameters in the same order. Build the"
                    " parameter groups from lists, because the order of a set differs"
                    " between processes."
                )


def warn_of_unequal_parameters(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Warn if the sums of the parameters' elements show that the parameters have
    different values on different workers. This is a collective call.
    """
    totals = [
        float(parameter.detach().double().sum())
        for parameter in names.parameters_of(optimizer)
        if not names.is_sharded(parameter) and not parameter.is_complex()
    ]
    everyone: list[list[float]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyone, totals, group=group)
    for other_totals in everyone:
        for total, other_total in zip(totals, other_totals, strict=True):
            if abs(total - other_total) > CLOSE * max(abs(total), CLOSE):
                warnings.warn(UNEQUAL_PARAMETERS, GradAccumWarning, stacklevel=6)
                return


def require_reduced_units(units: Sequence[Unit]) -> None:
    if any(unit.has_unreduced() for unit in units):
        raise UsageError(
            "set_requires_gradient_sync: expected FSDP2 to have reduced the gradients"
            " by the end of the window; got gradients that were not reduced. Call"
            " opt.discard() on every worker, remove the call to"
            " set_requires_gradient_sync, and use gradaccum.wrap(optimizer, ...,"
            ' module=fsdp_model, gradient_sync="window").'
        )


def require_deferrable(units: Sequence[Unit], options: kit.Options) -> None:
    """Raise unless FSDP2 can reduce the gradients once per window instead of once per
    micro-batch.
    """
    found = ""
    if options.separate_sums or options.on_overflow == "drop_micro_batch":
        found = 'separate_sums=True or on_overflow="drop_micro_batch"'
    for unit in units:
        for parameter in unit.parameters:
            dtype = sum_dtype(parameter, options.accumulate_dtype)
            dtypes = {parameter.dtype, unit.sum_dtype, dtype}
            if parameter.requires_grad and len(dtypes) > 1:
                found = f"{', '.join(sorted(map(str, dtypes)))}"
    if found:
        raise ArgumentValueError(
            'gradient_sync="window": expected the parameters, FSDP2\'s reduction and'
            " accumulate_dtype to have the same dtype, and expected no option that"
            f" inspects individual micro-batches; got {found}. For bfloat16, keep the"
            " parameters in float32 and use"
            " MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
            ' reduce_dtype=torch.float32). Or write gradient_sync="micro_batch", so'
            " that FSDP2 reduces the gradients of each micro-batch."
        )
