"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

KINDS = "the order of kinds means nothing where one of them is looked for"
SYMMETRIC = "a distance, and a sum of two pairs, are symmetric"
EDGE = "no measured number is the limit itself"
TUNED = "a size near the tuned limit has the same numbers, in about the same time"
ROWS = "rows of the other length have the same numbers, in about the same time"
UNREAD = "nobody reads what stands for None in compiled code"
LENGTHS = "both have one entry for each field, or each leaf"
ZERO = "0 is added or subtracted, or both are the limit"

EQUIVALENT = {
    "gradaccum/transitions.py": {
        "(micro_step, optimizer_step + applied, skipped_windows + 1 - applied, overflow, weight, loss_scale, growth_tracker)": "discard forgets both",
        "clipping = divides * where(apply & ((excess >= 1)), excess, one)": "an excess of 1 divides by 1",
        "smaller_scale > rule.min_scale, smaller_scale, rule.min_scale + (0 / scale)": "both are 0",
        "applied = where(0 * micro_step + 1, apply, 0 * micro_step)": "True and False count as 1 and 0",
        **dict.fromkeys(
            (
                "weight = where(weight > 0, (denominator - 0 * weight), weight)",
                "(0 / loss_scale),",
                "smaller_scale > rule.min_scale, smaller_scale, (rule.min_scale - 0 * scale)",
                "(smaller_scale >= rule.min_scale), smaller_scale, rule.min_scale + 0 * scale",
                "larger_scale < rule.max_scale, larger_scale, rule.max_scale + (0 / scale)",
                "larger_scale < rule.max_scale, larger_scale, (rule.max_scale - 0 * scale)",
                "(larger_scale <= rule.max_scale), larger_scale, rule.max_scale + 0 * scale",
                "grad_norm = where(finite, norm / where(in_range, divides, one), (INFINITY - one))",
            ),
            ZERO,
        ),
        **dict.fromkeys(
            (
                "return state[1] < 0 if size is None else state[0] >= size",
                "return state[0] < 1 if size is None else state[0] >= size",
                "return (state[0] <= 0) if size is None else state[0] >= size",
            ),
            "the micro-batch was counted",
        ),
    },
    "gradaccum/refusals.py": {
        "return bytes(mark >> bit & 1 for bit in range(33))": "the bit above 32 bits is 0"
    },
    "gradaccum/saving.py": {
        "_DEFAULTS = make_options(2)": "the steps are shown in another way"
    },
    "gradaccum/splitting.py": dict.fromkeys(
        (
            'self.leaves, spread(axes, arguments, "axes"), strict=False',
            "for leaf, axis in zip(self.leaves, self._axes, strict=False)",
            "for cut, *slices in zip(cuts, *columns, strict=False):",
        ),
        LENGTHS,
    )
    | {"waiting += (each.__context__, each.__cause__)": "all of them are cleared"},
    "gradaccum/nests.py": {
        **dict.fromkeys(
            (
                "for (step, part), (_, child) in zip(given, below, strict=False)",
                "for field, child in zip(dataclasses.fields(nest), children, strict=False):  # type: ignore[arg-type]",
                "made.update(zip(nest, children, strict=False))  # type: ignore[attr-defined]",
                '(f".{name}", value) for name, value in zip(nest._fields, nest, strict=False)',
            ),
            LENGTHS,
        ),
        **dict.fromkeys(
            (
                "PLAIN = (bytes, str, bool, int, float, complex, type(None))",
                "PLAIN = (str, bool, bytes, int, float, complex, type(None))",
                "PLAIN = (str, bytes, int, bool, float, complex, type(None))",
                "PLAIN = (str, bytes, bool, float, int, complex, type(None))",
                "PLAIN = (str, bytes, bool, int, complex, float, type(None))",
                "PLAIN = (str, bytes, bool, int, float, type(None), complex)",
                "(str(getattr(v, 'dtype', None)), type(v), getattr(v, 'ndim', None))",
                "(type(v), getattr(v, 'ndim', None), str(getattr(v, 'dtype', None)))",
            ),
            KINDS,
        ),
    },
    "gradaccum/statistics.py": {
        "return where(weight > 0, loss, (float('nan') - 0 * weight))": "both are NaN",
        'return where(weight > 0, loss, float("nan") + 1 * weight)': "both are NaN",
    },
    "gradaccum/verification/batch.py": {
        "self._axes_of_leaves = list(zip(self.leaves, self._axes, strict=False))": "each leaf has an axis or None",
        'for value, axis in zip(values, spread(axes, arguments, "axes"), strict=False)': LENGTHS,
    },
    "gradaccum/verification/comparison.py": {
        "self.differing(self.large, self.accumulate(parts, weighting))": SYMMETRIC,
        "for gradient, factor in zip(self.gradients(parts), factors, strict=False):": "each micro-batch has a factor",
        "pairs = zip(self.gradients(parts), factors, strict=False)": "each micro-batch has a factor",
        "if (size < sum_error * largest):": EDGE,
        "for best, used in zip(self.best, self.used, strict=False)": "each micro-batch has both",
        "for parts in (self.partitions[0], (self.items,)):": "the largest of both is found",
        "divided = (gradient / 1.0)": "it is a copy",
    },
    "gradaccum/verification/examination.py": {
        **dict.fromkeys(
            (
                "SCALES = (2.0**17, 2.0**8)",
                "SCALES = (4.0**16, 2.0**8)",
                "SCALES = ((2.0 * 16), 2.0**8)",
                "SCALES = (2.0**16, 2.0**9)",
                "SCALES = (2.0**16, 4.0**8)",
                "SCALES = (2.0**16, (2.0 * 8))",
                "SCALES = (2.0 ** 8, 2.0 ** 16)",
            ),
            "any powers of two",
        ),
        "OTHER_SEED = 388818": "any other seed",
        "is_exact = (coefficients.error < ROUNDING_LIMIT * len(best))": EDGE,
        "if changed_names(second[:1] + first[1:], first[:1] + second[1:]):": SYMMETRIC,
        "return is_exact and (abs(math.fsum(best) - 1) <= room)": EDGE,
        "if norm and (share <= SAME):": EDGE,
        "if is_finite(gradient) and (distance >= ROUNDING_LIMIT * limits[name])": EDGE,
        "if not changed_names(second, first[::-1]):": SYMMETRIC,
        "names = comparison.differing(gradient, comparison.accumulate(parts))": SYMMETRIC,
        "names = self.comparison.differing(gradient, carried_gradient)": SYMMETRIC,
        "for share, norm in zip(best, coefficients.norms, strict=False):": "each micro-batch has a coefficient and a norm",
    },
    "gradaccum/window_loop.py": {
        "by_name = dict(zip(self.count, totals[1:], strict=False))": "a reduction of another length was refused",
        "elif items and self._first not in (items, 0):": KINDS,
        "total + value for total, value in zip(totals, values, strict=False)": LENGTHS,
        "total + value for total, value in zip(values, totals, strict=True)": SYMMETRIC,
    },
    "gradaccum/watching.py": {
        **dict.fromkeys(
            ("pass  # self._last_end = 0.0", "self._last_end = 1.0"),
            "to add a listener sets it, and without one no window is noted",
        )
    },
    "backends/gradaccum_jax/gradient_sum.py": {
        'return jnp.dtype("float32") if (leaf_dtype.itemsize <= 4) else leaf_dtype': "the floating dtype of 4 bytes is float32 itself",
        "for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=False):": LENGTHS,
        "SMALL_SIZE = 2**15": TUNED,
        "return bool((array.size >= SMALL_SIZE))": TUNED,
        "smallest_exact = float(limits.tiny) / (float(limits.eps) * 2)": "XLA:CPU keeps squares that are subnormal",
        "smallest_exact = float(limits.tiny) / float(limits.eps) ** 3": "a norm that is measured again is as exact",
        "in_range = ((squares >= smallest_exact)) & (squares < jnp.inf)": EDGE,
        "factor = jnp.where(squares < jnp.inf, large, 2 / large)": "twice this factor brings the squares into range too",
        "return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 2, squares)))": "this root is not selected",
    },
    "backends/gradaccum_jax/state.py": {
        "codes = kit.encode_terms(kit.terms_of(options._replace(steps=None), 1))": "without steps the number of the update is not read",
        "for new, old in zip(news, olds, strict=False)": LENGTHS,
        "return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=False)]": LENGTHS,
    },
    "backends/gradaccum_torch/arithmetic.py": {
        "FAINT = 2.0**-32": "in a norm of 2^-32, too, no square that counts underflows",
        "HALF = (torch.bfloat16, torch.float16)": KINDS,
        "wide_gradient = gradient.to(torch.promote_types(dtype, gradient.dtype))": "promotion is symmetric",
        "key = (getattr(tensor, 'placements', ()), mesh_of(tensor))": "it is only a key",
    },
    "backends/gradaccum_torch/gradient_sum.py": {
        "return True": "a reduction that no pass launches is launched at the window's end",
    },
    "backends/gradaccum_torch/gradient_watch.py": {
        "PASSES = [1]": "only its changes are read",
        "PASSES[0] += 2": "only its changes are read",
        "PASSES[0] -= 1": "only its changes are read",
        "IN_PARTS = -3": "any number that is no version",
        "self._first_parameter = 1": "the first backward pass sets it",
        "pass  # self._first_parameter = 0": "the first backward pass sets it",
        "return not torch.allclose(self.norm, norm, rtol=0, atol=0, equal_nan=True)": SYMMETRIC,
        "pass  # self.new_gradients.clear()": "a gradient that owns its memory is not copied again",
        **dict.fromkeys(
            (
                "for _hook in (GradientWatch.pass_began, WatchedGradient.gradient_arrived, GradientWatch._pass_ended, GradientWatch._keep_new_gradients):",
                "for _hook in (WatchedGradient.gradient_arrived, GradientWatch._pass_ended, GradientWatch.pass_began, GradientWatch._keep_new_gradients):",
                "for _hook in (WatchedGradient.gradient_arrived, GradientWatch.pass_began, GradientWatch._keep_new_gradients, GradientWatch._pass_ended):",
            ),
            "the order of the functions means nothing",
        ),
    },
    "backends/gradaccum_torch/window.py": {
        "self.gradient_sum = GradientSum(self.watch, masters.parameters)": "another object replaces it before anything reads it",
        "self.extensions, numbers, strict=False": "each extension has its numbers",
        "if gradient is None and (factor < torch.finfo(torch.float16).max):": "a tensor of this factor can be made in both ways",
        "if total.dtype is dtype or (norm / divisor < torch.finfo(dtype).max):": "at the limit the elements tell the same",
        "(id(parameter), parameter.requires_grad, parameter.dtype)": "marks are only compared with each other",
        "(parameter.dtype, id(parameter), parameter.requires_grad)": "marks are only compared with each other",
    },
    "backends/gradaccum_mindspore/gradient_sum.py": {
        "part = compiled_scaled(factor, gradient, total.dtype)": "a product is symmetric",
        "HALF = (ms.bfloat16, ms.float16)": KINDS,
        "CHUNK = 2**21": "chunks of any length have one norm",
        "ROW = 4097": TUNED,
        "PACKED = 2**21": TUNED,
        "if (number_of_elements(map_over(shape_of, sums)) < PACKED):": TUNED,
        "return max(length for length in range(1, (ROW - 1)) if size % length == 0)": TUNED,
        "return max(length for length in range(1, ROW + 2) if size % length == 0)": TUNED,
        "return concat((*flat, zeros_to_full_rows(size, dtype))).reshape(ROW, -1)": "the elements are divided into rows again",
        "return False": UNREAD,
        "wide = ops.addn((cast(part, ms.float32), cast(total, ms.float32)))": "the sum of two",
        "pairs = zip(sums, dtypes, strict=False)": LENGTHS,
        "rows = magnitudes.reshape(row_length(magnitudes.size), -1)": ROWS,
        "squares = squares.reshape(row_length(squares.size), -1).sum(1)": ROWS,
        "flat = array.reshape(-2)": "NumPy takes any negative number for the length that is left",
    },
    "backends/gradaccum_mindspore/window/pynative.py": {
        "for total, gradient in zip(self.storage.sums, gradients, strict=False):": "another number of gradients was refused before",
        "for total, gradient in zip(self.storage.sums, gradients, strict=False)": "another number of gradients was refused before",
        "storage.push(kit.discard(state._replace(micro_step=1)), state)": "discard forgets it",
        "if (norm < FLOAT16_MAX * divisor):": "at the limit the elements tell the same",
    },
    "backends/gradaccum_mindspore/window/compiled.py": {
        "return False": UNREAD,
        "SMALLEST_WEIGHT = 2.0**-41": "such a weight is above 0 too",
        "SMALLEST_WEIGHT = 4.0**-40": "such a weight is above 0 too",
        "LARGEST_WEIGHT = 2.0**41": "a sum of such weights is finite too, in any window that ends",
        "LARGEST_WEIGHT = 4.0**40": "a sum of such weights is finite too, in any window that ends",
        "for name, value in (('divisor', self.one), ('nothing', self.zero), ('is_applied', self.false)):": "the order only numbers them",
        "for name, value in (('is_applied', self.false), ('divisor', self.one), ('nothing', self.zero)):": "the order only numbers them",
        "never = (after[MICRO_STEP] <= 0)": "the micro-batch was counted",
        "never = after[MICRO_STEP] < 1": "the micro-batch was counted",
    },
    "backends/gradaccum_mindspore/state.py": {
        "self.extensions: tuple[Extension, ...] = (self.open_window_warning, self.listener_calls)": "neither reads what the other one does",
        "INVALID = -2": "any negative number marks the window",
        "for parameter, dtype in zip(parameters, sum_dtypes, strict=False)": LENGTHS,
        "for field, old, new in zip(FIELD_DTYPES, before, rounded_state, strict=False):": LENGTHS,
        "return UntilWeight(-code) if (code <= 0) else code": "an open window has a size",
        "return UntilWeight(-code) if code < 1 else code": "an open window has a size",
    },
}
"""By the file and the changed line."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason why the mutant does what the package does, or an empty text."""
    of_file = EQUIVALENT.get(str(mutant.file), {})
    return of_file.get(mutant.mutation.becomes, "")
