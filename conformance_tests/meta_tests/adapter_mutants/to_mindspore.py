"""The MindSpore adapter's mutants. Cases in PyNative where one is enough: a graph takes
seconds to compile.
"""

from __future__ import annotations

from .planting import Mutant

MUTANTS = (
    Mutant(
        "leave_the_sums_of_a_discarded_window",
        "            gradient_sum.clear(storage.sums)\n",
        "",
        "test_windows.py::test_discard_forgets_the_window",
        "pynative",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "            storage.push(kit.discard(state._replace(micro_step=0)), state)\n",
        "",
        "test_windows.py::test_discard_forgets_the_window",
        "pynative",
    ),
    Mutant(
        "add_without_the_weight",
        "        factor = kit.contribution(weight, self.options)\n",
        "        factor = 1.0\n",
        "test_weights.py::test_gradient_follows_the_definition",
        "pynative",
    ),
    Mutant(
        "add_what_is_dropped",
        "            if is_added:\n",
        "            if True:\n",
        "test_overflow.py::test_drop_in_every_mode",
        "pynative",
    ),
    Mutant(
        "apply_what_is_to_be_skipped",
        "        decision = self.decision(ending, options)\n",
        "        decision = self.decision(ending, options)._replace(apply=True)\n",
        "test_overflow.py::test_overflow_skips_this_window_only",
        "pynative",
    ),
    Mutant(
        "leave_the_loss_scale",
        (
            "        after = kit.close(\n"
            "            state, decision.apply, decision.overflow, self.options, kit.select\n"
        ),
        (
            "        after = kit.close(\n"
            "            state, decision.apply, False, self.options, kit.select\n"
        ),
        "test_loss_scale.py::test_scale_after_each_micro_batch",
        "pynative",
    ),
    Mutant(
        "forget_what_float16_holds",
        "is_finite = norm <= largest and self.fits(ending, options, norm)",
        "is_finite = norm <= largest",
        "test_half_precision.py::test_sum_at_the_edge_of_float16",
        "pynative",
    ),
    Mutant(
        "leave_the_model_behind_its_masters",
        "        if self.has_masters:\n            self.masters()\n",
        "",
        "test_master_weights.py::test_small_updates_add_up",
        "pynative",
    ),
    Mutant(
        "resume_under_any_terms",
        "    state = kit.resumed(saved_state, terms, options)\n",
        "    state = saved_state\n",
        "test_checkpoint.py::test_open_window_refuses_other_options",
    ),
    Mutant(
        "load_no_sum",
        (
            "            value = parameter_dict[name].asnumpy()\n"
            "        write(parameter, Tensor(value, parameter.dtype))\n"
        ),
        (
            "            value = parameter_dict[name].asnumpy()\n"
            "        if not name.endswith(storages[0].sum_suffix):\n"
            "            write(parameter, Tensor(value, parameter.dtype))\n"
        ),
        "test_checkpoint.py::test_resume_in_every_mode",
        "pynative",
    ),
    Mutant(
        "keep_the_last_micro_batch_of_a_large_batch",
        "            add_into(total, scaled(tensor, factor, total.dtype))\n",
        "            ops.assign(total, scaled(tensor, factor, total.dtype))\n",
        "test_one_call.py::test_gradient_of_the_large_batch",
    ),
    Mutant(
        "weigh_no_micro_batch_of_a_large_batch",
        "            total.add(gradients, micro_batch.factor)\n",
        "            total.add(gradients)\n",
        "test_one_call.py::test_weights_of_items",
    ),
    Mutant(
        "forget_a_worker_s_overflow",
        "                overflow.astype(self.float_dtype),\n",
        "                self.zero,\n",
        "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
        "pynative",
    ),
    Mutant(
        "leave_the_sums_of_a_closed_window",
        "        gradient_sum.clear(self.storage.sums)\n",
        "",
        "test_optimizers.py",
        "pynative",
    ),
    Mutant(
        "compiled_window_leaves_its_counters",
        "        return self.write_counters(after)\n",
        "        return True\n",
        "test_windows.py::test_result_inside_and_at_end",
        "jit",
    ),
    Mutant(
        "compiled_window_leaves_its_sums",
        "        gradient_sum.compiled_clear(self.storage.sums, self.nothing.value())\n",
        "",
        "test_overflow.py::test_overflow_skips_this_window_only",
        "jit",
    ),
    Mutant(
        "compiled_window_applies_what_is_to_be_skipped",
        "        ops.assign(self.is_applied, apply)\n",
        "        ops.assign(self.is_applied, apply == apply)\n",
        "test_overflow.py::test_overflow_skips_this_window_only",
        "jit",
    ),
    Mutant(
        "compiled_window_adds_without_the_weight",
        "            factor = weight_number\n",
        "            factor = None\n",
        "test_weights.py::test_gradient_follows_the_definition",
        "jit",
    ),
    Mutant(
        "compiled_window_keeps_what_is_discarded",
        "        gradient_sum.compiled_clear(self.storage.sums, state[WEIGHT])\n",
        "",
        "test_mindspore_calls.py::test_flush_and_discard_inside_jit",
    ),
    Mutant(
        "take_a_part_of_the_losses_for_all",
        "        if weight_with_loss != state.weight:\n            total = math.nan\n",
        "",
        "test_knowledge.py::test_window_with_a_missing_loss_has_none",
    ),
    Mutant(
        "move_the_scheduler_at_each_micro_batch",
        "        if updates > before:\n            self._scheduler",
        "        if True:\n            self._scheduler",
        "test_mindspore_schedule.py::test_experimental_scheduler_moves_per_update",
    ),
    Mutant(
        "take_a_checkpoint_for_an_update",
        "        self._stepped_at = self._storage.optimizer_step.item()\n",
        "        pass\n",
        "test_mindspore_schedule.py::test_gate_takes_no_checkpoint_for_an_update",
    ),
    Mutant(
        "let_the_inner_optimizer_be_called",
        (
            '        self.inner_attributes["construct"] = self.guard\n'
            "        # Without this line, a call"
        ),
        "        # Without this line, a call",
        "test_mindspore_everyday.py::test_inner_optimizer_is_not_called",
    ),
    Mutant(
        "take_no_micro_batch_for_weighed",
        "        self.storage.sizes.weighed = weight is not None\n",
        "        self.storage.sizes.weighed = False\n",
        "test_mindspore_everyday.py::test_unequal_sizes_without_weights_are_said_once",
    ),
    Mutant(
        "say_nothing_of_moved_rates",
        "        if is_changed:\n",
        "        if False:\n",
        "test_mindspore_schedule.py::test_ungated_scheduler_is_said_once",
    ),
    Mutant(
        "leave_the_loader_s_last_window_open",
        "            carry=carry,\n            progress=progress,\n",
        "            carry=True,\n            progress=progress,\n",
        "test_mindspore_everyday.py::test_epoch_of_a_dataset",
    ),
    Mutant(
        "note_no_missing_weight_in_compiled_code",
        "        self.note_weighed(weight is not None)\n",
        "",
        "test_mindspore_everyday.py::test_unequal_sizes_without_weights_are_said_once",
    ),
    Mutant(
        "leave_the_event_at_an_empty_compiled_flush",
        "            ops.assign(self.storage.last_event, self.empty_event())\n",
        "            pass\n",
        "test_mindspore_calls.py::test_flush_and_discard_inside_jit",
    ),
    Mutant(
        "let_the_epoch_s_flush_change_the_result",
        "            write_numbers(storage.last_event, last_event)\n",
        "            pass\n",
        "test_mindspore_training.py::test_callback_behind_sees_every_update",
    ),
    Mutant(
        "take_a_saved_window_for_a_lost_one",
        "        if state.micro_step > 0 and state != self.known_state:\n",
        "        if state.micro_step > 0:\n",
        "test_mindspore_open_window.py::test_resumed_window_is_known",
    ),
    Mutant(
        "keep_masters_of_weights_that_were_replaced",
        "    write(master, where(weights == rounded, master, weights))\n",
        "",
        "test_mindspore_masters.py::test_weights_that_are_changed_in_place",
    ),
    Mutant(
        "take_the_loss_for_the_weight_in_compiled_code",
        "                checks.require_certain_weight(positional_weight.dtype)\n",
        "                pass\n",
        "test_mindspore_everyday.py::test_loss_in_the_weight_s_place",
    ),
)
