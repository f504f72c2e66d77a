"""The vectors of the specification, played on the core's transitions in Python numbers;
and each fault in their source is seen in the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from conformance_tests.proof_tests.faults import FAULTS, faulty
from gradaccum import kit, transitions
from gradaccum_conformance.vectors.run import KINDS, difference, read, run
from gradaccum_conformance.vectors.session import wrap_options

UNSEEN = {
    "joining forgets the scale": "a window that workers share is in no vector",
    "overflow is applied": "the flag would be up after a weight that is refused before",
    "a bad weight is ignored": "a weight that is not finite is refused before it is added",
    "the total may become infinite": "no vector has so large a weight",
}
"""The faults that no vector shows, and the reasons."""


class CoreImplementation:
    """A window of two numbers under the functions of a module of transitions."""

    def __init__(
        self, module: ModuleType, options: Mapping[str, Any], dtype: str
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.options = kit.make_options(**wrap_options(options))
        self.round = float if dtype == "float64" else kit.round_to_float32
        self.state = kit.at_rest(kit.initial_state(self.options.scale_rule.init_scale))
        self.sum = [0.0, 0.0]
        self.loss = 0.0
        self.begin_event()

    def begin_event(self) -> None:
        self.update: list[float] | None = None
        self.decision: dict[str, Any] | None = None
        self.saved: kit.Terms | None = None

    def micro_batch(
        self, gradient: list[float | None], weight: float | None, loss: float
    ) -> None:
        self.begin_event()
        m = self.module
        weight = kit.given_weight(weight, kit.use_of_weights(self.options))
        kit.require_weight(weight)
        factor = m.contribution(weight, self.options)
        scaled = [self.round((g or 0.0) * self.state.loss_scale) for g in gradient]
        terms = [self.round(g * factor) if weight else 0.0 for g in scaled]
        drops = self.options.on_overflow == "drop_micro_batch"
        finite = all(map(math.isfinite, terms)) or not drops
        adds = m.usable(self.state, weight, finite)
        if adds:
            pairs = zip(self.sum, terms, strict=True)
            self.sum = [self.round(total + term) for total, term in pairs]
        self.loss = kit.add_loss(
            self.loss, loss, weight, adds, self.options, kit.select
        )
        self.move(m.accumulate(self.state, weight, finite, kit.select))
        if m.ends(self.state, self.options.steps, kit.select):
            self.close()

    def flush(self) -> None:
        self.begin_event()
        if self.state.micro_step:
            self.close()

    def close(self) -> None:
        m = self.module
        norm = math.hypot(*self.sum)
        finite = all(map(math.isfinite, self.sum))
        if not m.measures(self.options):
            norm = math.nan
            finite = True
        largest = kit.largest_number(float64_weight=self.dtype == "float64")
        decision = m.Decision(
            *m.decide(self.state, norm, finite, self.options, kit.select, largest)
        )
        if decision.apply:
            self.update = [self.round(total / decision.divisor) for total in self.sum]
        self.decision = {
            "apply": decision.apply,
            "overflow": decision.overflow,
            "grad_norm": decision.grad_norm,
            "divisor": decision.divisor if decision.apply else None,
            "loss": kit.window_loss(self.loss, self.state, self.options, kit.select),
        }
        self.sum = [0.0, 0.0]
        self.loss = 0.0
        self.move(
            m.close(
                self.state, decision.apply, decision.overflow, self.options, kit.select
            )
        )

    def discard(self) -> None:
        self.begin_event()
        self.sum = [0.0, 0.0]
        self.loss = 0.0
        self.move(self.module.discard(self.state))

    def resume(self, options: Mapping[str, Any]) -> CoreImplementation:
        self.begin_event()
        self.saved = kit.terms_of(self.options, self.state.optimizer_step)
        codes = kit.encode_terms(self.saved)
        successor = CoreImplementation(self.module, options, self.dtype)
        successor.saved = kit.decode_terms(codes)
        successor.state = kit.resumed(self.state, successor.saved, successor.options)
        successor.sum = self.sum
        successor.loss = self.loss
        return successor

    def move(self, fields: Any) -> None:
        double = self.dtype == "float64"
        self.state = kit.at_rest(kit.State(*fields), float64_weight=double)

    def observe(self) -> dict[str, Any]:
        seen = {
            "state": self.state._asdict(),
            "sum": self.sum,
            "update": self.update,
            "decision": self.decision,
        }
        if self.saved is not None:
            seen["saved"] = self.saved._asdict()
            if isinstance(self.saved.steps, kit.UntilWeight):
                seen["saved"]["steps"] = {"until_weight": self.saved.steps.weight}
        return seen


def differences(module: ModuleType, kind: str) -> list[str]:
    """Return what differs, of each vector that a module of transitions fails."""
    return [*filter(None, run(partial(CoreImplementation, module), kind).values())]


@pytest.mark.parametrize("kind", KINDS)
def test_core_passes(kind: str) -> None:
    assert differences(transitions, kind) == []


def test_table_of_transitions_stands_alone() -> None:
    """From the state and the sum before it, each event has what comes after it."""
    for vector in read("transitions"):
        core = CoreImplementation(transitions, vector["options"], vector["dtype"])
        core.state = kit.State(**vector["before"]["state"])
        core.sum = vector["before"]["sum"]
        step = vector["steps"][-1]
        arguments = dict(step["event"])
        getattr(core, arguments.pop("kind"))(**arguments)
        assert [*map(type, core.state)] == [*map(type, kit.initial_state())]
        seen = {**core.observe(), "refused": False}
        assert not difference(step["after"], seen, vector["tolerance"]), vector["name"]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name: str) -> None:
    module = faulty(FAULTS[name])
    seen = any(differences(module, kind) for kind in KINDS)
    assert seen != (name in UNSEEN), UNSEEN.get(name, "no vector shows it")
