"""The MindSpore adapter's mutants. Cases in PyNative where one is enough: a graph takes seconds to compile."""

from __future__ import annotations

from .planting import SUITE, Mutant

MUTANTS = (
    Mutant(
        "leave_the_sums_of_a_discarded_window",
        "        self.clear()\n        self.storage.knowledge.push(self.storage.knowledge.forgotten())\n",
        "        self.storage.knowledge.push(self.storage.knowledge.forgotten())\n",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
        "pynative",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "        self.storage.push(kit.discard(state), state)\n",
        "",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
        "pynative",
    ),
    Mutant(
        "add_without_the_weight",
        "        factor = kit.contribution(weight, self.options)\n        finite = weight == 0",
        "        factor = 1.0\n        finite = weight == 0",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
        "pynative",
    ),
    Mutant(
        "add_what_is_dropped",
        "        added = gradients if adds else (None,) * len(gradients)\n",
        "        added = gradients\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
        "pynative",
    ),
    Mutant(
        "apply_what_is_to_be_skipped",
        "            if decision.apply:\n                update(ms.mutable",
        "            if True:\n                update(ms.mutable",
        SUITE + "test_overflow.py::test_overflow_in_every_mode",
        "pynative",
    ),
    Mutant(
        "leave_the_loss_scale",
        "self.storage.push(kit.close(state, decision.apply, decision.overflow, self.options, kit.select), state)",
        "self.storage.push(kit.close(state, decision.apply, False, self.options, kit.select), state)",
        SUITE + "test_loss_scale.py::test_scale_moves_once_per_window",
        "pynative",
    ),
    Mutant(
        "forget_what_float16_holds",
        "return norm, finite and self.fits(state, norm)",
        "return norm, finite",
        SUITE + "test_half_precision.py::test_sum_beyond_float16_overflows",
        "pynative",
    ),
    Mutant(
        "leave_the_model_behind_its_masters",
        "        if self.rounds:\n            self.masters()\n",
        "",
        SUITE + "test_master_weights.py::test_small_updates_add_up",
        "pynative",
    ),
    Mutant(
        "resume_under_any_terms",
        "    for field, value in zip(FIELD_DTYPES, resumed(saved, terms, own), strict=True):\n",
        "    for field, value in zip(FIELD_DTYPES, saved, strict=True):\n",
        SUITE + "test_resuming.py::test_open_window_refuses_other_options",
    ),
    Mutant(
        "load_no_sum",
        "        write(parameter, Tensor(changed[name] if",
        ("        if not name.endswith(next(_storages(cell)).suffix):\n            write(parameter, Tensor(changed[name] if"),
        SUITE + "test_checkpoint.py::test_resume_in_every_mode",
        "pynative",
    ),
    Mutant(
        "keep_the_last_micro_batch_of_a_large_batch",
        "            self.totals[place] = given if before is None else _added(before, given)\n",
        "            self.totals[place] = given\n",
        SUITE + "test_one_call.py::test_gradient_of_the_large_batch",
    ),
    Mutant(
        "weigh_no_micro_batch_of_a_large_batch",
        "given = scaled(gradient, factor, dtype) if factor != 0 else",
        "given = scaled(gradient, 1.0, dtype) if factor != 0 else",
        SUITE + "test_one_call.py::test_weights_of_items",
    ),
    Mutant(
        "forget_the_first_micro_batch_s_norm",
        "        self._assign(self.noise, (*kit.first_seen(self.noise.tolist()[:4], state, norm, kit.select), 1.0))\n",
        "        pass\n",
        SUITE + "test_knowledge.py::test_noise_scale_is_the_reference_s",
        "pynative",
    ),
    Mutant(
        "forget_a_worker_s_overflow",
        "numbers = [state.weight, state.overflow, state.micro_step,",
        "numbers = [state.weight, False, state.micro_step,",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
        "pynative",
    ),
    Mutant(
        "leave_the_sums_of_a_closed_window",
        "        self.clear()\n        self.storage.knowledge.push(known)\n",
        "        self.storage.knowledge.push(known)\n",
        SUITE + "test_optimizers.py",
        "pynative",
    ),
)
