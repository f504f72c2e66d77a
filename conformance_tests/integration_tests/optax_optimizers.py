"""Every optimizer of `optax` and `optax.contrib`, found by introspection, and how each
is made.

A public function is an optimizer's factory if its annotation says that it returns a
transformation. Some factories have no annotation, so a function without one must be
listed here, as a factory or as none. A factory whose required arguments nobody listed
is an error with its name: a new release of optax cannot add an optimizer that no test
runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

Factory = Callable[..., Any]

RATE = 0.05
"""The learning rate of each optimizer that asks for one."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "adafactor": {"learning_rate": RATE, "min_dim_size_to_factor": 2},
    "adaptive_grad_clip": {"clipping": 0.01},
    "add_decayed_weights": {"weight_decay": 0.1},
    "add_noise": {"eta": 0.01, "gamma": 0.5, "key": 7},
    "clip": {"max_delta": 0.1},
    "clip_by_block_rms": {"threshold": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "ema": {"decay": 0.9},
    "fromage": {"learning_rate": RATE},
    "hutchinson_estimator_diag_hessian": {},
    "lbfgs": {"memory_size": 2, "learning_rate": RATE, "linesearch": None},
    "noisy_sgd": {"learning_rate": RATE, "key": 7},
    "normalize": {},
    "scale": {"step_size": -RATE},
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 3},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 2},
    "scale_by_lbfgs": {"memory_size": 2},
    "scale_by_schedule": {"step_size_fn": lambda count: -RATE / (1 + count)},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 3},
    "schedule_free_adamw": {"learning_rate": RATE, "warmup_steps": 2},
    "schedule_free_sgd": {"learning_rate": RATE, "warmup_steps": 2},
    "snapshot": {"measure_name": "norm", "measure": optax.tree.norm},
    "stateless": {
        "f": lambda updates, params: jax.tree.map(
            lambda u, p: -RATE * u + 0.01 * p, updates, params
        )
    },
    "stateless_with_tree_map": {"f": lambda u, p: -RATE * u + 0.01 * p},
    "trace": {"decay": 0.9},
}
"""Arguments other than a lone learning rate, some of them so that tiny parameters take
the path of large ones.
"""

COMBINATORS: dict[str, Callable[[Factory], Any]] = {
    "apply_if_finite": lambda f: f(optax.adam(RATE), max_consecutive_errors=2),
    "chain": lambda f: f(optax.clip(0.1), optax.adam(RATE)),
    "conditionally_mask": lambda f: f(optax.adam(RATE), lambda step: step % 2 == 0),
    "conditionally_transform": lambda f: f(
        optax.adam(RATE), lambda step: step % 2 == 0
    ),
    "flatten": lambda f: f(optax.adam(RATE)),
    "freeze": lambda f: f({"w": True, "b": False}),
    "inject_hyperparams": lambda f: f(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 4)
    ),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 4)
    ),
    "masked": lambda f: f(optax.adam(RATE), {"w": True, "b": False}),
    "mechanize": lambda f: f(optax.adam(RATE)),
    "multi_transform": lambda f: f(
        {"x": optax.adam(RATE), "y": optax.sgd(RATE)}, {"w": "x", "b": "y"}
    ),
    "named_chain": lambda f: f(("clip", optax.clip(0.1)), ("adam", optax.adam(RATE))),
    "partition": lambda f: f(
        {"x": optax.adam(RATE), "y": optax.set_to_zero()}, {"w": "x", "b": "y"}
    ),
    "sam": lambda f: f(
        optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "scale_by_muon": lambda f: optax.masked(
        f(
            weight_dimension_numbers={
                "w": optax.contrib.MuonDimensionNumbers(),
                "b": optax.MaskedNode(),
            }
        ),
        {"w": True, "b": False},
    ),
    "schedule_free": lambda f: f(optax.sgd(RATE), learning_rate=RATE),
    "selective_transform": lambda f: f(
        optax.adam(RATE), freeze_mask={"w": True, "b": False}
    ),
    "split_real_and_imaginary": lambda f: f(optax.adam(RATE)),
    "with_extra_args_support": lambda f: f(optax.adam(RATE)),
}
"""Factories that take other transformations, or functions of the gradient."""

REFUSED = {
    "apply_every": lambda f: f(2),
    "differentially_private_aggregate": lambda f: f(1.0, 0.1, 7),
    "dpsgd": lambda f: f(RATE, 1.0, 0.1, 7),
    "lookahead": lambda f: f(optax.sgd(RATE), sync_period=2, slow_step_size=0.5),
    "monitor": lambda f: f({"norm": optax.tree.norm}),
}
"""Those that a wrapped optimizer cannot hold; they go around it, or stay bare."""

OF_THE_BATCH = {
    **dict.fromkeys(
        ("momo", "momo_adam", "polyak_sgd", "reduce_on_plateau", "scale_by_polyak"),
        ("value",),
    ),
    **dict.fromkeys(
        ("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"),
        ("value", "grad", "value_fn"),
    ),
    **dict.fromkeys(("hutchinson_estimator_diag_hessian", "sophia"), ("obj_fn",)),
}
"""The extra arguments that describe the batch of the gradient, which these read. The
caller gives those of the whole window to `flush`; of these, ``value`` is the window's
in a streaming loop too.
"""

NO_FACTORIES = (
    "MaskOrFn",
    "OptState",
    "Params",
    "Schedule",
    "ScalarOrSchedule",
    "Updates",
    "bias_correction",
    "matrix_inverse_pth_root",
    "measure_with_ema",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
)
"""Public callables without an annotation that make no transformation, and
`measure_with_ema`, whose updates are scalars for `monitor`.
"""


def factories() -> dict[str, Factory]:
    """Every public factory of `optax` and `optax.contrib`, by name."""
    return {**_factories_of(optax), **_factories_of(optax.contrib)}


def _factories_of(module: ModuleType) -> dict[str, Factory]:
    public = {
        name: getattr(module, name)
        for name in dir(module)
        if not name.startswith("_") and name not in NO_FACTORIES
    }
    return {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value) and _makes_transformations(value)
    }


def _makes_transformations(function: Factory) -> bool:
    made = inspect.signature(function).return_annotation
    return made is inspect.Signature.empty or "GradientTransformation" in str(made)


def make(name: str, factory: Factory) -> Any:
    """The optimizer that `factory` makes of the arguments listed here.

    Raises:
        AssertionError: it requires arguments that nobody listed.
    """
    for table in (COMBINATORS, REFUSED):
        if name in table:
            return table[name](factory)
    if name in ARGUMENTS:
        return factory(**ARGUMENTS[name])
    parameters = inspect.signature(factory).parameters.values()
    required = {
        one.name
        for one in parameters
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    assert required <= {"learning_rate"}, (
        f"optax's {name} requires {sorted(required)}: list its arguments in"
        " optax_optimizers.py"
    )
    return factory(**dict.fromkeys(required, RATE))


def params() -> Any:
    """Two small leaves, in JAX's widest float: shapes (3, 2) and (2,)."""
    return {
        "w": jnp.asarray([[0.5, -0.25], [1.0, 0.75], [-0.5, 0.25]], float),
        "b": jnp.asarray([0.1, -0.2], float),
    }
