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
        "        self._workers.window_ended()\n        self.strategy.watch.window_ended()\n",
        "        self.strategy.watch.window_ended()\n",
        SUITE + "test_workers_windows.py::test_full_windows_need_no_flush",
    ),
    Mutant(
        "swap_divisor_and_unclipped",
        "decision.divisor, verdict.unclipped, verdict.strayed",
        "verdict.unclipped, decision.divisor, verdict.strayed",
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
        "self._fields = at_rest(accumulate(fields, weight, finite, select)",
        "self._fields = at_rest(accumulate(fields, 1.0, finite, select)",
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
        "finite = measured.finite and (not",
        "finite = (not",
        SUITE + "test_overflow.py::test_overflow_skips_this_window_only",
    ),
    Mutant(
        "forget_what_float16_holds",
        "finite = measured.finite and (not self._measures or self.strategy.fits(measured.norm, unclipped))",
        "finite = measured.finite",
        SUITE + "test_half_precision.py::test_sum_at_the_edge_of_float16",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "        self._set(discard(self._fields))\n",
        "",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_sum_at_discard",
        "        self.strategy.clear()\n        self.update.half_made",
        "        self.update.half_made",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_model_behind_its_masters",
        "            if self._parameters.has_masters:\n                through(self._parameters.round)\n",
        "",
        SUITE + "test_master_weights.py::test_small_updates_add_up",
    ),
    Mutant(
        "miss_what_others_wrote_into_the_model",
        "        if strayed:\n            self._parameters.take_over()\n",
        "",
        OWN + "test_torch_masters_outside.py::test_write_through_data_reaches_the_masters",
    ),
    Mutant(
        "save_no_sum",
        '"sums": {index: _savable(total) for index, total in saved.sums.items()}',
        '"sums": {}',
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
        "        if updates > self._stepped_at:\n",
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
        "            self.watch.known, self.watch.change = seen(self.watch.known, Event.CHANGED), self.watch.change or change\n",
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
        "            if finite:\n                self._absorb(parameter)\n",
        "            if True:\n                self._absorb(parameter)\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
    ),
    Mutant(
        "hide_a_dropped_micro_batch",
        "self._event = NOTHING_CLOSED if finite else _DROPPED",
        "self._event = NOTHING_CLOSED",
        SUITE + "test_lockstep.py::test_every_event_in_every_state",
    ),
    Mutant(
        "leave_a_sum_divided_when_taken_back",
        "            if divided:\n                multiply([held], divisor)\n",
        "",
        OWN + "test_torch_interrupted.py::test_raising_pre_hook_leaves_window_open",
    ),
    Mutant(
        "let_the_scaler_grow_each_micro_batch",
        "        if self._ended is None:\n            self._hold()\n        else:\n",
        "        if self._ended is not None:\n",
        OWN + "test_torch_loss_scale.py::test_window_is_one_scaler_step",
    ),
    Mutant(
        "let_the_scale_move_inside",
        "            self._moved = self._moved | (self._now()[0] != self._start[0])\n",
        "            pass\n",
        OWN + "test_torch_loss_scale.py::test_scale_changes_only_between_windows",
    ),
    Mutant(
        "forget_a_worker_s_overflow",
        "return [*parts, fields.overflow, fields.micro_step",
        "return [*parts, 0.0, fields.micro_step",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "reduce_small_sums_alone",
        "        all_reduce([total for index, total in rest if",
        "        (lambda *_: None)([total for index, total in rest if",
        OWN + "test_torch_workers.py::test_two_workers",
    ),
    Mutant(
        "weigh_by_the_first_worker",
        "Numbers(math.fsum(values[::each])",
        "Numbers(values[0]",
        SUITE + "test_workers.py::test_gradient_is_that_of_all_workers",
    ),
    Mutant(
        "keep_the_noise_of_a_discarded_window",
        "        self._noise = Noise(*forget_window(self._noise))\n",
        "",
        SUITE + "test_knowledge.py::test_noise_scale_ignores_lost_windows",
    ),
    Mutant(
        "count_one_first_micro_batch",
        "            self._firsts = int(count)\n",
        "",
        SUITE + "test_workers_knowledge.py::test_noise_scale_is_that_of_all_workers",
    ),
    Mutant(
        "leave_the_loss_scale",
        "after = close(ended, decision.apply, decision.overflow, options, select)",
        "after = State(*close(ended, decision.apply, decision.overflow, options, select))._replace(loss_scale=ended.loss_scale)",
        SUITE + "test_loss_scale.py::test_scale_stops_at_floor",
    ),
    Mutant(
        "weigh_no_micro_batch_of_a_large_batch",
        "collector.add(loss, micro_batch.weight, contribution)",
        "collector.add(loss, 1.0, contribution)",
        SUITE + "test_one_call_window.py::test_options_hold_for_a_split_window",
    ),
    Mutant(
        "leave_the_model_as_a_failed_call_left_it",
        (
            "            if not collector.delivered():\n"
            "                before.put_back()\n"
            "            raise\n"
            "        collector.flush()\n"
            "        return returned\n"
            "\n"
            "    def _accumulate(self, micro"
        ),
        "            raise\n        collector.flush()\n        return returned\n\n    def _accumulate(self, micro",
        OWN + "test_torch_large_batch_interrupted.py::test_error_leaves_everything",
    ),
    Mutant(
        "divide_a_short_window_by_steps",
        "Decision(*decide(divided, measured.norm,",
        "Decision(*decide(divided._replace(weight=float(self._options.steps or fields.weight)), measured.norm,",
        SUITE + "test_windows.py::test_flush_in_every_mode",
    ),
    Mutant(
        "clip_the_scaled_norm",
        "Decision(*decide(divided, measured.norm,",
        "Decision(*decide(divided._replace(loss_scale=1.0), measured.norm,",
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
        "        if (scales and not self.given) or (self.is_plain",
        "        if (self.is_plain",
        OWN + "test_torch_misuse.py::test_unscaled_backward_is_refused",
    ),
    Mutant(
        "clear_the_sum_in_mid_window",
        "        if first or self.keeps_micro_batch_apart:\n            self._parameters.zero_grad",
        "        if True:\n            self._parameters.zero_grad",
        OWN + "test_torch_loop.py::test_usual_loop_equals_large_batch",
    ),
    Mutant(
        "miss_writes_into_gradients",
        "if gradient is not watched.gradient or (gradient is not None and gradient._version != watched.version):",
        "if gradient is not watched.gradient:",
        OWN + "test_torch_watch.py::test_clip_is_seen_without_the_smallest",
    ),
    Mutant(
        "divide_in_a_kernel_of_another_dtype",
        "can_divide(self._inner, divisor) and strategy.hands_over_whole()",
        "can_divide(self._inner, divisor)",
        OWN + "test_torch_fused.py::test_wider_sum_is_divided_before_it_is_narrowed",
    ),
    Mutant(
        "let_the_inner_optimizer_step",
        "        if update is not None and not update.runs:\n",
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
        "any(type(hook) is not _Guard for hook in step_pre_hooks(inner).values())",
        "bool(step_pre_hooks(inner))",
        OWN + "test_torch_fused.py",
    ),
    Mutant(
        "wrap_a_wrapped_inner_optimizer",
        "        require_unwrapped(self._inner)\n",
        "",
        OWN + "test_torch_everyday.py::test_second_wrapper_is_refused",
    ),
    Mutant(
        "count_a_step_without_a_pass",
        "        raise no_backward_error()\n",
        "        return\n",
        OWN + "test_torch_everyday.py::test_step_without_backward_is_refused",
    ),
    Mutant(
        "ask_for_a_pass_where_other_wrappers_saw_one",
        "known.weighed or PASSES[0] != self._passes or",
        "known.weighed or",
        OWN + "test_torch_everyday.py::test_pass_through_another_wrapper_stands_for_one",
    ),
    Mutant(
        "take_a_cleared_gradient_for_the_users",
        "            if apart and bool(local(elements(gradient)).any()):\n",
        "            if apart:\n",
        OWN + "test_torch_everyday.py::test_step_without_backward_is_refused",
    ),
    Mutant(
        "say_nothing_of_leftovers",
        "        elif places == before and share_loop(places[0], step):\n",
        "        elif False:\n",
        OWN + "test_torch_everyday.py::test_leftovers_are_said_once",
    ),
    Mutant(
        "take_losses_in_a_loop_for_leftovers",
        "        elif places == before and share_loop(places[0], step):\n",
        "        elif places == before:\n",
        OWN + "test_torch_everyday.py::test_several_losses_of_a_micro_batch_say_nothing",
    ),
    Mutant(
        "let_item_mean_divide_by_ones",
        '        if not known.weighed and self._options.reduction == "item_mean":\n',
        "        if False:\n",
        OWN + "test_torch_everyday.py::test_item_mean_asks_for_a_weight_of_every_loop",
    ),
    Mutant(
        "forget_a_weight_at_zero_grad",
        "self.watch.reset(self.watch.known.cleared())",
        "self.watch.reset()",
        OWN + "test_torch_everyday.py::test_weigh_is_the_weight_of_a_loss_too",
    ),
    Mutant(
        "add_a_mean_unweighed",
        "        if not self.given and self.arrived and factor != 1:\n",
        "        if False:\n",
        OWN + "test_torch_everyday.py::test_weigh_beside_a_plain_mean_is_refused",
    ),
    Mutant(
        "let_the_rates_move",
        "        elif rates != self._rates and self._rates is not None:\n",
        "        elif False:\n",
        OWN + "test_torch_everyday.py::test_ungated_scheduler_is_said_once",
    ),
    Mutant(
        "blame_a_gated_scheduler",
        "        self._scheduler.step(*args, **kwargs)\n        self._scheduler.optimizer._window.forget_rates()\n",
        "        self._scheduler.step(*args, **kwargs)\n",
        OWN + "test_torch_everyday.py::test_rates_that_move_between_windows_say_nothing",
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
        OWN + "test_torch_everyday.py::test_update_that_raised_keeps_the_weight_beside_a_denominator",
    ),
)
