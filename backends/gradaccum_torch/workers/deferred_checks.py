"""Checks whether FSDP2 can keep a window's gradients, as ``gradient_sync=`` asks for, without a change of what they add up to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum import ArgumentValueError
from gradaccum.kit import Options, explain
from gradaccum_torch.fsdp_private import Unit
from gradaccum_torch.sums import sum_dtype
from gradaccum_torch.workers.deferred import GradientSync


def require_deferrable(units: Sequence[Unit], parameters: Sequence[Tensor], options: Options, sync: GradientSync, module: object) -> None:
    """FSDP2 can reduce the sum of micro-batches in place of each.

    Raises:
        ArgumentValueError: ``module=`` is missing, FSDP2 would add in another dtype, has parameters of another optimizer beside these, or
            has no dimension to all-reduce over; or micro-batches may have to be dropped.
    """
    if module is None or not units:
        raise _error(sync, "to stand beside a module= of fully_shard", "none", "Write module=fsdp_model, or leave gradient_sync= out.")
    if options.on_overflow == "drop_micro_batch":
        found = 'on_overflow="drop_micro_batch", which looks at each reduced gradient'
        raise _error(sync, "no look at a single micro-batch", found, 'Leave one of them out: gradient_sync="micro_batch" reduces each.')
    if options.separate_sums:
        fix = 'Leave one of them out: gradient_sync="micro_batch" leaves .grad to you.'
        raise _error(sync, "to keep the sum", "separate_sums=True, which takes each micro-batch out of .grad", fix)
    if sync == "all_reduce_per_window" and not any(unit.copies > 1 for unit in units):
        found = "a mesh without a dimension of copies, on which nothing is all-reduced"
        raise _error(sync, "a mesh of two dimensions (HSDP)", found, 'Write gradient_sync="micro_batch", which reduce-scatters each.')
    if sync == "all_reduce_per_window" and not all(unit.fills_unused for unit in units):
        fix = 'Write gradient_sync="window", or install a newer torch.'
        raise _error(sync, "a torch that has FSDPModule.set_reduce_scatter_unused_params", f"torch {torch.__version__}", fix)
    for unit in units:
        unit.require_waiting()
        _require_dtype(unit, options, sync)
        _require_whole_unit(unit, parameters, sync)


def _require_dtype(unit: Unit, options: Options, sync: GradientSync) -> None:
    for parameter in (each for each in unit.parameters if each.requires_grad):
        wanted = sum_dtype(parameter, options.accumulate_dtype)
        if not unit.sum_dtype == wanted == parameter.dtype:
            found = (
                f"a parameter in {parameter.dtype} whose gradients FSDP2 adds up in {unit.sum_dtype}, and that are to be added in {wanted}"
            )
            policy = f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype={wanted})"
            fix = f'Keep the parameters in {wanted} and give fully_shard {policy}, or write gradient_sync="micro_batch".'
            raise _error(sync, "one dtype for parameters, FSDP2's sums and accumulate_dtype", found, fix)


def _require_whole_unit(unit: Unit, parameters: Sequence[Tensor], sync: GradientSync) -> None:
    own = set(map(id, parameters))
    others = sum(id(each) not in own for each in unit.parameters if each.requires_grad)
    if others:
        found = f"{others} parameters of another optimizer, which FSDP2 reduces together with these"
        fix = 'Call fully_shard on the part of each optimizer, or write gradient_sync="micro_batch".'
        raise _error(sync, "a part of the model with one optimizer", found, fix)


def _error(sync: GradientSync, expected: str, found: str, fix: str) -> ArgumentValueError:
    return explain(ArgumentValueError, f'gradient_sync="{sync}"', expected=expected, found=found, fix=fix)
