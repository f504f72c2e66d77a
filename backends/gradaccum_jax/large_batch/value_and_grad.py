"""`jax.value_and_grad` of a large batch with the memory of a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Scalar, explain, make_options
from gradaccum_jax.arrays import DType, Tree
from gradaccum_jax.checks import require_dtype
from gradaccum_jax.large_batch import gradients
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import Batch, Source, Splitting, Weight, is_cut, make_splitting
from gradaccum_jax.large_batch.gradients import ROWS, Differentiation, Gathering, Question, axes_in, check_declared, copies, run
from gradaccum_jax.sharding import shard_map
from gradaccum_jax.workers.data_parallel import placed, require_unsharded
from gradaccum_jax.workers.group import require_axes, require_names, require_same_params


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    micro_batch_weight: float | None = None,
    reduction: str = "mean",
    weight: Weight = None,
    axes: Tree = 0,
    split: Callable[..., Iterable[Any]] | None = None,
    aux: Tree = None,
    accumulate_dtype: DType = None,
    allow_int: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    mesh: Mesh | None = None,
) -> Callable[..., Any]:
    """Return a function that computes loss and gradient of a large batch micro-batch by micro-batch, in place of `jax.value_and_grad`.

        step = gradaccum_jax.value_and_grad(loss_fn, steps=8)
        loss, grads = step(params, x, y)

    All micro-batches of one size are one `jax.lax.scan`, with the activations of one micro-batch and one sum of gradients. A smaller last
    micro-batch is compiled beside it. Called outside of `jax.jit`, the whole is jitted: keep the returned function, and pass what
    changes from call to call as an argument, since what `loss_fn` reads from elsewhere is a constant of the compiled program.

    Args:
        loss_fn: ``loss_fn(params, *micro_batch)`` returns a floating scalar, or ``(loss, aux)`` with `has_aux`.
        argnums: the argument to differentiate by, or a tuple of several. They are passed whole to every micro-batch. All other arguments
            are the batch, in their order.
        has_aux: as in `jax.value_and_grad`; then `aux` says how it merges.
        steps: at most so many micro-batches, of ceil(items / steps) items; the last one may be smaller.
        micro_batch_size: items of a micro-batch; the last one may be smaller. "auto" or a `gradaccum.AutoMicroBatchSize`: the largest that
            fits.
        micro_batch_weight: consecutive items are packed up to this weight, by per-item weights: those of an array, or of a `weight`
            function that is called on each item. Each new pattern of cuts is compiled.
        reduction: "mean": `loss_fn` takes a mean over weights; "sum": a sum; "item_mean": a sum, to be divided by the batch's weight.
        weight: the weight of a micro-batch: a function of its arguments, such as its number of tokens, or an array of one number per item.
            None: its number of items. A traced weight that is negative or not finite makes loss and gradient NaN. A batch whose weights are
            all 0 has loss 0 and gradient 0; a micro-batch of weight 0 adds nothing, even where its gradient is NaN.
            The weight is a constant to JAX: a function that closes over the parameters adds nothing to the gradient.
        axes: a prefix of the tuple of the batch's arguments: an axis of items for all leaves below, None for what is passed whole, or
            "key" for a random key, of which micro-batch number i gets ``jax.random.fold_in(key, i)``. A scalar typed key is "key" unless it
            is None. Plain Python values are passed whole whatever their axis; under a `jax.jit` of your own they are arrays,
            and need the None. A list of arrays of one kind that may be as long as the batch needs ``[0, 0]``, an axis for each element; a
            list of single items is stacked into arrays, or cut by `split`.
        split: the user's own function in place of axes and cuts: ``split(*batch)`` returns the micro-batches, each a tuple of arguments or
            the only one; ``split(*batch, steps=steps)`` where `steps` is given. `axes` then says where their items and keys are.
        aux: a prefix of the aux, how each leaf merges: "sum", "mean", "weighted_mean", "max", "min" or "concatenate" (in the order of the
            items). See `gradaccum.nests.KINDS`.
        accumulate_dtype: dtype of the sum; by default float32 for half precision, else the gradient's own. The gradient has the dtype of
            its parameter, cast once.
        allow_int: as in `jax.value_and_grad`: integers have a float0 as their gradient.
        axis_name: inside `jax.shard_map`: the mesh axes whose devices share the batch, each with its own items. Loss, gradient and aux are
            those of all devices' items, reduced once; concatenated rows are the device's own.
        mesh: with `axis_name`, outside of `jax.shard_map`: the call runs each device's part there, and reduces once. `steps` and
            `micro_batch_size` are those of one device's part: micro-batch number i holds the i-th items of every device. Concatenated rows
            come back in the order of the items all the same. Parameters are replicated along `axis_name`. Sharded ones are refused where
            JAX tells: under a `jax.jit` of your own with an ``Auto`` mesh it does not, and XLA gathers them. Without a mesh sharded
            parameters have sharded gradients, and a batch that is sharded gives the same numbers, but XLA gathers it, or reduces in every
            micro-batch.

    Returns:
        A function of the same arguments that returns ``(loss, gradients)``, or ``((loss, aux), gradients)``. The loss is that of the large
        batch, shape (), in the dtype that `loss_fn` returns.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option makes no sense; or, at a call, the batch cannot be divided so, or `loss_fn` returns
            something else than was declared. The batch and the parameters are never changed.
        UsageError: with a mesh, parameters are sharded along `axis_name`.
    """
    differentiation = Differentiation(loss_fn, as_places(argnums), has_aux, allow_int, isinstance(argnums, int))
    splitting = make_splitting(steps, micro_batch_size, micro_batch_weight, axes, weight, split)
    options = make_options(None, reduction=reduction, accumulate_dtype=require_dtype(accumulate_dtype))
    names = require_names(axis_name)
    question = Question(differentiation, weight, as_declared(aux, has_aux=has_aux), options, names)
    found = require_mesh(mesh, names, splitting)
    return ValueAndGrad(question, dataclasses.replace(splitting, devices=devices_of(found, names)), found)


@dataclass(frozen=True, eq=False)
class ValueAndGrad(Call):
    """The function that `value_and_grad` returns."""

    question: Question
    splitting: Splitting
    mesh: Mesh | None = None
    """Whose devices each cut their part; None inside `jax.shard_map`, or on one device."""

    def __call__(self, *arguments: Tree) -> Any:
        """Compute the loss and the gradient; see `value_and_grad`."""
        by, batch = self.question.differentiation.parted(arguments)
        if self.mesh is None:
            require_axes(self.question.axis_names)
            require_same_params(by, self.question.axis_names)
        for place, tree in zip(self.question.differentiation.places, by, strict=True) if self.mesh is not None else ():
            require_unsharded(tree, f"argument {place}", self.question.axis_names)
        return self._of_batch(by, batch)

    def _run(self, by: tuple[Tree, ...], source: Source) -> Any:
        names, differentiation = self.question.axis_names, self.question.differentiation
        whole = self._local if self.mesh is None else over_mesh(self._local, self.mesh, names, self.question.aux)
        (loss, aux), found = whole(by, source)
        return (loss, aux) if differentiation.has_aux else loss, found[0] if differentiation.single else found

    def _local(self, by: tuple[Tree, ...], source: Source) -> tuple[tuple[Scalar, Tree], tuple[Tree, ...]]:
        options, names = self.question.options, self.question.axis_names

        def add(held: Any, given: Any, weight: Any, loss: Any) -> Any:
            return gradients.add(held, given, weight, options)

        axes = axes_in(by, source, names)
        start = copies(gradients.start(by, options.accumulate_dtype), axes)
        gathering = Gathering(start, add, relative=not names, axes=axes)
        made = run(self.question, by, source, gathering)
        return (made.loss, made.aux), gradients.finish(made.held, made.weight, by, options, names)


def as_places(argnums: Any) -> tuple[int, ...]:
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums) if isinstance(argnums, tuple | list) else None
    fix = "Write argnums=0, or argnums=(0, 1)."
    if places is None or not all(isinstance(place, int) and not isinstance(place, bool) for place in places):
        raise explain(ArgumentTypeError, "argnums", expected="an int or a tuple of ints", got=argnums, fix=fix)
    if not places or len(set(places)) < len(places) or min(places) < 0:
        raise explain(ArgumentValueError, "argnums", expected="different places, counted from 0", got=argnums, fix=fix)
    return places


def as_declared(aux: Tree, *, has_aux: bool) -> Tree:
    """Check how aux merges, as far as possible without one; "sum" without a declaration."""
    if has_aux and aux is None:
        fix = "Write aux='mean', or a kind for each leaf: aux={'correct': 'sum', 'logits': 'concatenate'}."
        raise explain(ArgumentValueError, "aux", expected="how aux merges, as has_aux=True", got=aux, fix=fix)
    if aux is not None and not has_aux:
        fix = "Write has_aux=True beside it."
        raise explain(ArgumentValueError, "has_aux", expected="True, as aux says how it merges", got=has_aux, fix=fix)
    check_declared(aux)
    return "sum" if aux is None else aux


# A batch that is spread over a mesh: every device cuts its own part, and the devices reduce once per call.
#
# Under `jax.jit` alone XLA would gather a batch that is sharded along the axis that is cut, or reduce in every micro-batch. So the call
# runs inside `jax.shard_map`, where each device sees its own items only: micro-batch number i of the call is the i-th of each device.


_FIX = "Write mesh = jax.make_mesh((4,), ('data',)) and axis_name='data'."


def require_mesh(mesh: object, axis_names: tuple[str, ...], splitting: Splitting) -> Mesh | None:
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise explain(ArgumentTypeError, "mesh", expected="a jax.sharding.Mesh", got=mesh, fix=_FIX)
    if not axis_names or not set(axis_names) <= set(mesh.axis_names):
        expected = f"axes of the mesh, which are {mesh.axis_names}"
        raise explain(ArgumentValueError, "axis_name", expected=expected, got=axis_names or None, fix=_FIX)
    if splitting.split is not None or splitting.division.micro_batch_weight is not None:
        fix = "Write steps or micro_batch_size; or call it inside jax.shard_map with axis_name alone, and split there."
        expected = "micro-batches of equal size on every device"
        raise explain(ArgumentTypeError, "mesh", expected=expected, found="a mesh beside split or micro_batch_weight", fix=fix)
    return mesh


def devices_of(mesh: Mesh | None, axis_names: tuple[str, ...]) -> int:
    """Return how many devices cut the batch; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in axis_names)


def over_mesh(local: Callable[..., Any], mesh: Mesh, axis_names: tuple[str, ...], aux: Tree) -> Callable[..., Any]:
    spec: Any = PartitionSpec
    over, whole = spec(axis_names), spec()
    rows = jax.tree.map(lambda kind: over if kind == ROWS else whole, aux)

    def run(by: tuple[Tree, ...], batch: Batch) -> Any:
        leaves = [spec(*[None] * int(axis or 0), axis_names) if is_cut(axis) else whole for axis in batch.axes]
        weights = None if batch.item_weights is None else over
        specs = (whole, dataclasses.replace(batch, leaves=leaves, item_weights=weights))
        given, structure = jax.tree.flatten((by, batch))
        per_leaf = [whole] * len(jax.tree.leaves(by)) + leaves + ([] if weights is None else [weights])
        given = jax.tree.unflatten(structure, placed(given, mesh, per_leaf, axis_names))
        return shard_map(local, mesh=mesh, in_specs=specs, out_specs=((whole, rows), whole), axis_names=set(axis_names))(*given)

    return run
