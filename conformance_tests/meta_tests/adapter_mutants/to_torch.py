"""The torch adapter's mutants."""

from __future__ import annotations

from .planting import OWN, SUITE, Mutant

EVERYDAY = OWN + "test_torch_everyday.py::"

MUTANTS = (
    Mutant(
        "keep_the_sum_of_a_closed_window",
        "        self._forget_sum()\n        self.is_reduced = False\n",
        "        self.is_reduced = False\n",
        SUITE + "test_lockstep.py::test_long_random_sequences",
    ),
    Mutant(
        "keep_the_sum_of_all_workers",
        "        self.is_reduced = False\n        self.workers.window_ended()\n        self.watch",
        "        self.workers.window_ended()\n        self.watch",
        SUITE + "test_workers_windows.py::test_full_windows_need_no_flush",
    ),
    Mutant(
        "go_on_with_a_micro_batch_that_is_not_counted",
        "        guard.is_broken = True\n        if is_finite:\n",
        "        if is_finite:\n",
        OWN + "test_torch_interrupted.py::test_interrupted_addition_is_refused",
    ),
    Mutant(
        "go_on_with_a_window_that_is_not_cleared",
        "        if self.is_broken:\n            raise half_made_error()\n",
        "        return\n",
        SUITE + "test_interrupted.py::test_end_of_a_window",
    ),
    Mutant(
        "ignore_the_weight_of_the_loss",
        "self._run_backward(loss, factor, with_factor(loss, factor, arguments))\n",
        "self._run_backward(loss, factor, arguments)\n",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "count_each_weight_as_one",
        "        self.state = self.at_rest(kit.accumulate(state, weight, is_finite, select))\n",
        "        self.state = self.at_rest(kit.accumulate(state, 1.0, is_finite, select))\n",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "sum_half_precision_in_itself",
        "return torch.float32 if dtype in HALF else dtype",
        "return dtype",
        SUITE + "test_half_precision.py::test_sum_is_float32",
    ),
    Mutant(
        "take_every_sum_for_finite",
        "    return (norm, True) if norm < math.inf else (math.inf, False)\n",
        "    return norm, True\n",
        SUITE + "test_overflow.py::test_overflow_skips_this_window_only",
    ),
    Mutant(
        "forget_what_float16_holds",
        "        return norm, is_finite and self._fits(sums, norm, divisor)\n",
        "        return norm, is_finite\n",
        SUITE + "test_half_precision.py::test_sum_at_the_edge_of_float16",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "        self.state = self.at_rest(kit.discard(self.state))\n",
        "",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_sum_at_discard",
        "        self.workers.abandon([*chain(*self._numbers())])\n        self._forget_sum()\n",
        "        self.workers.abandon([*chain(*self._numbers())])\n",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_model_behind_its_masters",
        "        through(self.masters.round)\n",
        "",
        SUITE + "test_master_weights.py::test_small_updates_add_up",
    ),
    Mutant(
        "miss_what_others_wrote_into_the_model",
        "        self.updated_parameters = list(sums)\n"
        "        self.masters.copy_model_into_masters()\n",
        "        self.updated_parameters = list(sums)\n",
        OWN + "test_torch_masters.py::test_write_through_data_reaches_the_masters",
    ),
    Mutant(
        "save_no_sum",
        '        "sums": window.saved_sums(),\n',
        '        "sums": {},\n',
        SUITE + "test_checkpoint.py::test_resume_in_every_mode",
    ),
    Mutant(
        "save_no_loss",
        '        return {"loss": self.read_open(), "window_loss": self.value}\n',
        '        return {"loss": 0.0, "window_loss": self.value}\n',
        SUITE + "test_knowledge.py::test_open_window_keeps_its_loss_when_saved",
    ),
    Mutant(
        "move_the_scheduler_each_micro_batch",
        '        if hasattr(self._scheduler, "step_update") or updates > self._updates:\n',
        "        if True:\n",
        OWN + "test_torch_scheduler.py::test_gated_scheduler_moves_once_per_update",
    ),
    Mutant(
        "leave_followers_behind",
        "        for scheduler in list(self.schedulers):\n            scheduler.follow()\n",
        "",
        OWN + "test_torch_workers.py::test_two_workers",
        only="schedules_and_averages",
    ),
    Mutant(
        "forget_a_change_before_an_addition",
        "                watch.was_changed = True\n",
        "                pass\n",
        OWN + "test_torch_tampering.py::test_change_after_step_is_caught",
    ),
    Mutant(
        "move_gradients_late",
        "        if size != 1:\n            reference = weakref.ref(self)\n",
        "        if False:\n            reference = weakref.ref(self)\n",
        OWN + "test_torch_half_precision.py::test_peak_is_sum_and_one_gradient",
    ),
    Mutant(
        "add_what_is_dropped",
        "        is_finite = not self.drops_micro_batches or all_finite([*gradients.values()])\n",
        "        is_finite = True\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
    ),
    Mutant(
        "hide_a_dropped_micro_batch",
        "        self.last_event = (False, False, not is_finite, self.last_event[3])\n",
        "        self.last_event = (False, False, False, self.last_event[3])\n",
        SUITE + "test_lockstep.py::test_every_event_in_every_state",
    ),
    Mutant(
        "let_the_scaler_grow_each_micro_batch",
        "                scaler.prepare_update(window.state, overflow=False)\n",
        "                pass\n",
        OWN + "test_torch_loss_scale.py::test_window_is_one_scaler_step",
    ),
    Mutant(
        "let_the_scale_move_inside",
        "        if self.scaler.get_scale() != state.loss_scale:\n",
        "        if False:\n",
        OWN + "test_torch_loss_scale.py::test_scale_changes_only_between_windows",
    ),
    Mutant(
        "forget_a_worker_s_overflow",
        "            gradients, weight, overflows > 0, opens > 0, extension_sums\n",
        "            gradients, weight, False, opens > 0, extension_sums\n",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "weigh_all_workers_as_one_item",
        "            gradients, weight, overflows > 0, opens > 0, extension_sums\n",
        "            gradients, 1.0, overflows > 0, opens > 0, extension_sums\n",
        SUITE + "test_workers.py::test_gradient_is_that_of_all_workers",
    ),
    Mutant(
        "reduce_no_sum",
        "        work = dist.all_reduce(packed_totals, group=self.group, async_op=True)\n"
        "        self.works.append(work)\n",
        "",
        SUITE + "test_workers.py::test_gradient_is_that_of_all_workers",
    ),
    Mutant(
        "add_to_a_sum_that_is_being_reduced",
        '            raise unfinished_error("backward()")\n',
        "            return\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="second_pass_after_the_reduction",
    ),
    Mutant(
        "leave_the_others_waiting_after_a_discard",
        "        if reduction is not None and reduction.launch_count:\n",
        "        if False:\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="discarding_worker_is_reported",
    ),
    Mutant(
        "clip_each_stage_by_its_own_norm",
        "        return root_of_sum(norm**2, is_finite, [self.stages], self.device, state)\n",
        "        root_of_sum(norm**2, is_finite, [self.stages], self.device, state)\n"
        "        return norm, is_finite\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="stages_have_one_norm",
    ),
    Mutant(
        "clip_each_expert_by_the_norm_of_its_worker",
        "        if self.norm_groups:\n",
        "        if False:\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="experts_of_one_worker_have_one_norm",
    ),
    Mutant(
        "leave_the_loss_scale",
        "        self.state = self.at_rest(closed_state)\n",
        "        self.state = self.at_rest((*closed_state[:5], ended_state.loss_scale, closed_state[6]))\n",
        SUITE + "test_loss_scale.py::test_scale_after_each_micro_batch",
    ),
    Mutant(
        "weigh_no_micro_batch_of_a_large_batch",
        "    destination.add_loss(loss, micro_batch.weight, micro_batch.factor)\n",
        "    destination.add_loss(loss, 1.0, micro_batch.factor)\n",
        SUITE + "test_one_call_window.py::test_options_hold_for_a_split_window",
    ),
    Mutant(
        "leave_the_model_as_a_failed_call_left_it",
        "            self._random_state.put_back()\n            self.buffers.put_back()\n",
        "            pass\n",
        OWN + "test_torch_auto_size.py::test_error_leaves_everything",
    ),
    Mutant(
        "divide_a_short_window_by_steps",
        "            *kit.decide(state, norm, is_finite, options, select, self.largest_number)\n",
        "            *kit.decide(State(*state)._replace(weight=float(options.steps or"
        " state[3])), norm, is_finite, options, select, self.largest_number)\n",
        SUITE + "test_windows.py::test_flush_divides_by_held_weight",
    ),
    Mutant(
        "clip_the_scaled_norm",
        "            *kit.decide(state, norm, is_finite, options, select, self.largest_number)\n",
        "            *kit.decide(State(*state)._replace(loss_scale=1.0), norm, is_finite,"
        " options, select, self.largest_number)\n",
        SUITE + "test_loss_scale.py::test_scale_leaves_no_trace",
    ),
    Mutant(
        "make_skipped_updates",
        "            if decision.apply:\n"
        "                self._make_update(sums, decision.divisor)\n        finally",
        "            self._make_update(sums, decision.divisor)\n        finally",
        SUITE + "test_overflow.py::test_overflow_skips_this_window_only",
    ),
    Mutant(
        "take_an_unscaled_loss",
        "            if is_unscaled or factors - {factor}:\n",
        "            if is_unscaled:\n",
        OWN
        + "test_torch_misuse.py::test_gradients_that_another_optimizer_multiplied_are_refused",
    ),
    Mutant(
        "clear_the_sum_in_mid_window",
        "        if self.holds_sum_in_grad:\n            if self.has_new_gradient:\n"
        '                raise checks.unfinished_error("zero_grad()")\n',
        "        if False:\n            if self.has_new_gradient:\n"
        '                raise checks.unfinished_error("zero_grad()")\n',
        OWN + "test_torch_loop.py::test_usual_loop_equals_large_batch",
    ),
    Mutant(
        "miss_writes_into_gradients",
        "            return gradient._version != self.version\n",
        "            return False\n",
        OWN + "test_torch_tampering.py::test_change_before_step_is_caught",
    ),
    Mutant(
        "let_the_inner_optimizer_step",
        '    if any(group.get("lr") != 0 for group in inner.param_groups):\n',
        "    if False:\n",
        EVERYDAY + "test_inner_step_is_refused",
    ),
    Mutant(
        "refuse_the_inner_step_for_ever",
        "        weakref.finalize(update, handle.remove).atexit = False\n",
        "        inner.owner = (update, handle)\n",
        EVERYDAY + "test_inner_optimizer_is_free_again",
    ),
    Mutant(
        "wrap_a_wrapped_inner_optimizer",
        "        require_unwrapped(inner)\n",
        "",
        EVERYDAY + "test_second_wrapper_is_refused",
    ),
    Mutant(
        "count_a_step_without_a_pass",
        "            raise checks.no_backward_error()\n",
        "            return\n",
        EVERYDAY + "test_step_without_backward_is_refused",
    ),
    Mutant(
        "ask_for_a_pass_where_other_wrappers_saw_one",
        "            or PASSES[0] != self.passes_before\n",
        "",
        EVERYDAY + "test_pass_through_another_wrapper_stands_for_one",
    ),
    Mutant(
        "take_a_cleared_gradient_for_the_users",
        "            if is_separate and not is_zero(gradient):\n",
        "            if is_separate:\n",
        EVERYDAY + "test_step_without_backward_is_refused",
    ),
    Mutant(
        "wrap_over_gradients",
        "            raise checks.new_parameters_error()\n",
        "            pass\n",
        OWN + "test_torch_tampering.py::test_gradients_before_wrapping_are_refused",
    ),
    Mutant(
        "say_nothing_of_a_divided_loss",
        "        if self._is_divided and len(micro_batch.losses) == 1:\n",
        "        if False:\n",
        EVERYDAY + "test_division_by_the_steps_is_said_once",
    ),
    Mutant(
        "say_nothing_of_a_second_weight",
        "        if is_weighed and micro_batch.is_weighed and micro_batch.has_loss:\n",
        "        if False:\n",
        EVERYDAY + "test_two_weights_before_a_step_are_said_once",
    ),
    Mutant(
        "say_nothing_of_a_replayed_schedule",
        "        elif window.has_just_loaded and updates and self._is_at_beginning():\n",
        "        elif False:\n",
        EVERYDAY + "test_scheduler_that_is_replayed_by_hand_is_said_once",
    ),
    Mutant(
        "say_nothing_of_leftovers",
        "        elif self._steps == 2:\n",
        "        elif False:\n",
        EVERYDAY + "test_leftovers_are_said_once",
    ),
    Mutant(
        "take_two_losses_for_leftovers",
        "        if passes < 3 or passes != micro_batch.window_size:\n",
        "        if passes < 2 or passes != micro_batch.window_size:\n",
        EVERYDAY + "test_several_losses_of_a_micro_batch_say_nothing",
    ),
    Mutant(
        "take_every_micro_batch_for_weighed",
        "        self.sizes.weighed = micro_batch.is_weighed\n",
        "        self.sizes.weighed = True\n",
        EVERYDAY + "test_unequal_sizes_without_weights_are_said_once",
    ),
    Mutant(
        "let_sum_per_item_divide_by_ones",
        "        return float(kit.given_weight(None, self.use_of_weights))\n",
        "        return 1.0\n",
        OWN + "test_torch_weigh.py::test_sum_per_item_asks_for_a_weight_of_every_loop",
    ),
    Mutant(
        "take_all_new_gradients_for_ones_own",
        "            if not owns_memory(gradient):\n",
        "            if False:\n",
        OWN + "test_torch_static_memory.py",
    ),
    Mutant(
        "forget_a_weight_at_zero_grad",
        "            self.weigh(weight)\n",
        "            pass\n",
        OWN + "test_torch_weigh.py::test_weigh_is_the_weight_of_a_loss_too",
    ),
    Mutant(
        "add_a_mean_unweighed",
        "            if is_unscaled or factors - {factor}:\n",
        "            if is_unscaled or factors - {1.0, factor}:\n",
        OWN + "test_torch_weigh.py::test_weigh_beside_a_plain_mean_is_refused",
    ),
    Mutant(
        "let_the_rates_move",
        "        elif self._rates not in (None, rates):\n",
        "        elif False:\n",
        EVERYDAY + "test_ungated_scheduler_is_said_once",
    ),
    Mutant(
        "move_statistics_in_both_passes",
        "    random_state_after.put_back()\n    buffers_after.put_back()\n    return value\n",
        "    random_state_after.put_back()\n    return value\n",
        OWN + "test_torch_coupled.py::test_statistics_move_once",
    ),
    Mutant(
        "take_the_hooks_of_compiled_code_for_granted",
        "        if before.notes_calls:\n",
        "        if False:\n",
        OWN
        + "test_torch_large_batch_counts.py::test_compiled_statistics_move_once_or_are_refused",
    ),
    Mutant(
        "write_over_a_micro_batchs_aux",
        "    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf\n",
        "    return leaf.detach() if isinstance(leaf, Tensor) else leaf\n",
        OWN + "test_torch_static_memory.py::test_aux_is_copied",
    ),
    Mutant(
        "draw_other_numbers_as_a_layer_runs_again",
        "            layer_pass.random_state.put_back()\n",
        "",
        OWN + "test_torch_layered.py::test_same_bits_as_without_layers",
        "ignore-within",
    ),
    Mutant(
        "move_buffers_as_a_layer_runs_again",
        "            layer_pass.buffers.put_back()\n",
        "",
        OWN + "test_torch_layered.py::test_buffers_that_two_layers_and_the_loss_share",
    ),
    Mutant(
        "leave_statistics_where_the_second_run_left_them",
        "        random_state_after.put_back()\n        buffers_after.put_back()\n",
        "        random_state_after.put_back()\n",
        OWN + "test_torch_layered.py::test_same_bits_as_without_layers",
        "ignore-within",
    ),
    Mutant(
        "update_a_shared_parameter_at_its_last_layer",
        "        return self._first_layers.get(id(parameter), 0) >= index\n",
        "        return self._first_layers.get(id(parameter), 0) >= 0\n",
        OWN + "test_torch_layered.py::test_equals_the_large_batch",
    ),
    Mutant(
        "free_a_layers_gradient_at_the_end",
        "        if index and is_trained and self._updates_layers:\n",
        "        if index > 99 and is_trained and self._updates_layers:\n",
        OWN + "test_torch_recipes.py::test_recipe",
        only="memory",
    ),
    Mutant(
        "go_on_after_some_layers_were_updated",
        "            self._window.update.is_broken = True\n            error.add_note(\n",
        "            error.add_note(\n",
        OWN
        + "test_torch_layered.py::test_error_after_an_update_names_the_layers_and_asks_for_a_load",
    ),
    Mutant(
        "add_a_layers_small_gradients_in_half_precision",
        "            gradient_sum.adds_at_once = True\n",
        "            pass\n",
        OWN + "test_torch_layered.py::test_same_bits_as_without_layers",
        "True-clip",
    ),
    Mutant(
        "take_a_gradient_that_somebody_holds",
        "        return gradient.detach().to(dtype, copy=True)\n",
        "        return gradient.detach().to(dtype)\n",
        OWN
        + "test_torch_separate_sums.py::test_gradient_that_somebody_holds_stays_as_it_is",
    ),
)
