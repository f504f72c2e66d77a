"""Faults in a window of one worker: its counters, its sums, its end, its loss scale,
its loss, and its saving.
"""

from __future__ import annotations

from gradaccum.kit import State

from .planting import Mutant

ACCUMULATE = "self._move(accumulate(self.machine, weight, finite, select))"
ADD = "                self.sums[name] += term\n"
CLEAR = "        total[...] = 0"
CLOSE = "self._move(close(self.machine, applied, overflow, self.options, select))"
CONTRIBUTION = """\
        factor = contribution(weight, self.options)
        terms = {"""
DECIDE = "decision = Decision(*decide(machine, norm, finite, options, select, largest))"
DISCARD = "self._move(discard(self.machine))"
EMPTY_FLUSH = """\
        if self.machine.micro_step == 0:
            return self._note()
"""
ENDS = """\
        if ends(self.machine, steps, select):
            self.flush()
"""
IF_ADDS = "        if adds:\n"
LARGEST = "    largest = max(float(np.abs(total).max()) for total in sums.values())\n"
LOADED = "        self.wrapped = wrapped\n"
RESUMED = "resumed(state, terms_of(wrapped.options, state.optimizer_step), options)"
WINDOW_LOSS = "self.window_loss = window_loss(self.loss, machine, options, select)"


def after_accumulate(field: str, value: str) -> dict[str, str]:
    """`value` may speak of the new fields as ``after``."""
    return {
        ACCUMULATE: "after = State(*accumulate(self.machine, weight, finite, select))\n"
        f"        self._move(after._replace({field}={value}))"
    }


def after_close(field: str, value: str) -> dict[str, str]:
    return {
        CLOSE: "after = State(*close(self.machine, applied, overflow, self.options,"
        f" select))\n        self._move(after._replace({field}={value}))"
    }


def after_decide(field: str, value: str) -> dict[str, str]:
    return {DECIDE: f"{DECIDE}\n        decision = decision._replace({field}={value})"}


COUNTERS = (
    Mutant(
        "forget_the_counter_on_discard",
        {
            DISCARD: "kept = self.machine.micro_step\n        "
            "self._move(State(*discard(self.machine))._replace(micro_step=kept))"
        },
    ),
    Mutant(
        "forget_the_weight_on_discard",
        {
            DISCARD: "kept = self.machine.weight\n        "
            "self._move(State(*discard(self.machine))._replace(weight=kept))"
        },
    ),
    Mutant(
        "count_micro_batches_as_updates",
        after_accumulate("optimizer_step", "self.machine.optimizer_step + 1"),
    ),
    Mutant(
        "count_skipped_windows_as_updates",
        after_close("optimizer_step", "self.machine.optimizer_step + 1"),
    ),
    Mutant(
        "leave_skipped_windows_uncounted",
        after_close("skipped_windows", "self.machine.skipped_windows"),
    ),
    Mutant(
        "schedule_by_closed_windows",
        {
            ENDS: """\
        next_step = self.machine.optimizer_step + 1
        if ends(self.machine._replace(optimizer_step=next_step), steps, select):
            self.flush()
"""
        },
    ),
    Mutant(
        "run_the_optimizer_every_time",
        {
            ENDS: """\
        if ends(self.machine, steps, select):
            self.flush()
        else:
            parameters = self.optimizer.parameters
            self.optimizer.step({n: np.zeros_like(p) for n, p in parameters.items()})
"""
        },
    ),
    Mutant(
        "count_an_empty_flush",
        {
            EMPTY_FLUSH: """\
        if self.machine.micro_step == 0:
            skipped = self.machine.skipped_windows + 1
            self.machine = self.machine._replace(skipped_windows=skipped)
            return self._note()
"""
        },
    ),
    Mutant(
        "report_the_last_window_after_an_empty_flush",
        {EMPTY_FLUSH: EMPTY_FLUSH.replace("self._note()", "None")},
    ),
)
SUMS = (
    Mutant("never_clear", {CLEAR: "        pass"}),
    Mutant(
        "clear_by_multiplying",
        {
            CLEAR: """\
        with np.errstate(invalid="ignore"):
            total *= 0"""
        },
    ),
    Mutant(
        "ignore_the_weights", {CONTRIBUTION: "        factor = 1.0\n        terms = {"}
    ),
    Mutant(
        "drop_nothing",
        {
            "return Accumulation(optimizer, with_numpy_dtype(options), workers)": """\
options = options._replace(on_overflow="skip_window")
        return Accumulation(optimizer, with_numpy_dtype(options), workers)"""
        },
    ),
    Mutant(
        "float32_sums_of_float64",
        {
            "return np.dtype(self.options.accumulate_dtype or own)": (
                "return np.dtype(np.float32)"
            )
        },
    ),
    # As autograd does with what the first backward pass returns.
    Mutant(
        "take_over_the_first_gradient",
        {
            ADD: """\
                g = gradient[name]
                is_first = self.machine.micro_step == 0 and weight == 1
                if is_first and g.dtype == term.dtype:
                    self.sums[name] = g
                else:
                    self.sums[name] += term
"""
        },
    ),
    Mutant(
        "weigh_dropped_micro_batches",
        after_accumulate("weight", "self.machine.weight + weight"),
    ),
    Mutant(
        "discard_sum_of_missing_gradient",
        {
            IF_ADDS: """\
        for name, g in gradient.items():
            if g is None:
                self.sums[name][...] = 0
        if adds:
"""
        },
    ),
    Mutant(
        "multiply_by_weight_zero",
        {
            IF_ADDS: """\
        for name, g in gradient.items():
            if weight == 0 and g is not None:
                with np.errstate(invalid="ignore"):
                    self.sums[name] += 0 * g
        if adds:
"""
        },
    ),
)
DECISIONS = (
    Mutant(
        "divide_a_sum",
        after_decide("divisor", "machine.loss_scale * (machine.weight or 1.0)"),
    ),
    Mutant("step_on_overflow", after_decide("apply", "True")),
    Mutant(
        "divide_by_anything",
        {
            "largest = largest_number(float64_weight=self._double())": (
                "largest = math.inf"
            )
        },
    ),
    Mutant(
        "ignore_clip_norm",
        {DECIDE: DECIDE.replace("options", "options._replace(clip_norm=None)")},
    ),
    Mutant(
        "ignore_skip_norm",
        {DECIDE: DECIDE.replace("options", "options._replace(skip_norm=None)")},
    ),
    Mutant("report_the_norm_of_the_sum", after_decide("grad_norm", "norm")),
    Mutant(
        "unscale_twice",
        after_decide("divisor", "decision.divisor * machine.loss_scale"),
    ),
    Mutant(
        "divide_the_tail_by_steps",
        {
            DECIDE: f"""{DECIDE}
        if isinstance(options.steps, int) and options.reduction == "mean":
            missing = options.steps / machine.micro_step
            decision = decision._replace(divisor=decision.divisor * missing)"""
        },
    ),
    Mutant(
        "call_large_squares_an_overflow",
        {
            LARGEST: """\
    with np.errstate(over="ignore"):
        squares = sum(np.square(total).sum() for total in sums.values())
    return float(np.sqrt(squares)), bool(np.isfinite(squares))
"""
        },
    ),
    Mutant(
        "clip_every_micro_batch",
        {
            CONTRIBUTION: f"""\
        present = {{name: g for name, g in gradient.items() if g is not None}}
        norm, finite = measure(present) if present else (0.0, True)
        limit = (self.options.clip_norm or math.inf) * self.machine.loss_scale
        if finite and norm > limit:
            gradient = {{n: g * g.dtype.type(limit / norm) for n, g in present.items()}}
{CONTRIBUTION}"""
        },
    ),
    Mutant(
        "clip_the_scaled_gradient",
        {
            DECIDE: f"""{DECIDE}
        if options.clip_norm and finite:
            excess = max(norm / options.clip_norm, 1.0)
            decision = decision._replace(divisor=decision.divisor * excess)"""
        },
    ),
)
SCALE = (
    Mutant(
        "back_off_when_skipping_by_norm", after_decide("overflow", "not decision.apply")
    ),
    Mutant(
        "move_the_scale_per_micro_batch",
        after_accumulate(
            "loss_scale", "after.loss_scale * (0.5 if after.overflow else 1.0)"
        ),
    ),
    Mutant(
        "forget_overflow_at_next_micro_batch",
        after_accumulate("overflow", "not finite"),
    ),
    Mutant(
        "grow_after_an_overflow",
        after_close("growth_tracker", "(self.machine.growth_tracker + 1) % 2"),
    ),
    Mutant(
        "lower_scale_below_its_floor",
        after_close(
            "loss_scale",
            "0.5 if after.growth_tracker == 0 and after.loss_scale =="
            " self.machine.loss_scale == 1.0 else after.loss_scale",
        ),
    ),
    Mutant(
        "raise_scale_above_its_ceiling",
        {
            CLOSE: """\
endless = self.options.scale_rule._replace(max_scale=math.inf)
        options = self.options._replace(scale_rule=endless)
        self._move(close(self.machine, applied, overflow, options, select))"""
        },
        "test_every_event_in_every_state",
    ),
)
KNOWLEDGE = "test_knowledge"
IGNORED = "test_ignored_overflow"
LOSS_AND_WEIGHT = (
    Mutant(
        "average_the_losses",
        {
            "add_loss(self.loss, loss, weight, adds,": (
                "add_loss(self.loss, loss / (weight or 1), weight, adds,"
            )
        },
        KNOWLEDGE,
    ),
    Mutant(
        "count_the_loss_of_a_dropped_micro_batch",
        {
            "add_loss(self.loss, loss, weight, adds,": (
                "add_loss(self.loss, loss, weight, True,"
            )
        },
        KNOWLEDGE,
    ),
    Mutant(
        "report_the_scaled_loss",
        {WINDOW_LOSS: f"{WINDOW_LOSS} * machine.loss_scale"},
        KNOWLEDGE,
    ),
    Mutant(
        "divide_the_loss_by_steps",
        {
            WINDOW_LOSS: f"""{WINDOW_LOSS}
        if isinstance(options.steps, int):
            self.window_loss *= min(machine.micro_step / options.steps, 1)"""
        },
        KNOWLEDGE,
    ),
    Mutant(
        "keep_the_loss_of_a_discarded_window",
        {f"        self.loss = 0.0\n        {DISCARD}": f"        {DISCARD}"},
        KNOWLEDGE,
    ),
    Mutant(
        "end_a_window_beyond_its_weight",
        {
            ENDS: """\
        weight = self.machine.weight - isinstance(steps, UntilWeight)
        if ends(self.machine._replace(weight=weight), steps, select):
            self.flush()
"""
        },
        KNOWLEDGE,
    ),
    Mutant(
        "count_micro_batches_for_weight",
        {
            ENDS: """\
        counted = self.machine
        if isinstance(steps, UntilWeight):
            counted = counted._replace(weight=counted.micro_step)
        if ends(counted, steps, select):
            self.flush()
"""
        },
        KNOWLEDGE,
    ),
    Mutant(
        "look_at_an_ignored_overflow",
        {
            DECIDE: f"""\
if options.on_overflow == "ignore":
            norm, finite = 1.0, True
        {DECIDE}"""
        },
        IGNORED,
    ),
    Mutant(
        "skip_an_ignored_overflow",
        {
            "        self.optimizer = optimizer\n": """\
        if options.on_overflow == "ignore":
            options = options._replace(on_overflow="skip_window")
        self.optimizer = optimizer
"""
        },
        IGNORED,
    ),
)
SAVING_AND_INPUT = (
    Mutant(
        "save_without_the_sums",
        {
            "    def state(self):\n": """\
    def __getstate__(self):
        zeros = {name: np.zeros_like(total) for name, total in self.sums.items()}
        return {**self.__dict__, "sums": zeros}

    def state(self):
"""
        },
    ),
    *(
        Mutant(
            f"save_without_{field}",
            {
                LOADED: f"""\
        fresh = self.accumulation.machine.{field}
{LOADED}\
        machine = self.accumulation.machine
        self.accumulation.machine = machine._replace({field}=fresh)
"""
            },
        )
        for field in State._fields
    ),
    Mutant(
        "load_without_checks",
        {
            "_require_same_shapes(weights, self.weights)": "pass",
            "_require_same_shapes(inner.parameters, self.inner.parameters)": "pass",
        },
    ),
    Mutant(
        "resume_under_any_terms", {RESUMED: f"state if state.micro_step else {RESUMED}"}
    ),
    Mutant(
        "resume_with_the_saved_scale",
        {RESUMED: f"{RESUMED} if state.micro_step else state"},
    ),
    Mutant(
        "take_any_size",
        {
            "return require_steps(steps_at(steps, step, select), step, steps)": (
                "return steps_at(steps, step, select)"
            )
        },
    ),
    Mutant(
        "take_any_weight",
        {
            "None if weight is None else require_weight(weight)": (
                "None if weight is None else float(weight)"
            )
        },
    ),
    Mutant(
        "take_any_gradient",
        {
            "name: None if g is None else _checked(name, g, self.weights)": (
                "name: np.resize(g, self.weights[name].shape)"
                " if g is not None and name in self.weights else g"
            )
        },
    ),
)
WINDOW = (*COUNTERS, *SUMS, *DECISIONS, *SCALE, *LOSS_AND_WEIGHT, *SAVING_AND_INPUT)
