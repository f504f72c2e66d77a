"""The JAX adapter's mutants."""

from __future__ import annotations

from .planting import OWN, SUITE, Mutant

MUTANTS = (
    Mutant(
        "add_without_the_weight",
        "    total = sums.add(held, gradients, factor, adds, harmless)\n",
        "    total = sums.add(held, gradients, None, adds, harmless)\n",
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
        "    finite = everywhere(sums.all_finite(gradients), shard_axes) if dropping else jnp.asarray(True)\n",
        "    finite = jnp.asarray(True)\n",
        SUITE + "test_overflow.py::test_drop_in_every_mode",
    ),
    Mutant(
        "apply_in_mid_window",
        "apply, overflow = at_end & decision.apply,",
        "apply, overflow = decision.apply,",
        SUITE + "test_windows.py::test_nothing_moves_between_window_ends",
    ),
    Mutant(
        "apply_what_is_to_be_skipped",
        "apply, overflow = at_end & decision.apply,",
        "apply, overflow = at_end,",
        SUITE + "test_overflow.py::test_overflow_in_every_mode",
    ),
    Mutant(
        "forget_the_overflow",
        "_where(at_end, close_fields(whole.fields, apply, overflow, options, jnp.where), fields_of(state))",
        "_where(at_end, close_fields(whole.fields, apply, overflow & False, options, jnp.where), fields_of(state))",
        SUITE + "test_loss_scale.py::test_scale_moves_once_per_window",
    ),
    Mutant(
        "close_this_device_s_fields",
        "_where(at_end, close_fields(whole.fields, apply, overflow, options, jnp.where), fields_of(state))",
        "_where(at_end, close_fields(fields_of(state), apply, overflow, options, jnp.where), fields_of(state))",
        SUITE + "test_workers_limits.py::test_one_worker_drops_a_micro_batch",
    ),
    Mutant(
        "leave_the_counter_at_discard",
        "emptied = statistics.discard(with_fields(state, discard_fields(fields_of(state))))",
        "emptied = statistics.discard(state)",
        SUITE + "test_windows.py::test_discard_forgets_the_window",
    ),
    Mutant(
        "leave_the_sum_at_discard",
        "with_event(emptied._replace(accumulator=sums.clear(state.accumulator)), False",
        "with_event(emptied, False",
        OWN + "test_jax_loop.py::test_empty_flush_and_discard_change_nothing",
    ),
    Mutant(
        "report_no_norm",
        "jnp.where(at_end, as_stored(decision.grad_norm), state.last_grad_norm)",
        "jnp.where(at_end, state.last_grad_norm, as_stored(decision.grad_norm))",
        SUITE + "test_clipping.py::test_norm_is_reported",
    ),
    Mutant(
        "hide_a_dropped_micro_batch",
        "at_end & ~apply, jnp.where(at_end, overflow, dropped))",
        "at_end & ~apply, at_end & overflow)",
        SUITE + "test_lockstep.py::test_one_sequence_in_every_mode",
    ),
    Mutant(
        "report_an_open_window_as_skipped",
        "with_event(ended, apply, at_end & ~apply,",
        "with_event(ended, apply, ~apply,",
        SUITE + "test_windows.py::test_result_inside_and_at_end",
    ),
    Mutant(
        "close_an_empty_window",
        "jnp.asarray(state.micro_step) > 0\n",
        "jnp.asarray(state.micro_step) >= 0\n",
        SUITE + "test_windows.py::test_flush_of_empty_window_leaves_the_last_event_alone",
    ),
    Mutant(
        "forget_the_event_at_an_empty_flush",
        "        event = (jnp.where(is_open, new, old) for new, old in zip(event_of(state), before, strict=True))\n",
        "        event = event_of(state)\n",
        SUITE + "test_windows.py::test_flush_of_empty_window_leaves_the_last_event_alone",
    ),
    Mutant(
        "forget_what_float16_holds",
        "return norm, finite & everywhere(fitting, update.shard_axes)",
        "return norm, finite",
        SUITE + "test_half_precision.py::test_sum_beyond_float16_overflows",
    ),
    Mutant(
        "divide_a_short_window_by_steps",
        "decide(whole.fields, norm, finite, options,",
        "decide((*whole.fields[:3], whole.fields[3] * 0 + (options.steps or 1), *whole.fields[4:]), norm, finite, options,",
        SUITE + "test_windows.py::test_flush_divides_by_held_weight",
    ),
    Mutant(
        "clip_the_scaled_norm",
        "decide(whole.fields, norm, finite, options,",
        "decide((*whole.fields[:5], jnp.ones_like(whole.fields[5]), *whole.fields[6:]), norm, finite, options,",
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
        "window, norm, finite = once(at_end, add_up, ",
        "window, norm, finite = add_up(",
        OWN + "test_jax_workers.py::test_four_devices",
        "one_reduction_per_window",
    ),
    Mutant(
        "leave_the_last_updates_in_the_sum",
        "held = sums.emptied(state.accumulator, fields[0] == 0)",
        "held = sums.emptied(state.accumulator, fields[0] < 0)",
        SUITE + "test_optimizers.py",
    ),
)
