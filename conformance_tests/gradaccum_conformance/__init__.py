"""The conformance suite: it proves that N micro-batches give the large batch's
gradient, in every backend.

Run it with ``python -m gradaccum_conformance --backend NAME``. A backend takes part by
registering a `Harness`.
"""

from gradaccum_conformance.couplings import COUPLINGS, TEMPERATURE, Coupling, mirrored
from gradaccum_conformance.harness import (
    Captured,
    Dtype,
    Fault,
    GradientTree,
    Harness,
    LargeBatchCall,
    LargeBatchHarness,
    Loss,
    Option,
    Outcome,
    Returns,
    Session,
    Setup,
    Snapshot,
    VerifyCall,
    VerifyingHarness,
    View,
    WorkersHarness,
    WrapOptions,
)
from gradaccum_conformance.specs import (
    ATTENTION,
    LENET,
    LINEAR,
    MLP,
    MODELS,
    Array,
    Arrays,
    Attention,
    AvgPool,
    Batch,
    Conv,
    Dense,
    Flatten,
    Layer,
    MeanOverLength,
    Model,
    Optimizer,
    Tanh,
    make_batch,
    make_weights,
)

__all__ = [
    "ATTENTION",
    "COUPLINGS",
    "LENET",
    "LINEAR",
    "MLP",
    "MODELS",
    "TEMPERATURE",
    "Array",
    "Arrays",
    "Attention",
    "AvgPool",
    "Batch",
]
__all__ += [
    "Captured",
    "Conv",
    "Coupling",
    "Dense",
    "Dtype",
    "Fault",
    "Flatten",
    "GradientTree",
    "Harness",
    "LargeBatchCall",
]
__all__ += [
    "LargeBatchHarness",
    "Layer",
    "Loss",
    "MeanOverLength",
    "Model",
    "Optimizer",
    "Option",
    "Outcome",
    "Returns",
    "Session",
]
__all__ += [
    "Setup",
    "Snapshot",
    "Tanh",
    "VerifyCall",
    "VerifyingHarness",
    "View",
]
__all__ += [
    "WorkersHarness",
    "WrapOptions",
    "make_batch",
    "make_weights",
    "mirrored",
]
