"""Faults in the large batch in one call. Most are of hand-written loops that split a
batch.
"""

from __future__ import annotations

from .planting import Mutant

ONE_CALL = "(test_one_call or test_coupled)"
COUPLED_PARTS = "    parts = [part for part, _ in micro_batches(batch, None, **how)]\n"
CUT = "    for cut in divided(division, items):\n"
MERGED = "merged(auxes, weights, merge_aux) if has_aux"
ROWS = "        rows = slice(cut.start, cut.stop)\n"
STEP = "        optimizer.step(gradient, w, loss)\n"
WEIGHT_OF = "yield part, weight_of(part[:2], weight)"

LARGE_BATCH = (
    # Each micro-batch counts alike, the last short one too.
    Mutant(
        "mean_of_the_means",
        {WEIGHT_OF: "yield part, 1.0"},
        f"{ONE_CALL} and test_gradient_of_the_large_batch",
    ),
    Mutant(
        "drop_the_short_last_micro_batch",
        {
            ROWS: f"""\
        first = next(iter(divided(division, items)))
        if cut.stop - cut.start < first.stop - first.start:
            continue
{ROWS}"""
        },
        f"{ONE_CALL} and test_gradient_of_the_large_batch",
    ),
    Mutant(
        "begin_each_micro_batch_an_item_early",
        {ROWS: "        rows = slice(max(cut.start - 1, 0), cut.stop)\n"},
        f"{ONE_CALL} and test_gradient_of_the_large_batch",
    ),
    Mutant(
        "believe_a_list_to_hold_all_items",
        {
            "require_one_size(sizes, lists_of_one_kind(batch, axes))": (
                "require_one_size(sizes, [])"
            )
        },
        f"{ONE_CALL} and test_list_as_long_as_the_batch",
    ),
    Mutant(
        "count_items_in_place_of_weights",
        {"yield part, sum(weight[rows])": "yield part, float(len(part[0]))"},
        f"{ONE_CALL} and test_weights_of_items",
    ),
    # By the number of items, as a mean is.
    Mutant(
        "divide_a_sum_in_one_call",
        {
            "self.options = make_options(None, reduction=reduction)": """\
if reduction == "sum":
            reduction = "sum_per_item"
        self.options = make_options(None, reduction=reduction)"""
        },
        f"{ONE_CALL} and test_every_mode",
    ),
    Mutant(
        "last_output_only",
        {MERGED: "auxes[-1] if has_aux"},
        f"{ONE_CALL} and test_outputs_of_each_micro_batch",
    ),
    Mutant(
        "merge_by_equal_weights",
        {MERGED: "merged(auxes, [1.0] * len(weights), merge_aux) if has_aux"},
        f"{ONE_CALL} and test_outputs_merged_by_a_function",
    ),
    Mutant(
        "outputs_in_reversed_order",
        {MERGED: "merged(auxes[::-1], weights, merge_aux) if has_aux"},
        f"{ONE_CALL} and test_outputs_concatenated",
    ),
    Mutant(
        "ask_no_function_for_weights",
        {WEIGHT_OF: "yield part, float(len(part[0]))"},
        f"{ONE_CALL} and test_weight_by_a_function",
    ),
    Mutant(
        "believe_every_loss",
        {
            "checked(loss_fn(part), has_aux)": "loss_fn(part)",
            "(checked(loss_fn(part), False), w)": "(loss_fn(part), w)",
        },
        f"{ONE_CALL} and test_loss_per_item",
    ),
    Mutant(
        "refuse_more_steps_than_items",
        {
            CUT: f"""\
    if (division.steps or 0) > items:
        raise ValueError("more steps than items")
{CUT}"""
        },
        f"{ONE_CALL} and test_last_batch_of_fewer_items_than_steps",
    ),
    Mutant(
        "close_the_window_at_each_micro_batch",
        {STEP: f"{STEP}        optimizer.flush()\n"},
        f"{ONE_CALL} and test_one_call_window",
    ),
    Mutant(
        "forget_the_weights_of_a_window",
        {STEP: "        optimizer.step(gradient, None, loss)\n"},
        f"{ONE_CALL} and test_one_call_window",
    ),
    Mutant(
        "multiply_by_a_weight_of_zero",
        {
            "g.dtype.type(factor) * g if weight else np.zeros_like(g)": (
                "g.dtype.type(factor) * g"
            )
        },
        f"{ONE_CALL} and test_weight_zero_adds_nothing",
    ),
    Mutant(
        "count_micro_batches_before_all_are_there",
        {
            "    require_closed_by_caller(optimizer.options)\n": """\
    require_closed_by_caller(optimizer.options)
    parameters = optimizer.optimizer.parameters
    optimizer.step({name: np.zeros_like(p) for name, p in parameters.items()})
"""
        },
        f"{ONE_CALL} and test_error_of_the_loss_passes",
    ),
    # As OpenCLIP's first accumulation had it: the loss's own parameter is
    # differentiated in every backward pass.
    Mutant(
        "temperature_once_per_micro_batch",
        {
            "    return loss, sums.mean()[1] | own\n": """\
    own = {name: len(parts) * g for name, g in own.items()}
    return loss, sums.mean()[1] | own
"""
        },
        f"{ONE_CALL} and test_coupled and test_gradient_of_the_large_batch",
    ),
    Mutant(
        "couple_within_micro_batches_only",
        {
            COUPLED_PARTS: f"""{COUPLED_PARTS}\
    if len(parts) > 1:
        made = [
            coupled_value_and_grad(outputs_fn, loss_fn, part, steps=1)
            for part in parts
        ]
        return np.mean([loss for loss, _ in made]), {{
            name: np.mean([gradient[name] for _, gradient in made], axis=0)
            for name in made[0][1]
        }}
"""
        },
        f"{ONE_CALL} and test_coupled and test_gradient_of_the_large_batch",
    ),
    # The second pass forgets to move on.
    Mutant(
        "gradient_of_the_first_micro_batch_for_all",
        {"        start = stop\n": ""},
        f"{ONE_CALL} and test_coupled and test_gradient_of_the_large_batch",
    ),
)
