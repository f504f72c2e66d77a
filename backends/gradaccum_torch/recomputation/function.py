"""Functions whose activations are recomputed, and the modules' state in their second run."""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain, leaves_of, with_leaves
from gradaccum_torch.private import (
    MODES,
    TABLES,
    buffers_of,
    is_sharded,
    parameters_of,
    require_name,
    version,
    without_dispatch_modes,
    writes,
)


class Recomputed:
    """A recomputed `function`. A copy or a pickle holds a copy of it, so that a bound method stays that of its own object's copy."""

    def __init__(self, function: Callable[..., Any], rules: Rules) -> None:
        self._function, self._rules = function, rules
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self._function, modules_in((self._function, args, kwargs)), args, kwargs, self._rules)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


# One call under `torch.utils.checkpoint`, in its non-reentrant form: a first segment whose input needs no gradient trains too.
#
# `torch.utils.checkpoint` itself replays random numbers and autocast. `Surroundings` adds what it leaves to its user: buffers, parameters
# and modes of modules. All tensors among the arguments go through autograd, in keyword arguments and nests too, because autograd notices a
# change of those that it has saved.


MOVES_TWICE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""The compiler moves the buffers of a recomputed part in both runs. Measured: torch 2.8 does, torch 2.11 does not."""


class Rules(NamedTuple):
    """The options of `gradaccum_torch.recompute`."""

    policy: Policy | None
    preserve_rng_state: bool


def run(function: Callable[..., Any], modules: Iterable[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> Any:
    """Call ``function(*args, **kwargs)``, keeping of its activations only what `rules` say.

    Raises:
        UsageError: `function` changed an argument in place, so that the second run would find another one.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        if MOVES_TWICE and any(len(list(module.buffers())) for module in modules):
            # Dynamo leaves this call out of its graph, and under fullgraph=True refuses it. It cannot trace how a UsageError is made.
            raise RuntimeError("before torch 2.11 the compiler moves the buffers of a recomputed part twice: leave fullgraph=True out")
        return _compiled(function, args, kwargs, rules)
    leaves = [leaf.value for leaf in leaves_of((args, kwargs))]
    surroundings = Surroundings(modules, rules.policy is not None)
    before = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]

    def of_leaves(*leaves: Any) -> Any:
        again: Any = with_leaves((args, kwargs), iter(leaves))
        return function(*again[0], **again[1])

    contexts = functools.partial(_contexts, surroundings, rules.policy)
    out = checkpoint(of_leaves, *leaves, use_reentrant=False, context_fn=contexts, preserve_rng_state=rules.preserve_rng_state)
    _require_unchanged(leaves, before)
    return out


def modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, functools.partial):
        yield from modules_in((value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from modules_in((value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        yield from (cell for cell in _cells(value) if isinstance(cell, nn.Module))
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from modules_in(each)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
        yield getattr(held, "__self__", held) if isinstance(held, MethodType) else held


def _compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> Any:
    """Let the compiler recompute, after it has made the changes of buffers a part of the graph."""
    own: dict[str, Any] = {} if rules.policy is None else {"context_fn": functools.partial(selective_contexts, rules.policy)}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=rules.preserve_rng_state, **own, **kwargs)


def _contexts(surroundings: Surroundings, policy: Policy | None) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    first, again = (None, None) if policy is None else selective_contexts(policy)
    return _Anew(lambda: _both(surroundings.noted(), first)), _Anew(lambda: _both(surroundings.replayed(), again))


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object] | None) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        if inner is not None:
            stack.enter_context(inner)
        yield


class _Anew:
    """A context made anew each time it is entered: a retained graph has several backward passes."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _require_unchanged(leaves: Sequence[Any], before: Sequence[int]) -> None:
    for leaf, noted in zip(leaves, before, strict=True):
        if isinstance(leaf, Tensor) and version(leaf) != noted:
            raise changed_argument_error(leaf)


# The policy: results that a recomputed part keeps all the same, and random numbers beside them.
#
# torch runs an operation again, or hands out what it kept of it. What is kept draws nothing the second time, so that each later draw would
# have another's numbers, silently. So after the first draw that is kept, all further draws are kept as well. An operation that draws in
# place cannot be kept, and is refused there.


Policy = Sequence[Any] | Callable[..., CheckpointPolicy | bool]
"""A list of operations to keep, or a function ``(context, operation, *args, **kwargs)`` that says what to do with each."""

_KEPT = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def selective_contexts(policy: Policy) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return torch's contexts in which `policy` holds: of the forward pass, and of its replay."""
    if torch.compiler.is_compiling():
        first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return first, again
    aligned = _Aligned(policy)
    first, again = create_selective_checkpoint_contexts(aligned)  # type: ignore[no-untyped-call]
    return first, _Replay(aligned, again)


class _Aligned:
    """A `policy` for one forward pass, whose replay draws each random number at the place of the first pass."""

    def __init__(self, policy: Policy) -> None:
        self._decide = policy if callable(policy) else functools.partial(_listed, frozenset(policy))
        self._states: dict[torch.device, Tensor] = {_CPU: torch.get_rng_state()}
        self._keeping = False
        self._decisions: defaultdict[Any, list[CheckpointPolicy | bool]] = defaultdict(list)
        self.replayed: Counter[Any] = Counter()
        """How often the replay under way has run each operation."""

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        decisions = self._decisions[operation]
        if context.is_recompute:  # Old versions of torch ask again, and hand out only what is kept by the same answers.
            self.replayed[operation] += 1
            return decisions[self.replayed[operation] - 1]
        decisions.append(self._decision(context, operation, *args, **kwargs))
        return decisions[-1]

    def _decision(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        decision = self._decide(context, operation, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in operation.tags or not self._drew(context):
            return decision
        self._keeping = self._keeping or decision in _KEPT
        if not self._keeping:
            return decision
        if writes(operation):
            raise drawing_in_place_error(operation)
        return CheckpointPolicy.MUST_SAVE

    def _drew(self, context: Any) -> bool:
        """True if a generator has moved since the last operation that may draw; attention without dropout, say, draws nothing.

        Before torch 2.8 the policy is asked before the operation has run. There every operation that may draw counts as drawing.
        """
        if not hasattr(context, "op_output"):
            return True
        out = context.op_output
        first = out[0] if isinstance(out, tuple) else out
        device = first.device if isinstance(first, Tensor) else _CPU
        with without_dispatch_modes():
            before, after = self._states.get(device), _rng_state(device)
            self._states[device] = after
            return before is None or not torch.equal(before, after)


class _Replay:
    """The context `again` of torch, in which `aligned` repeats its decisions from the first on."""

    def __init__(self, aligned: _Aligned, again: AbstractContextManager[object]) -> None:
        self._aligned, self._again = aligned, again

    def __enter__(self) -> None:
        self._aligned.replayed.clear()
        self._again.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._again.__exit__(*error)


_CPU = torch.device("cpu")


def _rng_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _listed(kept: frozenset[Any], context: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


# The surroundings of a forward pass: the state of modules, so that its replay finds the same and leaves nothing behind.
#
# A replay would move BatchNorm's statistics a second time, and read buffers, parameters and modes that other calls have changed since. So
# each module is noted before its first call: its mode, its parameters, and copies of its buffers. A replay puts them into the module, and
# afterwards takes them out again. Nothing is written into a tensor, as autograd would take that for a change of what it has saved.
#
# torch does not count what BatchNorm writes into its statistics. So a buffer of up to `SMALL` elements is copied in any case, and compared
# with its copy only if it is larger: to compare waits for the device.


Table = dict[str, Tensor | None]
"""A module's parameters or buffers, by name."""

SMALL = 2**16
"""Elements of the largest buffer whose copy is kept without a look at whether it changed; BatchNorm's have one for each channel."""


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
    """The modules of one call."""

    def __init__(self, modules: Iterable[nn.Module], in_modes: bool) -> None:
        self._outside = without_dispatch_modes if in_modes else nullcontext
        self._noted: dict[int, _Noted] = {}
        self._held: dict[int, _Held] = {}
        """By the tensor's id, so that a buffer of two modules stays one."""
        for module in modules:
            for each in module.modules():
                self._note(each)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note each further module before its first call in the forward pass; drop copies of what did not change."""
        thread = threading.get_ident()

        def note(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                self._note(module)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        self._drop_unchanged()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the modules of the forward pass for its second run, and their present state afterwards.

        Raises:
            UsageError: a parameter, or a large buffer, was changed in place since the forward pass.
        """
        self._require_unchanged()
        copies = {key: held.copy.detach().clone() for key, held in self._held.items() if held.copy is not None}
        now = [(each.module.training, dict(buffers_of(each.module))) for each in self._noted.values()]
        lent: list[tuple[Table, Table]] = []
        try:
            for module, training, parameters, buffers in self._noted.values():
                module.training = training
                lent.append((parameters_of(module), _exchanged(parameters_of(module), parameters)))
                _put(buffers_of(module), {name: copies.get(id(buffer), buffer) for name, buffer in buffers.items()})
            yield
        finally:
            for table, taken in lent:
                table.update(taken)
            for each, (training, buffers) in zip(self._noted.values(), now, strict=True):
                each.module.training = training
                _put(buffers_of(each.module), buffers)

    def _note(self, module: nn.Module) -> None:
        if id(module) in self._noted:
            return
        parameters, buffers = dict(parameters_of(module)), dict(buffers_of(module))
        if any(map(is_lazy, (*parameters.values(), *buffers.values()))):
            raise lazy_module_error(module)
        self._noted[id(module)] = _Noted(module, module.training, parameters, buffers)
        for parameter in parameters.values():
            if parameter is not None and not is_sharded(parameter):
                self._held.setdefault(id(parameter), _Held(parameter, version(parameter), None))
        for buffer in buffers.values():
            if buffer is not None and id(buffer) not in self._held:
                with self._outside(), torch.no_grad():
                    self._held[id(buffer)] = _Held(buffer, version(buffer), buffer.detach().clone())

    def _drop_unchanged(self) -> None:
        for key, (tensor, noted, copy) in self._held.items():
            if copy is not None and copy.numel() > SMALL and version(tensor) == noted and torch.equal(tensor, copy):
                self._held[key] = _Held(tensor, noted, None)

    def _require_unchanged(self) -> None:
        for module, _, parameters, buffers in self._noted.values():
            for name, tensor in (*parameters.items(), *buffers.items()):
                held = None if tensor is None else self._held.get(id(tensor))
                if held is not None and held.copy is None and version(held.tensor) != held.version:
                    raise changed_tensor_error(module, name)


def _put(table: Table, tensors: Table) -> None:
    table.clear()
    table.update(tensors)


def _exchanged(table: Table, noted: Table) -> Table:
    """Put in the noted parameters; return those whose place they take.

    FSDP exchanges its parameters itself, also while a replay runs: they are left to it.
    """
    taken = {name: table[name] for name, tensor in noted.items() if name in table and table[name] is not tensor}
    taken = {name: now for name, now in taken.items() if not any(each is not None and is_sharded(each) for each in (now, noted[name]))}
    table.update({name: noted[name] for name in taken})
    return taken


# Refusals of `recompute`.


_OPERATION = type(torch.ops.aten.add.Tensor)
"""An operation of ``torch.ops`` with its overload."""


def require_options(policy: object, preserve_rng_state: object) -> None:
    """Raise unless `policy` is a list of operations or a function, the flag a bool, and torch has the names that they need."""
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
    if not callable(function):
        fix = "Write recompute(function) and call what it returns, or recompute(model)."
        raise explain(ArgumentTypeError, "function", expected="a function or a torch.nn.Module", got=function, fix=fix)


def require_no_parts(segments: object, submodules: object) -> None:
    for name, value in (("segments", segments), ("submodules", submodules)):
        if value is not None:
            fix = f"Leave {name}= out, or give the module in place of the function."
            raise explain(ArgumentTypeError, name, expected="none beside a function, which has no parts", got=value, fix=fix)


def require_chain(segments: object, module: nn.Module) -> None:
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise explain(
            ArgumentTypeError,
            "segments",
            expected="an nn.Sequential, whose layers are known to run one after the other",
            found=f"segments={segments} for {type(module).__name__}",
            fix="Name the parts: recompute(model, submodules=model.layers).",
        )


def require_replaceable(module: nn.Module, argument: str) -> None:
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
    fix = "Call recompute() once. Parts inside of each other may both be recomputed."
    return explain(UsageError, argument, expected="a part that is not recomputed yet", found=found, fix=fix)


def changed_argument_error(argument: Tensor) -> UsageError:
    return explain(
        UsageError,
        "recompute",
        expected="a part that leaves its arguments as they are",
        found=f"one that wrote into an argument of shape {tuple(argument.shape)} in place",
        fix="Begin the part one layer earlier or later, or give its first layer inplace=False.",
    )


def changed_tensor_error(module: nn.Module, name: str) -> UsageError:
    return explain(
        UsageError,
        "recompute",
        expected="parameters and buffers as they were in the forward pass",
        found=f"{name!r} of {type(module).__name__}, which was written into between forward and backward",
        fix="Call backward() before optimizer.step(), and before anything else that changes the model.",
    )


def lazy_module_error(module: nn.Module) -> UsageError:
    found = f"{type(module).__name__}, which makes its parameters in its first call"
    fix = "Call the model once under torch.no_grad() before it trains."
    return explain(UsageError, "recompute", expected="modules that have their parameters", found=found, fix=fix)


def drawing_in_place_error(operation: Any) -> UsageError:
    return explain(
        UsageError,
        "policy",
        expected="one that keeps no random numbers, or all of them",
        found=f"{operation}, which draws in place and cannot be kept, beside a draw that is kept",
        fix="Do not keep operations that draw random numbers, such as attention with dropout.",
    )
