"""The rows of the scoreboard as data: what is trained, in which environment, and why it is not the large batch where it is not."""

from __future__ import annotations

from typing import NamedTuple

TORCH = "torch==2.13.0"
ENVIRONMENTS = {
    "huggingface": (TORCH, "transformers[torch]", "trl", "sentence-transformers"),
    "lightning": (TORCH, "lightning", "open_clip_torch"),
}
"""What pip installs, of a package without a version the newest release."""

MEANS = "mean of means"
WINDOW = "short window"
UNDIVIDED = "not divided"
COUPLED = "coupled"
REPEATED = "repeated term"
CAUSES = {
    MEANS: "each micro-batch's mean weighs the same, however many items it has",
    WINDOW: "the epoch's last window has fewer micro-batches, and is divided by the full number",
    UNDIVIDED: "the loop believes that the loss is divided by the window's items, and the loss is not",
    COUPLED: "a pair meets the negatives of its micro-batch only",
    REPEATED: "each micro-batch adds the gradient of the whole loss for a parameter that is in none of them",
}


class Row(NamedTuple):
    """One loop of a package, on one kind of unequal items."""

    package: str
    trains: str
    place: str
    """Its function, ``module.function`` in this package: the name for the command."""
    environment: str
    cause: str = ""
    """A key of `CAUSES`; "" where the package gives the large batch's gradient."""
    reported: tuple[str, ...] = ()
    """Issues where users or maintainers speak of it, as ``owner/repository#number``."""
    documented: bool = False
    """The package's own pages say so."""


ROWS = (
    Row("transformers", "causal LM, ragged tokens", "transformers_rows.causal_lm", "huggingface"),
    Row("transformers", "causal LM, label smoothing", "transformers_rows.smoothed_lm", "huggingface"),
    Row(
        "transformers", "BERT classifier", "transformers_rows.classification", "huggingface", UNDIVIDED, ("huggingface/transformers#47688",)
    ),
    Row("transformers", "T5", "transformers_rows.seq2seq", "huggingface", UNDIVIDED, ("huggingface/transformers#47688",)),
    Row(
        "transformers",
        "a model with a mean loss of its own, short last batch",
        "transformers_rows.own_mean",
        "huggingface",
        MEANS,
        ("huggingface/transformers#37766",),
    ),
    Row("trl", "SFT, ragged tokens", "trl_rows.sft", "huggingface"),
    Row("trl", "GRPO, ragged completions", "trl_rows.grpo", "huggingface"),
    Row("trl", 'GRPO with loss_type="bnpo"', "trl_rows.grpo_bnpo", "huggingface", MEANS, ("huggingface/trl#3021",), documented=True),
    Row("trl", "DPO, short last batch", "trl_rows.dpo", "huggingface", MEANS),
    Row("trl", "reward model, short last batch", "trl_rows.reward", "huggingface", MEANS),
    Row(
        "sentence-transformers",
        "MultipleNegativesRanking",
        "sentence_rows.ranking",
        "huggingface",
        COUPLED,
        ("huggingface/sentence-transformers#2916",),
        documented=True,
    ),
    Row("sentence-transformers", "CachedMultipleNegativesRanking", "sentence_rows.cached_ranking", "huggingface"),
    Row("accelerate", "accumulate(), short last batch", "accelerate_rows.short_batch", "huggingface", MEANS),
    Row("accelerate", "accumulate(), short last window", "accelerate_rows.short_window", "huggingface", WINDOW),
    Row("accelerate", "its guide's loop for samples of variable size", "accelerate_rows.counted", "huggingface"),
    Row("lightning", "short last batch", "lightning_rows.short_batch", "lightning", MEANS),
    Row("lightning", "short last window", "lightning_rows.short_window", "lightning", WINDOW, ("Lightning-AI/pytorch-lightning#19987",)),
    Row("open_clip_torch", "--accum-freq", "open_clip_rows.accum_freq", "lightning", REPEATED, ("mlfoundations/open_clip#957",)),
)
NOT_RUN = {
    "timm": "its loop is train.py, which is not in the wheel",
}
