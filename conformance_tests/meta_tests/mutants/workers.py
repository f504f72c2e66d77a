"""Faults in a window that several workers share. Most were made by real programs."""

from __future__ import annotations

from .planting import Mutant
from .window import ADD, ENDS

GRADIENT = "test_workers and test_gradient_is_that_of_all_workers"
JOIN = "            self._join()\n"
MEASURE = "norm, finite = measure(self.sums) if measured else (math.nan, True)"
SUM = (
    "        self.sums = {name: sum(own[name] for own in sums) for name in self.sums}\n"
)

WORKERS = (
    Mutant(
        "reduce_the_last_micro_batch_only",
        {
            ADD: f"""\
                if self.workers:
                    self.sums[name][...] = 0
{ADD}"""
        },
        GRADIENT,
    ),
    Mutant(
        "reduce_the_first_micro_batch_only",
        {
            ADD: """\
                if not self.workers or self.machine.micro_step == 0:
                    self.sums[name] += term
"""
        },
        GRADIENT,
    ),
    Mutant(
        "add_the_last_micro_batch_after_the_reduction",
        {
            ENDS: """\
        if ends(self.machine, steps, select):
            self.late_terms = terms if self.workers else {}
            for name, term in self.late_terms.items():
                self.sums[name] -= term
            self.flush()
""",
            SUM: f"""{SUM}\
        for name, term in self.late_terms.items():
            self.sums[name] += term
""",
        },
        "test_workers and test_full_windows_need_no_flush",
    ),
    # As DistributedDataParallel does: right only while all have the same weight.
    Mutant(
        "average_the_workers",
        {
            SUM: """\
        for own, each in zip(sums, machines, strict=True):
            for total in own.values():
                total *= weight / ((each.weight or 1.0) * len(machines))
"""
            + SUM
        },
        f"{GRADIENT} and mean",
    ),
    Mutant(
        "keep_the_overflow_to_oneself",
        {
            "overflow = any(machine.overflow for machine in machines)": (
                "overflow = self.machine.overflow"
            )
        },
        "test_workers and test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "measure_the_norm_of_one_worker",
        {
            JOIN: f"            norm_here = measure(self.sums)\n{JOIN}",
            MEASURE: f"""{MEASURE}
        if self.workers:
            norm, finite = norm_here""",
        },
        "test_workers and test_limits_are_of_the_reduced_norm",
    ),
    Mutant(
        "judge_overflow_before_the_reduction",
        {
            JOIN: f"            finite_here = measure(self.sums)[1]\n{JOIN}",
            MEASURE: f"""{MEASURE}
        if self.workers:
            finite = finite_here""",
        },
        "test_workers and test_overflow_on_one_worker",
    ),
    # A buffer for the reduction that nobody clears.
    Mutant(
        "reduce_into_the_last_window",
        {
            SUM: f"""{SUM}\
        buffer = getattr(self, "buffer", {{}})
        for name, total in self.sums.items():
            total += buffer.get(name, 0)
        self.buffer = self.total()
"""
        },
        "test_workers and test_window_leaves_nothing_to_the_next",
    ),
    Mutant(
        "divide_by_the_weight_of_one_worker",
        {
            "weight = sum(machine.weight for machine in machines)": (
                "weight = self.machine.weight"
            )
        },
        f"{GRADIENT} and mean",
    ),
    Mutant(
        "update_the_first_worker_only",
        {
            "            self.optimizer.step(gradient)\n": """\
            if not self.workers or self.workers.rank == 0:
                self.optimizer.step(gradient)
"""
        },
        f"{GRADIENT} and mean",
    ),
    # A worker that has nothing in the window forgets the others' window.
    Mutant(
        "leave_out_the_window_of_others",
        {
            "longest = max(machine.micro_step for machine in machines)": (
                "longest = self.machine.micro_step"
            )
        },
        "test_workers and test_worker_without_micro_batches",
    ),
    Mutant(
        "forget_the_event_at_an_empty_flush",
        {
            JOIN: f"            was_empty = self.machine.micro_step == 0\n{JOIN}",
            "        return self._note(applied, not applied, overflow)\n": """\
        if self.workers and was_empty:
            return self._note()
        return self._note(applied, not applied, overflow)
""",
        },
        "test_workers",
    ),
    Mutant(
        "reduce_in_half_precision",
        {
            SUM: """\
        for own in sums:
            for name, p in self.optimizer.parameters.items():
                own[name] = own[name].astype(p.dtype).astype(own[name].dtype)
"""
            + SUM
        },
        "test_workers and test_half_precision_gradients",
    ),
    Mutant(
        "report_the_loss_of_one_worker",
        {"        self.loss = sum(losses)\n": ""},
        "test_workers_knowledge",
    ),
)
