"""The torch adapter's mutants."""

from __future__ import annotations

from .planting import OWN, SUITE, Mutant

MUTANTS = (
    Mutant(
        "keep_the_sum_of_a_closed_window",
        "        through(self.strategy.window_ended)\n",
        "",
        SUITE + "test_lockstep.py::test_long_random_sequences",
    ),
    Mutant(
        "keep_the_sum_of_all_workers",
        "        through(self.strategy.window_ended)\n        self._workers_ended()\n",
        "        through(self.strategy.window_ended)\n",
        SUITE + "test_workers_windows.py::test_full_windows_need_no_flush",
    ),
    Mutant(
        "go_on_with_a_micro_batch_that_is_not_counted",
        ("    ) -> None:\n        begin()\n"),
        "    ) -> None:\n",
        SUITE + "test_interrupted.py::test_end_of_a_window",
    ),
    Mutant(
        "go_on_with_a_window_that_is_not_cleared",
        "        if self.progress is not Progress.NOT_BEGUN:\n            raise half",
        "        if self.progress is Progress.HALF_MADE:\n            raise half",
        SUITE + "test_interrupted.py::test_end_of_a_window",
    ),
    Mutant(
        "swap_divisor_and_unclipped",
        "                    self.strategy, decision.divisor, verdict.unclipped, verdict.strayed\n",
        "                    self.strategy, verdict.unclipped, decision.divisor, verdict.strayed\n",
        SUITE + "test_clipping.py::test_gradient_is_clipped_to_limit",
    ),
    Mutant(
        "ignore_the_weight_of_the_loss",
        "factored = scaled(loss, weight, self._fields",
        "factored = scaled(loss, 1.0, self._fields",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "count_each_weight_as_one",
        "            kit.accumulate(fields, weight, finite, kit.select),\n",
        "            kit.accumulate(fields, 1.0, finite, kit.select),\n",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "sum_half_precision_in_itself",
        "return torch.float32 if own in HALF else own",
        "return own",
        SUITE + "test_half_precision.py::test_sum_is_float32",
    ),
    Mutant(
        "take_every_sum_for_finite",
        (
            "            measured.finite\n"
            "            and (not self._measures or self.strategy.fits(measured.norm, unclipped)),\n"
        ),
        "            (not self._measures or self.strategy.fits(measured.norm, unclipped)),\n",
        SUITE + "test_overflow.py::test_overflow_skips_this_window_only",
    ),
    Mutant(
        "forget_what_float16_holds",
        (
            "        norm, finite = (\n"
            "            measured.norm,\n"
            "            measured.finite\n"
            "            and (not self._measures or self.strategy.fits(measured.norm, unclipped)),\n"
            "        )\n"
        ),
        "        norm, finite = measured.norm, measured.finite\n",
        SUITE + "test_half_precision.py::test_sum_at_the_edge_of_float16",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "        self._set(kit.discard(self._fields), self._last.grad_norm)\n",
        "",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_sum_at_discard",
        "        self.strategy.clear()\n        self.update.forget()\n       "
        " self._workers",
        "        self.update.forget()\n        self._workers",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_model_behind_its_masters",
        "            if self._parameters.masters:\n               "
        " through(self._parameters.round)\n",
        "",
        SUITE + "test_master_weights.py::test_small_updates_add_up",
    ),
    Mutant(
        "miss_what_others_wrote_into_the_model",
        "        if strayed:\n            self._parameters.take_over()\n",
        "",
        OWN + "test_torch_masters.py::test_write_through_data_reaches_the_masters",
    ),
    Mutant(
        "save_no_sum",
        "            for index, total in saved.sums.items()\n",
        "            for index, total in ()\n",
        SUITE + "test_checkpoint.py::test_resume_in_every_mode",
    ),
    Mutant(
        "save_no_loss",
        '"loss": saved.known.loss',
        '"loss": 0.0',
        SUITE + "test_knowledge.py::test_open_window_keeps_its_loss_when_saved",
    ),
    Mutant(
        "move_the_scheduler_each_micro_batch",
        "        if updates > moved.updates:\n",
        "        if True:\n",
        OWN + "test_torch_scheduler.py::test_gated_scheduler_moves_once_per_update",
    ),
    Mutant(
        "leave_followers_behind",
        "        for scheduler in self.schedulers:\n            scheduler.follow()\n",
        "",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "forget_a_change_before_an_addition",
        "            self.watch.known = seen(self.watch.known, Event.CHANGED,"
        " change)\n",
        "            pass\n",
        OWN + "test_torch_tampering.py::test_change_after_step_is_caught",
    ),
    Mutant(
        "move_gradients_late",
        "if living is not None and not living.keeps_micro_batch_apart:",
        "if living is None:",
        OWN + "test_torch_half_precision.py::test_peak_is_sum_and_one_gradient",
    ),
    Mutant(
        "add_what_is_dropped",
        "        elif finite:\n            self._add_one_by_one(filled, begin)\n",
        "        elif True:\n            self._add_one_by_one(filled, begin)\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
    ),
    Mutant(
        "hide_a_dropped_micro_batch",
        "self._last = Last(False, False, not finite,",
        "self._last = Last(False, False, False,",
        SUITE + "test_lockstep.py::test_every_event_in_every_state",
    ),
    Mutant(
        "leave_a_sum_divided_when_taken_back",
        "            if divided:\n                arithmetic.multiply([held],"
        " divisor)\n",
        "",
        OWN + "test_torch_interrupted.py::test_raising_pre_hook_leaves_window_open",
    ),
    Mutant(
        "let_the_scaler_grow_each_micro_batch",
        "        if not ended:\n            self._hold()\n",
        "",
        OWN + "test_torch_loss_scale.py::test_window_is_one_scaler_step",
    ),
    Mutant(
        "let_the_scale_move_inside",
        "(start, moved | (now[0] != start[0]))",
        "(start, moved)",
        OWN + "test_torch_loss_scale.py::test_scale_changes_only_between_windows",
    ),
    Mutant(
        "forget_a_worker_s_overflow",
        (
            "                (\n"
            "                    *marks,\n"
            "                    1,\n"
            "                    fields.overflow,\n"
            "                    fields.micro_step > 0,\n"
            "                    flushing,\n"
            "                    *flags,\n"
            "                    *present,\n"
            "                )\n"
        ),
        "                (*marks, 1, False, fields.micro_step > 0, flushing, *flags, *present)\n",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "reduce_small_sums_alone",
        "        reduced = all_reduce(list(left.values()), self.group, apart) if left"
        " else list\n",
        "        reduced = left.values\n",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "measure_gradients_that_the_user_has_replaced",
        "        self.pack()\n        cleared = flushing",
        "        cleared = flushing",
        OWN
        + "test_torch_mirror.py::test_gradients_that_the_user_replaces_after_a_failed_update_are_the_window_s",
    ),
    Mutant(
        "take_copies_of_an_expert_for_equal",
        "        if not norms:\n            return\n        apart = []",
        "        return\n        apart = []",
        OWN + "test_torch_workers.py::test_two_workers",
        only="copies_of_an_expert",
    ),
    Mutant(
        "leave_out_a_backward_pass_that_others_wait_for",
        "            checks.require_no_collective(loss)\n",
        "            pass\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="context_parallel_tokens_weigh",
    ),
    Mutant(
        "leave_a_new_worker_s_parameters",
        "            dist.broadcast(parameter, source, group=self.group)\n",
        "            pass\n",
        OWN + "test_torch_workers.py::test_two_workers",
        only="a_worker_leaves_and_one_joins",
    ),
    Mutant(
        "add_up_weights_that_the_sum_rounds",
        "(sparse, not is_exact(fields.weight), ",
        "(sparse, False, ",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "weigh_all_workers_as_one_item",
        "        sums[0],\n",
        "        1.0,\n",
        SUITE + "test_workers.py::test_gradient_is_that_of_all_workers",
    ),
    Mutant(
        "leave_the_loss_scale",
        "after = close(ended, decision.apply, decision.overflow, options, kit.select)",
        "after = State(*close(ended, decision.apply, decision.overflow, options,"
        " kit.select))._replace(loss_scale=ended.loss_scale)",
        SUITE + "test_loss_scale.py::test_scale_stops_at_floor",
    ),
    Mutant(
        "weigh_no_micro_batch_of_a_large_batch",
        "        collector.add(loss, micro_batch.weight, contribution)",
        "        collector.add(loss, 1.0, contribution)",
        SUITE + "test_one_call_window.py::test_options_hold_for_a_split_window",
    ),
    Mutant(
        "leave_the_model_as_a_failed_call_left_it",
        "        if not destination.delivered:\n            before.put_back()\n       "
        " raise\n",
        "        raise\n",
        OWN + "test_torch_large_batch_window.py::test_error_leaves_everything",
    ),
    Mutant(
        "divide_a_short_window_by_steps",
        "            *kit.decide(divided, norm, finite, options, kit.select, self._plan.largest)\n",
        (
            "            *kit.decide(\n"
            "                divided._replace(weight=float(self._options.steps or fields.weight)),\n"
            "                norm,\n"
            "                finite,\n"
            "                options,\n"
            "                kit.select,\n"
            "                self._plan.largest,\n"
            "            )\n"
        ),
        SUITE + "test_windows.py::test_flush_in_every_mode",
    ),
    Mutant(
        "clip_the_scaled_norm",
        "            *kit.decide(divided, norm, finite, options, kit.select, self._plan.largest)\n",
        (
            "            *kit.decide(\n"
            "                divided._replace(loss_scale=1.0),\n"
            "                norm,\n"
            "                finite,\n"
            "                options,\n"
            "                kit.select,\n"
            "                self._plan.largest,\n"
            "            )\n"
        ),
        SUITE + "test_loss_scale.py::test_scale_leaves_no_trace",
    ),
    Mutant(
        "make_skipped_updates",
        "            if decision.apply:\n                self.update.make(",
        "            if True:\n                self.update.make(",
        SUITE + "test_overflow.py::test_overflow_skips_this_window_only",
    ),
    Mutant(
        "take_an_unscaled_loss",
        (
            "        if (scales and not self.given) or (\n"
            "            self.is_plain and (factor != 1 or self.weight == 0)\n"
            "        ):\n"
        ),
        "        if self.is_plain and (factor != 1 or self.weight == 0):\n",
        OWN + "test_torch_misuse.py::test_unscaled_backward_is_refused",
    ),
    Mutant(
        "clear_the_sum_in_mid_window",
        "        if first or self.keeps_micro_batch_apart:\n           "
        " self._parameters.zero_grad",
        "        if True:\n            self._parameters.zero_grad",
        OWN + "test_torch_loop.py::test_usual_loop_equals_large_batch",
    ),
    Mutant(
        "miss_writes_into_gradients",
        (
            "            if gradient is not watched.gradient or (\n"
            "                gradient is not None and gradient._version != watched.version\n"
            "            ):\n"
        ),
        "            if gradient is not watched.gradient:\n",
        OWN + "test_torch_watch.py::test_clip_is_seen_without_the_smallest",
    ),
    Mutant(
        "divide_in_a_kernel_of_another_dtype",
        (
            "            if (\n"
            "                fused\n"
            "                and can_divide(self._inner, divisor)\n"
            "                and strategy.hands_over_whole()\n"
            "                and not self._before\n"
            "            ):\n"
        ),
        "            if fused and can_divide(self._inner, divisor) and not self._before:\n",
        OWN + "test_torch_fused.py::test_wider_sum_is_divided_before_it_is_narrowed",
    ),
    Mutant(
        "let_the_inner_optimizer_step",
        "        if update is not None and update.progress is not Progress.RUNS:\n",
        "        if False:\n",
        OWN + "test_torch_everyday.py::test_inner_step_is_refused",
    ),
    Mutant(
        "refuse_the_inner_step_for_ever",
        "    weakref.finalize(update, handle.remove).atexit = False\n",
        "    inner.owner = update\n",
        OWN + "test_torch_everyday.py::test_inner_optimizer_is_free_again",
    ),
    Mutant(
        "divide_first_beside_the_guard",
        (
            "    hooked = any(not hook.__module__"
            '.startswith("gradaccum_torch.") for hook in hooks)\n'
        ),
        "    hooked = any(hooks)\n",
        OWN + "test_torch_fused.py",
    ),
    Mutant(
        "wrap_a_wrapped_inner_optimizer",
        "        update.require_unwrapped(inner)\n",
        "",
        OWN + "test_torch_everyday.py::test_second_wrapper_is_refused",
    ),
    Mutant(
        "count_a_step_without_a_pass",
        "        raise checks.no_backward_error()\n",
        "        return\n",
        OWN + "test_torch_everyday.py::test_step_without_backward_is_refused",
    ),
    Mutant(
        "ask_for_a_pass_where_other_wrappers_saw_one",
        (
            "        if (\n"
            "            known.given is Given.TO_BACKWARD\n"
            "            or known.weighed\n"
            "            or PASSES[0] != self._passes\n"
            "            or self._holds_users()\n"
            "        ):\n"
        ),
        "        if known.given is Given.TO_BACKWARD or known.weighed or self._holds_users():\n",
        OWN
        + "test_torch_everyday.py::test_pass_through_another_wrapper_stands_for_one",
    ),
    Mutant(
        "take_a_cleared_gradient_for_the_users",
        "            if apart and holds_numbers(gradient):\n",
        "            if apart:\n",
        OWN + "test_torch_everyday.py::test_step_without_backward_is_refused",
    ),
    Mutant(
        "wrap_over_gradients",
        "    if not _filled(parameters):\n        return\n    gc",
        "    if True:\n        return\n    gc",
        OWN + "test_torch_tampering.py::test_gradients_before_wrapping_are_refused",
    ),
    Mutant(
        "leave_the_sum_of_a_dead_wrapper",
        "        weakref.finalize(self, self.watch.drop, self._hooks).atexit = False\n",
        "",
        OWN + "test_torch_tampering.py::test_sum_of_a_dead_wrapper_goes_with_it",
    ),
    Mutant(
        "say_nothing_of_a_divided_loss",
        "            if len(known.losses) == 1:\n",
        "            if False:\n",
        OWN + "test_torch_everyday.py::test_division_by_the_steps_is_said_once",
    ),
    Mutant(
        "say_nothing_of_a_second_weight",
        "            given is not None and known.weighed and watch.known.given\n",
        "            False\n",
        OWN + "test_torch_everyday.py::test_two_weights_before_a_step_are_said_once",
    ),
    Mutant(
        "say_nothing_of_a_changed_model",
        "        if self._parameters.sample.is_changed():\n",
        "        if False:\n",
        OWN
        + "test_torch_everyday.py::test_change_of_the_model_in_a_window_is_said_once",
    ),
    Mutant(
        "say_nothing_of_a_replayed_schedule",
        "        elif self._is_replayed():\n",
        "        elif False:\n",
        OWN
        + "test_torch_everyday.py"
        + "::test_scheduler_that_is_replayed_by_hand_is_said_once",
    ),
    Mutant(
        "say_nothing_of_leftovers",
        "        if suspect and second == [first] and share_loop(first[0], step):\n",
        "        if False:\n",
        OWN + "test_torch_everyday.py::test_leftovers_are_said_once",
    ),
    Mutant(
        "take_every_micro_batch_for_weighed",
        "        self.sizes.weighed = known.weighed\n",
        "        self.sizes.weighed = True\n",
        OWN
        + "test_torch_everyday.py::test_unequal_sizes_without_weights_are_said_once",
    ),
    Mutant(
        "take_losses_in_a_loop_for_leftovers",
        "        if suspect and second == [first] and share_loop(first[0], step):\n",
        "        if suspect and second == [first]:\n",
        OWN
        + "test_torch_everyday.py::test_several_losses_of_a_micro_batch_say_nothing",
    ),
    Mutant(
        "let_sum_per_item_divide_by_ones",
        "        if not known.weighed and self._use_of_weights is not None:\n",
        "        if False:\n",
        OWN + "test_torch_weigh.py::test_sum_per_item_asks_for_a_weight_of_every_loop",
    ),
    Mutant(
        "remember_zeros_that_were_freed",
        (
            "            if (\n"
            "                not set_to_none\n"
            "                or self.watch.known is not NOTHING_SEEN\n"
            "                or self.watch.holds\n"
            "            ):\n"
        ),
        "            if not set_to_none or self.watch.known is not NOTHING_SEEN:\n",
        OWN + "test_torch_loop.py::test_zeros_that_were_freed_are_forgotten",
    ),
    Mutant(
        "take_all_new_gradients_for_ones_own",
        (
            "            if (\n"
            "                gradient is not None\n"
            "                and gradient is watched.gradient\n"
            "                and not owns_memory(gradient)\n"
            "            ):\n"
        ),
        "            if gradient is not None and gradient is watched.gradient and False:\n",
        OWN + "test_torch_static_memory.py",
    ),
    Mutant(
        "forget_a_weight_at_zero_grad",
        "self.watch.reset(self.watch.known.cleared())",
        "self.watch.reset()",
        OWN + "test_torch_weigh.py::test_weigh_is_the_weight_of_a_loss_too",
    ),
    Mutant(
        "add_a_mean_unweighed",
        "        if not self.given and self.arrived and factor != 1:\n",
        "        if False:\n",
        OWN + "test_torch_weigh.py::test_weigh_beside_a_plain_mean_is_refused",
    ),
    Mutant(
        "let_the_rates_move",
        "        if not first and self._begun.rates not in (None,"
        " self.update.rates()):\n",
        "        if False:\n",
        OWN + "test_torch_everyday.py::test_ungated_scheduler_is_said_once",
    ),
    Mutant(
        "blame_a_gated_scheduler",
        "        self._scheduler.step(*args, **kwargs)\n       "
        " self._scheduler.optimizer._window.forget_rates()\n",
        "        self._scheduler.step(*args, **kwargs)\n",
        OWN
        + "test_torch_everyday.py::test_rates_that_move_between_windows_say_nothing",
    ),
    Mutant(
        "take_a_clear_for_a_clip",
        "            return Change.CLEARED\n",
        "            return Change.WRITTEN\n",
        OWN + "test_torch_everyday.py::test_change_of_grad_names_its_likeliest_cause",
    ),
    Mutant(
        "keep_a_denominator_after_an_error",
        "        return Verdict(fields, decision,",
        "        return Verdict(divided, decision,",
        OWN
        + "test_torch_weigh.py::test_update_that_raised_keeps_the_weight_beside_a_denominator",
    ),
    Mutant(
        "scale_no_sharded_loss",
        "        scale = upstream / sums[0]\n",
        "        upstream = torch.ones_like(upstream)\n        scale = upstream /"
        " sums[0]\n",
        SUITE + "test_workers_classes.py::test_loss_is_that_of_all_classes",
    ),
    Mutant(
        "clip_each_stage_by_its_own_norm",
        "            norm, finite = self.workers.stages.agreed(",
        "            _, finite = self.workers.stages.agreed(",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "count_a_tied_parameter_on_every_stage",
        "                    (a / largest) ** 2 - (b / largest) ** 2\n",
        "                    (a / largest) ** 2 + 0 * b\n",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "leave_survivors_one_update_apart",
        "        if min(counts) == most:\n            return None\n",
        "        return None\n",
        OWN + "test_torch_turns.py::test_interleavings",
    ),
    Mutant(
        "draw_other_numbers_as_a_layer_runs_again",
        "        if each.random is not None:\n            each.random.put_back()\n",
        "",
        OWN + "test_torch_layered.py::test_gradient_has_the_same_bits",
        "dtype0-within",
    ),
    Mutant(
        "move_buffers_as_a_layer_runs_again",
        (
            "        with (\n"
            "            nullcontext()\n"
            "            if each.surroundings is None\n"
            "            else each.surroundings.second_run()\n"
            "        ):\n"
        ),
        "        with nullcontext() if each else nullcontext():\n",
        OWN + "test_torch_layered.py::test_gradient_has_the_same_bits",
        "dtype0-within",
    ),
    Mutant(
        "update_a_shared_parameter_at_its_last_layer",
        (
            "                layer.index,\n"
            "                lambda parameter: self._first.get(id(parameter), 0) >= layer.index,\n"
        ),
        "                layer.index, lambda parameter: self._first.get(id(parameter), 0) >= 0\n",
        OWN + "test_torch_layered.py::test_equals_the_large_batch",
    ),
    Mutant(
        "go_on_after_some_layers_were_updated",
        "        if self._parts:\n            self._window.update.leave_half_made()\n",
        "",
        OWN
        + "test_torch_layered.py::test_error_after_an_update_names_the_layers_and_asks_for_a_load",
    ),
    Mutant(
        "write_into_the_model_of_layers_to_come",
        (
            "        with self._parameters.only(\n"
            "            each for each, due in zip(positions, now, strict=True) if due\n"
            "        ):\n"
        ),
        "        with self._parameters.only(positions):\n",
        OWN + "test_torch_layered.py::test_updates_have_the_same_bits",
        "True-ignore-kept",
    ),
    Mutant(
        "add_a_layers_small_gradients_in_half_precision",
        (
            "        if (\n"
            "            self.watch.allowed is Allowed.ALL\n"
            "            # Nothing need be noticed, and no `take` may come before the next\n"
            "            # micro-batch arrives.\n"
            "        ):\n"
        ),
        (
            "        # Nothing need be noticed, and no `take` may come before the next micro-batch\n"
            "        # arrives.\n"
            "        if False:\n"
        ),
        OWN + "test_torch_layered.py::test_updates_have_the_same_bits",
        "True-clip-within",
    ),
    Mutant(
        "free_a_layers_gradient_at_the_end",
        "        if self._collector.by_parts and layer.is_trained and layer.index:\n",
        "        if self._collector.by_parts and layer.is_trained and layer.index >"
        " 99:\n",
        OWN + "test_torch_layered.py::test_one_layer_of_gradients_is_alive",
    ),
    Mutant(
        "recompute_borders_from_the_wrong_layer",
        "self._layers[index - index % self._every : index]",
        "self._layers[max(index - 1, 0) : index]",
        OWN + "test_torch_layered.py::test_gradient_has_the_same_bits",
        "dtype0-borders",
    ),
    Mutant(
        "reduce_a_shared_unit_at_each_layer",
        "            (unit, min(index for index, own in enumerate(self._units) if unit in own))\n",
        "            (unit, max(index for index, own in enumerate(self._units) if unit in own))\n",
        OWN + "test_torch_layered_workers.py::test_two_workers",
        "sharded_whole_model_in_two_layers",
    ),
    Mutant(
        "take_a_gradient_that_somebody_holds",
        "sums=list(map(Tensor.clone, gradients))",
        "sums=gradients",
        OWN
        + "test_torch_separate_sums.py::test_gradient_that_somebody_holds_stays_as_it_is",
    ),
    Mutant(
        "measure_the_usual_gradients_alone",
        "return self._replace(sums=(), packed=None)",
        "return self._replace(sums=())",
        OWN
        + "test_torch_separate_sums.py::test_micro_batch_that_brings_other_gradients_than_those_before",
    ),
    Mutant(
        "overlook_a_late_second_pass",
        "                if known.arrived:\n                   "
        " watch.expect_passes(parameter)\n",
        "",
        OWN
        + "test_torch_static_memory.py::test_second_pass_that_no_micro_batch_of_the_first_window_had",
    ),
    Mutant(
        "add_no_gradient_that_comes_later_in_the_window",
        " or any(each.grad is not None for each in self.others)",
        "",
        OWN
        + "test_torch_separate_sums.py::test_micro_batch_that_brings_other_gradients_than_those_before",
    ),
)
