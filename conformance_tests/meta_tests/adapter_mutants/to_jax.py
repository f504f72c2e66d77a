"""The JAX adapter's mutants."""

from __future__ import annotations

from .planting import OWN, SUITE, Mutant

MUTANTS = (
    Mutant(
        "add_without_the_weight",
        "    total = gradient_sum.add(held, gradients, factor, adds, harmless)\n",
        "    total = gradient_sum.add(held, gradients, None, adds, harmless)\n",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "count_each_weight_as_one",
        "counted = with_fields(state, accumulate(fields, weight, finite, jnp.where))",
        "counted = with_fields(state, accumulate(fields, one, finite, jnp.where))",
        SUITE + "test_weights.py::test_gradient_follows_the_definition",
    ),
    Mutant(
        "add_where_nothing_is_to_be_added",
        "return pick(adds, plus(held, weight * gradient), held)",
        "return plus(held, weight * gradient)",
        SUITE + "test_weights.py::test_weight_zero_adds_exactly_nothing",
    ),
    Mutant(
        "sum_half_precision_in_itself",
        'return jnp.dtype("float32") if own.itemsize < 4 else own',
        "return own",
        SUITE + "test_half_precision.py::test_sum_is_float32",
    ),
    Mutant(
        "take_every_micro_batch_for_finite",
        (
            "    finite = (\n"
            "        everywhere(gradient_sum.all_finite(gradients), shard_axes)\n"
            "        if dropping\n"
            "        else jnp.asarray(True)\n"
            "    )\n"
        ),
        "    finite = jnp.asarray(True)\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
    ),
    Mutant(
        "apply_in_mid_window",
        "        jnp.asarray(False),\n",
        "        jnp.asarray(True),\n",
        SUITE + "test_windows.py::test_nothing_moves_between_window_ends",
    ),
    Mutant(
        "apply_what_is_to_be_skipped",
        "together((ended, decision.apply,",
        "together((ended, jnp.asarray(True),",
        SUITE + "test_overflow.py::test_overflow_in_every_mode",
    ),
    Mutant(
        "forget_the_overflow",
        "_closed(whole.fields, decision.apply, decision.overflow, options)",
        "_closed(whole.fields, decision.apply, decision.overflow & False, options)",
        SUITE + "test_loss_scale.py::test_scale_moves_once_per_window",
    ),
    Mutant(
        "close_this_device_s_fields",
        "_closed(whole.fields, decision.apply, decision.overflow, options)",
        "_closed(fields_of(state), decision.apply, decision.overflow, options)",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "emptied = extensions.discard(with_fields(state,"
        " discard_fields(fields_of(state))))",
        "emptied = extensions.discard(state)",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_sum_at_discard",
        (
            "    return with_event(\n"
            "        emptied._replace(accumulator=gradient_sum.clear(state.accumulator)), False, False, False\n"
            "    )\n"
        ),
        "    return with_event(emptied, False, False, False)\n",
        OWN + "test_jax_loop.py::test_discard_leaves_the_state_of_the_start",
    ),
    Mutant(
        "square_in_float32",
        "jnp.square(leaf.astype(np.float64))",
        "jnp.square(leaf)",
        OWN + "test_jax_norm.py::test_norm_of_many_arrays",
    ),
    Mutant(
        "report_no_norm",
        "statistics.close(closed, loss)._replace(last_grad_norm=norm)",
        "statistics.close(closed, loss)",
        SUITE + "test_clipping.py::test_norm_is_reported",
    ),
    Mutant(
        "hide_a_dropped_micro_batch",
        "event, tells = (False, False, dropped),",
        "event, tells = (False, False, False),",
        SUITE + "test_lockstep.py::test_one_sequence_in_every_mode",
    ),
    Mutant(
        "report_an_open_window_as_skipped",
        "event, tells = (False, False, dropped),",
        "event, tells = (False, True, dropped),",
        SUITE + "test_windows.py::test_result_inside_and_at_end",
    ),
    Mutant(
        "close_an_empty_window",
        "            jnp.asarray(state.micro_step) > 0,\n",
        "            jnp.asarray(state.micro_step) >= 0,\n",
        SUITE + "test_windows.py::test_flush_of_empty_window_does_nothing_and_says_so",
    ),
    Mutant(
        "keep_the_event_at_an_empty_flush",
        '            "event": (False, False, False),\n',
        '            "event": (state.last_applied, state.last_skipped, False),\n',
        SUITE + "test_windows.py::test_flush_of_empty_window_does_nothing_and_says_so",
    ),
    Mutant(
        "move_the_parts_beside_at_a_flush",
        "    return _by_part(own, updates, lambda _, leaf: leaf, no_update), new_part(\n"
        "        state, the_state(made)\n"
        "    )\n",
        "    return updates, made\n",
        OWN + "test_jax_combinators.py::test_flush_closes_the_wrapped_part_alone",
    ),
    Mutant(
        "flush_beside_a_state_that_moves",
        "    if follows:\n        _require_no_state_around(state, made)\n",
        "    assert follows in (True, False)\n",
        OWN + "test_jax_combinators.py::test_flush_that_could_be_wrong_is_refused",
    ),
    Mutant(
        "overlook_a_constant_update",
        "        if not read & 1 << place or not results[place]\n",
        "        if not read & 1 << place\n",
        OWN + "test_jax_combinators.py::test_frozen_gradients_in_a_norm_are_refused",
    ),
    Mutant(
        "overlook_a_gradient_that_nobody_reads",
        "        if not read & 1 << place or not results[place]\n",
        "        if not results[place]\n",
        OWN + "test_jax_combinators.py::test_frozen_gradients_in_a_norm_are_refused",
    ),
    Mutant(
        "forget_what_float16_holds",
        "finite = finite & everywhere(fitting, update.shard_axes)",
        "finite = finite | (fitting & False)",
        SUITE + "test_half_precision.py::test_sum_at_the_edge_of_float16",
    ),
    Mutant(
        "go_on_after_the_last_micro_batch",
        "at_end = full if ends_here is None else full | ends_here",
        "at_end = full",
        OWN + "test_jax_everyday.py::test_the_last_window_of_a_loader_ends_in_the_step",
    ),
    Mutant(
        "say_of_no_micro_batch_that_it_is_the_last",
        "        yield held.pop(), True\n",
        "        yield held.pop(), False\n",
        OWN + "test_jax_everyday.py::test_epoch_of_a_loader",
    ),
    Mutant(
        "start_as_one_device",
        "return data_parallel(init, found, axes)(params) if known else init(params)",
        "return init(params)",
        OWN + "test_jax_everyday.py::test_four_devices",
    ),
    Mutant(
        "pass_on_what_nobody_takes",
        "        if near or not taken.any:\n",
        "        if False:\n",
        OWN + "test_jax_everyday.py::test_argument_that_nobody_takes_is_refused",
    ),
    Mutant(
        "divide_by_the_weight_all_the_same",
        "    if denominator is not None:\n        fields,",
        "    if False:\n        fields,",
        SUITE + "test_weights.py::test_denominator_is_chosen_as_the_window_is_closed",
    ),
    Mutant(
        "ask_no_weight_for_a_mean_of_items",
        "        given_weight(weight, use_of_weights(self.options))\n",
        "",
        SUITE + "test_weights.py::test_sum_per_item_asks_for_the_weight",
    ),
    Mutant(
        "divide_a_short_window_by_steps",
        "decide(fields, norm, finite, divides,",
        "decide((*fields[:3], fields[3] * 0 + (options.steps or 1), *fields[4:]), norm,"
        " finite, divides,",
        SUITE + "test_windows.py::test_flush_divides_by_held_weight",
    ),
    Mutant(
        "clip_the_scaled_norm",
        "decide(fields, norm, finite, divides,",
        "decide((*fields[:5], jnp.ones_like(fields[5]), *fields[6:]), norm, finite,"
        " divides,",
        SUITE + "test_loss_scale.py::test_scale_leaves_no_trace",
    ),
    Mutant(
        "ask_no_type_for_its_axes",
        'return frozenset(getattr(mesh, "manual_axes", mesh.axis_names))',
        "return frozenset()",
        SUITE + "test_workers.py::test_gradient_is_that_of_all_workers",
    ),
    Mutant(
        "forget_a_device_s_overflow",
        "own.overflow.astype(own.weight.dtype)",
        "0 * own.weight",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "reduce_each_micro_batch",
        "ended, total, apply, divisor, loss = once(at_end, end, start)",
        "ended, total, apply, divisor, loss = end(start)",
        OWN + "test_jax_workers.py::test_four_devices",
        "one_reduction_per_window",
    ),
    Mutant(
        "leave_the_last_updates_in_the_sum",
        "sums.emptied(state.accumulator, fields[0] == 0)",
        "sums.emptied(state.accumulator, fields[0] < 0)",
        SUITE + "test_optimizers.py",
    ),
    Mutant(
        "leave_the_masters",
        "moved.append(jnp.asarray(master + u).astype(jnp.float32))",
        "moved.append(jnp.asarray(master).astype(jnp.float32))",
        SUITE + "test_master_weights.py::test_small_updates_add_up",
    ),
    Mutant(
        "update_the_parameter_beside_its_master",
        "                u = distance(p, moved[-1])\n",
        "",
        SUITE + "test_master_weights.py::test_model_holds_the_rounded_masters",
    ),
    Mutant(
        "start_the_optimizer_on_half_parameters",
        "inner.init(in_place_of(params, masters))",
        "inner.init(params)",
        OWN + "test_jax_masters.py::test_masters_exist_for_halves_only",
    ),
    Mutant(
        "resume_under_any_options",
        "fields = resumed(saved, decode_terms(np.asarray(state.terms).tolist()),"
        " concrete)",
        "fields = saved",
        SUITE + "test_resuming.py::test_open_window_refuses_other_options",
    ),
    Mutant(
        "restore_any_shape",
        "        if (wanted := _kind(leaf)) != (given := _kind(found[path])):\n        "
        "    _refuse(path, wanted, given)\n",
        "",
        OWN + "test_jax_checkpoint.py::test_foreign_state_is_refused",
    ),
    Mutant(
        "restore_into_the_user_s_memory",
        "return jnp.array(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)",
        "return jnp.asarray(leaf)",
        OWN + "test_jax_checkpoint.py::test_restored_state_has_memory_of_its_own",
    ),
    Mutant(
        "count_every_loss_as_one",
        "                weight,\n",
        "                jnp.ones_like(weight),\n",
        SUITE + "test_knowledge.py::test_loss_is_the_large_batch_s",
    ),
    Mutant(
        "leave_the_loss_for_the_next_window",
        (
            "    held, last = all_like(\n"
            "        (jnp.zeros_like(state.loss), as_stored(loss)), (state.loss, state.last_loss)\n"
            "    )\n"
        ),
        "    held, last = all_like((state.loss, as_stored(loss)), (state.loss, state.last_loss))\n",
        SUITE + "test_knowledge.py::test_loss_is_the_large_batch_s",
    ),
    Mutant(
        "take_an_untold_loss_for_zero",
        "total = jnp.where(adds, UNKNOWN, state.loss)",
        "total = state.loss",
        SUITE + "test_knowledge.py::test_window_with_a_missing_loss_has_none",
    ),
    Mutant(
        "weigh_every_micro_batch_alike",
        "return 1 if unit is None else known_items(micro_batch.items) / unit",
        "return 1",
        SUITE + "test_one_call.py::test_gradient_of_the_large_batch",
    ),
    Mutant(
        "give_every_micro_batch_one_key",
        (
            "        return functools.reduce(\n"
            "            jax.random.fold_in, index if isinstance(index, tuple) else (index,), leaf\n"
            "        )\n"
        ),
        "        return leaf\n",
        OWN + "test_jax_large_batch.py::test_every_micro_batch_has_its_own_key",
    ),
    Mutant(
        "join_rows_as_they_were_run",
        "return flat if bool(np.all(order == np.arange(len(order)))) else flat[order]",
        "return flat",
        SUITE + "test_one_call.py::test_own_split",
    ),
    Mutant(
        "begin_a_maximum_at_zero",
        'return -np.inf if kind == "max" else np.inf',
        "return 0.0",
        SUITE + "test_one_call.py::test_largest_of_negative_outputs",
    ),
    Mutant(
        "take_the_gradient_of_the_first_outputs",
        "starts.append(np.cumsum(lengths) - lengths)",
        "starts.append(0 * lengths)",
        SUITE + "test_coupled.py::test_gradient_of_the_large_batch",
    ),
    Mutant(
        "draw_the_same_in_every_layer",
        "each = take(place[0], index if number is None else (index, number))",
        "each = take(place[0], index)",
        OWN + "test_jax_layered.py::test_same_bits_where_the_order_is_the_same",
    ),
    Mutant(
        "count_an_update_for_each_layer",
        "if mine is None or (tag == SHARED and part != PRELUDE):",
        "if mine is None:",
        OWN + "test_jax_layered.py::test_same_bits_where_the_order_is_the_same",
    ),
    Mutant(
        "forget_what_the_head_gave_tied_parameters",
        "[*start, *tied]",
        "[*start, *(0 * leaf for leaf in tied)]",
        OWN + "test_jax_layered.py::test_bits_of_the_usual_window",
        "by",
    ),
    Mutant(
        "add_to_a_layer_without_the_weight",
        "return large.add(total, gradients, weight, self.options), further",
        "return gradient_sum.add(total, gradients, None, weight > 0), further",
        OWN + "test_jax_layered.py::test_same_bits_where_the_order_is_the_same",
    ),
    Mutant(
        "trust_every_optimizer_with_one_layer",
        "if len(stacked) == 1 and jax.jit(tried)(*trees):",
        "if len(stacked) == 1:",
        OWN
        + "test_jax_layered.py::test_optimizers_that_look_at_several_layers_are_refused",
    ),
    Mutant(
        "read_the_layers_beside_what_is_written",
        "whole = self._whole(_bare(held[0], LAYERS, number))",
        "whole = self._whole(_bare(self.params, LAYERS, number))",
        OWN + "test_jax_layered.py::test_memory_is_that_of_a_layer",
    ),
    Mutant(
        "keep_each_device_s_own_sum_of_a_layer",
        "total = group.added_up(total, self.names)",
        "total = replicated(total, self.names)",
        OWN + "test_jax_workers.py::test_four_devices",
        "layered_window",
    ),
)
