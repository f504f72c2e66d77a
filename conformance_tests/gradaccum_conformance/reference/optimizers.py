"""Inner optimizers in NumPy. Each changes its parameters in place and keeps its state
in a dict of arrays.

The state is made at the first update. So it fits the float32 masters that a wrapper may
put in the parameters' place before.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from gradaccum_conformance.specs import Arrays, Optimizer


class NumpyOptimizer(Protocol):
    """An optimizer for the reference: parameters, a state, and one update."""

    parameters: Arrays
    state: Arrays

    def step(self, gradient: Arrays) -> None:
        """Update the parameters in place."""
        ...


class Sgd:
    """``p -= learning_rate * v`` with ``v = momentum * v + g``."""

    def __init__(
        self, parameters: Arrays, learning_rate: float, momentum: float = 0.0
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.state: Arrays = {}

    def step(self, gradient: Arrays) -> None:
        for name, p in self.parameters.items():
            g = gradient[name]
            if self.momentum:
                v = self.state.setdefault(f"{name}.velocity", np.zeros_like(p))
                v[...] = self.momentum * v + g
                g = v
            p -= (p.dtype.type(self.learning_rate) * g).astype(p.dtype)


class Capture(Sgd):
    """Plain SGD that also stores its number of calls and its last gradient."""

    def __init__(self, parameters: Arrays, learning_rate: float) -> None:
        super().__init__(parameters, learning_rate)
        self.state = {"calls": np.zeros((), np.int32)}

    def step(self, gradient: Arrays) -> None:
        self.state["calls"] += 1
        self.state |= {f"{name}.gradient": g.copy() for name, g in gradient.items()}
        super().step(gradient)


class Adam:
    """Adam (Kingma & Ba, 2015), with decoupled weight decay if given (Loshchilov &
    Hutter, 2019).
    """

    def __init__(
        self, parameters: Arrays, learning_rate: float, weight_decay: float = 0.0
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.state: Arrays = {"step": np.zeros((), np.int32)}

    def step(self, gradient: Arrays) -> None:
        self.state["step"] += 1
        t = int(self.state["step"])
        for name, p in self.parameters.items():
            g, m, v = (
                gradient[name],
                *(
                    self.state.setdefault(f"{name}.{moment}", np.zeros_like(p))
                    for moment in ("mean", "square")
                ),
            )
            m[...] = 0.9 * m + 0.1 * g
            v[...] = 0.999 * v + 0.001 * g * g
            p *= 1 - self.learning_rate * self.weight_decay
            p -= (
                self.learning_rate
                * (m / (1 - 0.9**t))
                / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            ).astype(p.dtype)


def make_optimizer(spec: Optimizer, parameters: Arrays) -> NumpyOptimizer:
    """The optimizer a spec describes, over these parameters."""
    rate = spec.learning_rate
    match spec.kind:
        case "capture":
            return Capture(parameters, rate)
        case "sgd":
            return Sgd(parameters, rate)
        case "momentum":
            return Sgd(parameters, rate, momentum=0.9)
        case "adam":
            return Adam(parameters, rate)
        case "adamw":
            return Adam(parameters, rate, weight_decay=0.01)
