"""The walk over states finds a fault that lies deeper than any short sequence of
events.
"""

from __future__ import annotations

import math

import pytest

from gradaccum_conformance.harness import Setup
from gradaccum_conformance.reference.harness import NumpyHarness, NumpySession
from gradaccum_conformance.suite.test_lockstep import EVENTS, VARIANTS, Pair
from gradaccum_conformance.walking import state_of, walk

OPTIONS = VARIANTS["skip window"]


class WithoutCeiling(NumpyHarness):
    """The loss scale of its sessions grows beyond `max_scale`, which it reaches after
    some ten events.
    """

    def start(self, setup: Setup) -> NumpySession:
        session = super().start(setup)
        options = session.accumulation.options
        session.accumulation.options = options._replace(
            scale_rule=options.scale_rule._replace(max_scale=math.inf)
        )
        return session


def test_deep_fault_is_found() -> None:
    pair = Pair(WithoutCeiling(), OPTIONS)
    with pytest.raises(AssertionError, match=r"^(good ){11}good\n"):
        walk(pair, EVENTS, lambda: state_of(pair.sessions[1], OPTIONS))
