"""Faults in the source of the transitions, one at a time; the property that each breaks
must be refuted.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import NamedTuple

from gradaccum import transitions


class Fault(NamedTuple):
    was: str
    """Text of the source, which stands there once."""
    becomes: str
    breaks: str
    """The name of the property that it breaks."""


GOOD = "what_is_good_is_applied"
BAD = "nothing_bad_is_applied"
TOLD = "overflow_is_told"
SANE = "any_weight_keeps_the_state_sane"
CLOSES = "close_moves_exactly_one_counter"
SCALE = "scale_keeps_its_limits"

FAULTS = {
    "a negative weight is added": Fault(
        "where(harmless, total + weight, total)", "total + weight", SANE
    ),
    "the total may become infinite": Fault(
        "(state[3] + weight < INFINITY)", "(weight < INFINITY)", SANE
    ),
    "a bad micro-batch is added": Fault(
        "return finite & (weight > 0)", "return (weight > 0)", SANE
    ),
    "a good micro-batch takes the flag down": Fault(
        "overflow | (harmless == False)", "harmless == False", SANE
    ),
    "a micro-batch counts twice": Fault(
        "micro_step + 1,\n        optimizer_step",
        "micro_step + 2,\n        optimizer_step",
        SANE,
    ),
    "a sum that is not finite is applied": Fault(
        "else finite) & (weight > 0)", "else in_range) & (weight > 0)", BAD
    ),
    "a window without weight is applied": Fault(
        "else finite) & (weight > 0)", "else finite)", BAD
    ),
    "any divisor is used": Fault("finite = finite & in_range", "finite = finite", BAD),
    "a subnormal divisor is used": Fault(
        "(divides >= smallest) & (divides <= largest)", "divides <= largest", BAD
    ),
    "an infinite divisor is used": Fault(
        "(divides >= smallest) & (divides <= largest)", "divides >= smallest", BAD
    ),
    "a clipping divisor may be infinite": Fault(
        "        apply = apply & (clipping <= largest)\n", "", BAD
    ),
    "overflow is applied": Fault(
        "apply = apply & (overflow == False)", "apply = apply", BAD
    ),
    "a bad weight is ignored": Fault(
        "(in_range & (state[4] == False) if ignoring", "(in_range if ignoring", BAD
    ),
    "a large norm is not skipped": Fault(
        "(grad_norm <= options.skip_norm)", "(grad_norm == grad_norm)", BAD
    ),
    "nothing is ever applied": Fault(
        "apply = (in_range", "apply = (in_range & (weight < 0)", GOOD
    ),
    "the gradient stays scaled": Fault(
        "    return state[5] * denominator(state[3], options, where)\n",
        "    return denominator(state[3], options, where)\n",
        GOOD,
    ),
    "a sum is divided": Fault(
        'one if options.reduction == "sum" else where', "where", GOOD
    ),
    "the norm is that of the sum": Fault(
        "norm / where(in_range, divides, one)", "norm", GOOD
    ),
    "a small norm is raised to the limit": Fault(
        "apply & (excess > 1)", "apply & (excess > 0)", GOOD
    ),
    "overflow is not told": Fault(
        "overflow = overflow | (finite == False)", "overflow = overflow", TOLD
    ),
    "the divisor is not clipped": Fault(
        "divides = where(apply, clipping, divides)",
        "divides = divides",
        "clipping_keeps_the_limit",
    ),
    "the scaled norm is clipped": Fault(
        "excess = grad_norm /", "excess = grad_norm * state[5] /", GOOD
    ),
    "a skipped window counts as two": Fault(
        "skipped_windows + 1 - applied", "skipped_windows + 1", CLOSES
    ),
    "a skipped window counts as an update": Fault(
        "optimizer_step + applied", "optimizer_step + 1", CLOSES
    ),
    "a closed window keeps its flag": Fault(
        """\
    return discard(
        (
            micro_step,
            optimizer_step + applied,
            skipped_windows + 1 - applied,
            weight,
            overflow,
            loss_scale,
            growth_tracker,
        )
""",
        """\
    return (
        micro_step,
        optimizer_step + applied,
        skipped_windows + 1 - applied,
        weight,
        overflow,
        loss_scale,
        growth_tracker,
""",
        CLOSES,
    ),
    "the scale has no floor": Fault(
        """\
    smaller_scale = where(
        smaller_scale > rule.min_scale, smaller_scale, rule.min_scale + 0 * scale
    )
""",
        "    smaller_scale = smaller_scale\n",
        SCALE,
    ),
    "the scale has no ceiling": Fault(
        "where(\n        larger_scale < rule.max_scale, larger_scale,"
        " rule.max_scale + 0 * scale\n    )",
        "larger_scale",
        SCALE,
    ),
    "the scale grows to infinity": Fault(
        "where(larger_scale <= FLOAT32_MAX, larger_scale, scale)", "larger_scale", SCALE
    ),
    "the scale never backs off": Fault(
        "where(overflow, smaller_scale,", "where(overflow, scale,", SCALE
    ),
    "an empty window is a clean one": Fault(
        "clean = (overflow == False) & (weight > 0)",
        "clean = (overflow == False)",
        SCALE,
    ),
    "growth is one window late": Fault(
        "tracker + 1 >= rule.growth_interval", "tracker >= rule.growth_interval", SCALE
    ),
    "an overflow leaves the tracker": Fault(
        "where(overflow | due, 0 * tracker", "where(due, 0 * tracker", SCALE
    ),
    "discard keeps the weight": Fault(
        "        0 * loss_scale,\n",
        "        state[3],\n",
        "discard_forgets_the_window_alone",
    ),
    "joining forgets the scale": Fault(
        "    return (*state[:3], weight, overflow, *state[5:])\n",
        "    return (*state[:3], weight, overflow, 0 * state[5] + 1, state[6])\n",
        "joining_takes_weight_and_flag_alone",
    ),
}


def faulty(fault: Fault) -> ModuleType:
    """A copy of the transitions with the fault in their source."""
    source = inspect.getsource(transitions)
    assert source.count(fault.was) == 1, (
        f"{fault.was!r} stands {source.count(fault.was)} times in the source"
    )
    module = ModuleType("gradaccum.transitions")
    exec(
        compile(
            source.replace(fault.was, fault.becomes),
            "transitions.py with a fault",
            "exec",
        ),
        module.__dict__,
    )
    return module
