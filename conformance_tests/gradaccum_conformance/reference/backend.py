"""The reference as a backend: ``gradaccum.wrap(Sgd(...), steps=4)``."""

from __future__ import annotations

from typing import cast

import ml_dtypes
import numpy as np

from gradaccum.kit import (
    Options,
    UntilWeight,
    accumulate_dtype_error,
    optimizer_error,
    shared_until_weight_error,
    wrapped_twice_error,
)
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.reference.optimizers import NumpyOptimizer
from gradaccum_conformance.reference.workers import Workers


class NumpyBackend:
    """Wraps the optimizers of `gradaccum_conformance.reference.optimizers`."""

    name = "numpy"

    def wrap(
        self, optimizer: object, options: Options, *, workers: Workers | None = None
    ) -> ReferenceAccumulation:
        if isinstance(optimizer, ReferenceAccumulation):
            raise wrapped_twice_error(optimizer)
        if not hasattr(optimizer, "step"):
            fix = "For example, write gradaccum.wrap(Sgd(parameters, 0.1), steps=4)."
            raise optimizer_error(
                "an optimizer of gradaccum_conformance.reference", optimizer, fix
            )
        if workers is not None and isinstance(options.steps, UntilWeight):
            raise shared_until_weight_error(options.steps)
        return ReferenceAccumulation(
            cast(NumpyOptimizer, optimizer), with_numpy_dtype(options), workers
        )


def with_numpy_dtype(options: Options) -> Options:
    """The options with `accumulate_dtype` as a NumPy dtype, checked."""
    if options.accumulate_dtype is None:
        return options
    try:
        dtype = np.dtype(
            ml_dtypes.bfloat16
            if options.accumulate_dtype == "bfloat16"
            else options.accumulate_dtype
        )
        ml_dtypes.finfo(dtype)
    except (TypeError, ValueError) as error:
        raise accumulate_dtype_error(options.accumulate_dtype) from error
    return options._replace(accumulate_dtype=dtype)


backend = NumpyBackend()
