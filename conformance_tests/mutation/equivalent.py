"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

KINDS = "the order of kinds means nothing where one of them is looked for"
UNUSED = "it stands where nothing is divided"
NEVER = "a window that only the caller closes never ends here"
DISTANCE = "a distance does not depend on which of the two stands first"

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "gradaccum/transitions.py",
        "(micro_step, optimizer_step + applied, skipped_windows + 1 - applied, overflow, weight, loss_scale, growth_tracker)",
    ): "discard forgets both",
    (
        "gradaccum/verification/measuring.py",
        "[product(other.gradients, one.gradients) for other in runs] for one in runs",
    ): "a product does not depend on the order of its factors",
    (
        "gradaccum/verification/subject.py",
        "generator.seed((NOBODYS - seed))",
    ): "any other numbers will do",
    (
        "gradaccum/nests.py",
        "PLAIN = (str, bool, bytes, int, float, complex, type(None))",
    ): KINDS,
    (
        "gradaccum/nests.py",
        "PLAIN = (str, bytes, bool, int, float, type(None), complex)",
    ): KINDS,
    (
        "gradaccum/nests.py",
        "PLAIN = (str, bytes, int, bool, float, complex, type(None))",
    ): KINDS,
    (
        "gradaccum/transitions.py",
        "clipping = divides * where(apply & ((excess >= 1)), excess, one)",
    ): "an excess of 1 divides by 1",
    ("gradaccum/statistics.py", "one = 0 * weight + 2"): UNUSED,
    (
        "gradaccum/verification/experiments.py",
        "bench.apart_by(bench.floor(TRAINING), bench.large(TRAINING).gradients, again)",
    ): DISTANCE,
    (
        "gradaccum/verification/experiments.py",
        "bench.apart(gradients, pairs[0], conditions) for gradients in (pairs[1], turned)",
    ): DISTANCE,
    (
        "gradaccum/verification/experiments.py",
        "return (left_b, left_a)",
    ): DISTANCE,
    (
        "gradaccum/verification/measuring.py",
        "self.apart(large, self.accumulated(p.parts, conditions, way), conditions)",
    ): DISTANCE,
    (
        "gradaccum/verification/experiments.py",
        "bench.accumulated(((c, d), (a, b)), conditions),",
    ): "a sum of two does not depend on their order, and a loss with a state was found before",
    (
        "gradaccum/verification/subject.py",
        "terms: int = 2",
    ): "a sum of one term counts as one addition too",
    (
        "gradaccum/verification/measuring.py",
        "self.weight(part, run) for part, run in zip(parts, runs, strict=False)",
    ): "a subject returns one run for each part",
    (
        "gradaccum/watching.py",
        "pass  # self._last_end = 0.0",
    ): "to add a listener sets it, and without one no window is noted",
    (
        "gradaccum/verification/subject.py",
        "NOBODYS = 388817",
    ): "any seed does that users do not write",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        "return jnp.promote_types(jnp.complex64, chosen_dtype)",
    ): "promotion is symmetric",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        "for total, gradient in zip(jax.tree.leaves(accumulator), gradients, strict=False)",
    ): "an update whose gradients have another structure was refused before",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        'return jnp.dtype("float32") if (leaf_dtype.itemsize <= 4) else leaf_dtype',
    ): "the floating dtype of 4 bytes is float32 itself",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        "leaf.dtype == wider(divisor.dtype, leaf.dtype)",
    ): "promotion is symmetric",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        "quotient_dtype = wider(jnp.float32, total_dtype)",
    ): "promotion is symmetric",
    (
        "backends/gradaccum_jax/gradient_sum.py",
        "norm = jnp.minimum(float(limits.max), _square_root(again) / factor)",
    ): "the smaller of two",
    (
        "backends/gradaccum_jax/state.py",
        "return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=False)]",
    ): "each old value has a new one",
    (
        "backends/gradaccum_mindspore/gradient_sum.py",
        "HALF = (ms.bfloat16, ms.float16)",
    ): KINDS,
    (
        "backends/gradaccum_mindspore/window/pynative.py",
        "for total, gradient in zip(self.storage.sums, gradients, strict=False):",
    ): "another number of gradients was refused before",
    (
        "backends/gradaccum_mindspore/gradient_sum.py",
        "flat = array.reshape(-2).astype(ARRAYS[dtype], copy=False)",
    ): "NumPy takes any negative number for the length that is left",
    (
        "backends/gradaccum_mindspore/gradient_sum.py",
        "is_large = (squares.size >= ROW)",
    ): "a row is summed in one step or in two",
    (
        "backends/gradaccum_mindspore/gradient_sum.py",
        "squares = squares.sum(-2)",
    ): "a sum over columns, then over all, is the sum too, only slower",
    (
        "backends/gradaccum_mindspore/window/compiled.py",
        "return False",
    ): "nobody reads what stands for None in compiled code",
    (
        "backends/gradaccum_mindspore/window/compiled.py",
        'terms = kit.Terms("mean", "skip_window", "unused", 2)',
    ): "a note is written before it is read",
    (
        "backends/gradaccum_mindspore/window/compiled.py",
        "self.add(name, Tensor(True))",
    ): "a note is written before it is read",
    (
        "backends/gradaccum_mindspore/window/compiled.py",
        "LARGEST_WEIGHT = 2.0**41",
    ): "a sum of such weights is finite too, in any window that ends",
    (
        "backends/gradaccum_mindspore/window/compiled.py",
        "never = after[MICRO_STEP] < 1",
    ): "the micro-batch was counted",
    (
        "backends/gradaccum_mindspore/state.py",
        "return UntilWeight(-code) if (code <= 0) else code",
    ): "an open window has a size",
    (
        "backends/gradaccum_mindspore/state.py",
        "return UntilWeight(-code) if code < 1 else code",
    ): "an open window has a size",
    (
        "backends/gradaccum_mindspore/state.py",
        "kit.require_steps(size, 0, 2)",
    ): "any number says that the schedule is no weight's",
    (
        "backends/gradaccum_mindspore/window/pynative.py",
        "if (norm < FLOAT16_MAX * divisor):",
    ): "at the limit the elements tell the same",
    (
        "gradaccum/window_loop.py",
        "pass  # self._current = None",
    ): "to forget a window twice is harmless",
}
"""By the file and the changed line."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason why the mutant does what the package does, or an empty text."""
    return EQUIVALENT.get((str(mutant.file), mutant.mutation.becomes), "")
