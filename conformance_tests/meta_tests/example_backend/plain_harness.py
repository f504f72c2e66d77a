"""The example's harness: NumPy models with this framework's optimizers."""

import plain_large_batch
from plain import Optimizer

from gradaccum_conformance.reference.harness import NumpyHarness
from gradaccum_conformance.reference.optimizers import make_optimizer


class PlainHarness(NumpyHarness):
    name = "plain"
    large_batch = plain_large_batch

    def make_inner(self, spec, parameters):
        return Optimizer(make_optimizer(spec, parameters))


harness = PlainHarness()
