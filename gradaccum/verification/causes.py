"""The texts with which `gradaccum.verify` explains why accumulation is wrong for a
loss.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = "gradaccum/VERIFY.md"
"""The page of the documentation that has a section for each `Cause.kind`."""


@dataclass(frozen=True)
class Cause:
    """One reason why accumulation does not give the large batch's gradient."""

    kind: str
    """The kind of cause, such as ``"batch_statistics"``. ``gradaccum/VERIFY.md`` has a
    section with this name.
    """
    where: str
    """The layer, state, parameter or part of the batch that is the cause, or "the
    loss".
    """
    explanation: str
    """What the experiments showed, and why it matters."""
    fix: str
    """How to remove the cause."""

    def __str__(self) -> str:
        return (
            f"{self.kind} ({self.where}): {self.explanation}\n    What to do:"
            f" {self.fix}"
        )


CAUSES = {
    "not_finite": (
        "not_finite",
        "{names}",
        "With the items {items} as one micro-batch, the gradient is not finite. If only"
        " some micro-batches are affected, the loss divides by a count that may be"
        " zero, or by a standard deviation over too few items.",
        "Make the loss finite first, or verify with another batch. Divide by"
        " max(count, 1), and pass the count as weight=.",
    ),
    "changing": (
        "not_repeatable",
        "outside of the model",
        "Two runs of the same batch, with the model's state and the random state"
        " restored, differ in {names}: the loss reads something that changes from call"
        " to call, such as its own random generator.",
        "Make that value a buffer of the model, or a part of the batch.",
    ),
    "random": (
        "not_repeatable",
        "the loss",
        "The loss draws random numbers. In a different micro-batch an item gets"
        " different numbers, so the gradients cannot be compared. Drawing random"
        " numbers is not a mistake in itself.",
        "Pass the numbers in the batch, or verify without random numbers.",
    ),
    "by_place": (
        "not_repeatable",
        "the loss",
        "The loss gives each item a number that depends only on the item's place in the"
        " micro-batch. This happens if a seed, a key or a generator is created in the"
        " loss, or if the loss reads a table.",
        "Seed once, at the start of the program, or pass the numbers in the batch. In"
        " JAX split one key into a key per item, or verify without dropout.",
    ),
    "custom_backward": (
        "custom_backward",
        "{names}",
        "Multiplying the loss by a number does not multiply the gradient of {names} by"
        " the same number: a custom backward pass or a hook ignores the gradient that"
        " it receives, and therefore also the weight of a micro-batch.",
        "Multiply by the incoming gradient in the custom backward pass. Replace a"
        " clipping hook with clip_norm=.",
    ),
    "hidden_state": (
        "hidden_state",
        "{state}",
        "The forward pass changes this state, and the loss reads it: if the state is"
        " restored before each micro-batch, the gradient of {names} is different.",
        "Update the state once per window, after the optimizer's step, or use the value"
        " from before the window.",
    ),
    "batch_statistics": (
        "batch_statistics",
        "{layers}",
        "In training mode the output for one item depends on the other items of the"
        " micro-batch. In evaluation mode the gradient {verdict}.",
        "Use GroupNorm or LayerNorm, freeze the statistics (evaluation mode for these"
        " layers), or accept statistics per micro-batch.",
    ),
    "sum": (
        "weights",
        "the loss",
        "With reduction={reduction!r} and your weights the gradient is wrong. With"
        " reduction='sum' and no weights it is right.",
        "Write reduction='sum'. For the mean over the window's items write"
        " reduction='sum_per_item', and pass the number of items as weight=.",
    ),
    "mean": (
        "weights",
        "the loss",
        "With reduction={reduction!r} and your weights the gradient is wrong. With"
        " reduction='mean' and no weights it is right.",
        "Write reduction='mean' and no weight=.",
    ),
    "count": (
        "weights",
        "{count}",
        "The loss is a weighted mean whose weight differs between micro-batches: it"
        " divides by a count, such as the number of tokens, of labels that are not"
        " ignored or of positives, or by a sum of class weights.",
        "Write reduction='mean', weight=lambda *batch: {count}.",
    ),
    "unknown_count": (
        "weights",
        "the denominator of the loss",
        "The loss is a weighted mean whose weight differs between micro-batches: it"
        " divides by a count, such as the number of tokens, of labels that are not"
        " ignored or of positives, or by a sum of class weights.",
        "Write reduction='mean', and pass as weight= a function that returns the number"
        " by which the loss divides in a micro-batch.",
    ),
    "coupled": (
        "coupled",
        "the loss",
        "No weights make the micro-batches add up to the large batch's gradient in"
        " {names}. Either the loss of one item depends on other items, as in"
        " contrastive, ranking and load-balancing losses, statistics over the batch and"
        " branches that depend on the batch. Or the loss adds terms that need different"
        " weights, such as a sum over the items and a penalty.",
        "Split the loss into outputs per item and a loss of all outputs, and call"
        " coupled_backward (torch) or coupled_value_and_grad (JAX, MindSpore). For"
        " terms that divide by different counts, use gradaccum.windows. For a sum over"
        " items plus a penalty, multiply the penalty by the micro-batch's share of"
        " items.",
    ),
}
"""For each finding of the experiments, the fields of a `Cause`: the kind, where the
cause is, the explanation and the fix. Names in braces are replaced with facts that the
experiment supplies.
"""
