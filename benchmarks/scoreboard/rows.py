"""The rows of the scoreboard as data: what is trained, in which environment, and why it
is not the large batch where it is not.
"""

from __future__ import annotations

from typing import NamedTuple

TORCH = "torch==2.13.0"
SOURCES = {
    "timm": (
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
    ),
    "maxtext": ("AI-Hypercomputer/maxtext", "e591f30cbbf217ed67ef71263ec0538239f9c3b8"),
}
"""By package, the repository and the commit that what no wheel has is taken from."""
MAXTEXT = (
    "maxtext @ https://github.com/{}/archive/{}.tar.gz".format(*SOURCES["maxtext"]),
    *(
        "jax",
        "flax",
        "optax",
        "absl-py",
        "aqtp",
        "chex",
        "drjax",
        "grain",
        "jinja2",
        "jaxtyping",
        "ml-collections",
        "omegaconf",
    ),
    *(
        "orbax-checkpoint",
        "pathwaysutils",
        "pillow",
        "pydantic",
        "qwix",
        "sentencepiece",
        "sympy",
        "tensorboardx",
    ),
    *("tokamax", "transformers", "tiktoken", "ml-goodput-measurement"),
)
"""With what its training imports: the package itself names no dependency."""
ENVIRONMENTS = {
    "gradaccum": (TORCH,),
    "huggingface": (TORCH, "transformers[torch]", "trl", "sentence-transformers"),
    "lightning": (TORCH, "lightning", "open_clip_torch"),
    "keras": (TORCH, "keras"),
    "torchtune": (TORCH, "torchtune", "torchao==0.9.0"),
    "jax": ("jax", "optax", "flax"),
    "mindspore": ("mindspore==2.10.0", "mindcv", "numpy<2"),
    "levanter": ("levanter>=1.2.dev0", "jax==0.7.1", "gitpython", "chex"),
    "timm": (TORCH, "timm"),
    "swift": (TORCH, "ms-swift"),
    "verl": (TORCH, "verl"),
    "maxtext": MAXTEXT,
}
"""What is installed, of a package without a version the newest release."""
SCRIPTS = {
    "timm": "https://raw.githubusercontent.com/{}/{}/train.py".format(*SOURCES["timm"])
}
"""By environment, a file that is put into it."""
PYTHONS = {"maxtext": "3.12"}
"""By environment, its Python; 3.11 otherwise."""
BY_UV = ("levanter", "maxtext")
"""The environments whose packages pip takes too long to choose. uv would bring torch's
wheels for GPUs into the others.
"""

MEANS, WINDOW, CARRIED, UNDIVIDED = (
    "mean of means",
    "short window",
    "carried over",
    "not divided",
)
COUPLED, REPEATED, COUNTED, CLIPPED = (
    "coupled",
    "repeated term",
    "other count",
    "clipped early",
)
EARLY, WEAKENED = "early update", "weakened term"
CAUSES = {
    MEANS: "all micro-batches count the same, however many items they have",
    WINDOW: (
        "the last window of an epoch has fewer micro-batches, but its sum is divided by"
        " the full number"
    ),
    CARRIED: "the short window is completed in the next epoch",
    UNDIVIDED: (
        "the loop expects a loss that is divided by the count of the whole window, but"
        " the loss is divided only by the count of its micro-batch"
    ),
    COUPLED: "each pair sees only the negatives in its own micro-batch",
    REPEATED: (
        "the gradient of the logit scale is added once per micro-batch, not once per"
        " window"
    ),
    COUNTED: (
        "the first label of each item is counted, although the model never predicts it"
    ),
    CLIPPED: "each micro-batch's gradient is clipped, instead of the sum of gradients",
    EARLY: (
        "the last window of an epoch has three micro-batches; one update is applied"
        " after the second micro-batch, and another update (compared here) after the third"
    ),
    WEAKENED: (
        "a second loss, which is already a mean, is divided by the number of tokens too"
    ),
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
    program: str = ""
    """The smallest program of it, a test in the folder ``programs`` that imports
    nothing of this project: ``file::test[id]``. It fails if and only if there is a
    `cause`.
    """


TRANSFORMERS, TRL, SENTENCE = (
    "huggingface/transformers",
    "huggingface/trl",
    "huggingface/sentence-transformers",
)
ROWS = (
    Row(
        "gradaccum",
        "front page's loop, short batch",
        "gradaccum_rows.short_batch",
        "gradaccum",
    ),
    Row(
        "gradaccum",
        "front page's loop, short window",
        "gradaccum_rows.short_window",
        "gradaccum",
    ),
    Row(
        "transformers",
        "causal LM, ragged tokens",
        "transformers_rows.causal_lm",
        "huggingface",
    ),
    Row(
        "transformers",
        "label smoothing, ragged tokens",
        "transformers_rows.smoothed_lm",
        "huggingface",
    ),
    Row(
        "transformers",
        "BERT classifier",
        "transformers_rows.classification",
        "huggingface",
        UNDIVIDED,
        (f"{TRANSFORMERS}#47688",),
        program="test_transformers.py::test_bert_classifier",
    ),
    Row(
        "transformers",
        "T5",
        "transformers_rows.seq2seq",
        "huggingface",
        UNDIVIDED,
        (f"{TRANSFORMERS}#47688",),
        program="test_transformers.py::test_t5",
    ),
    Row(
        "transformers",
        "own mean loss, short batch",
        "transformers_rows.own_mean",
        "huggingface",
        MEANS,
        (f"{TRANSFORMERS}#37766",),
        program="test_transformers.py::test_loss_of_the_model[short_batch]",
    ),
    Row("trl", "SFT, ragged tokens", "trl_rows.sft", "huggingface"),
    Row(
        "trl",
        "GRPO, ragged completions",
        "trl_rows.grpo",
        "huggingface",
        program="test_trl.py::test_grpo_of_ragged_completions[dapo]",
    ),
    Row(
        "trl",
        "GRPO, `bnpo`",
        "trl_rows.grpo_bnpo",
        "huggingface",
        MEANS,
        (f"{TRL}#3021",),
        documented=True,
        program="test_trl.py::test_grpo_of_ragged_completions[bnpo]",
    ),
    Row(
        "trl",
        "DPO, short batch",
        "trl_rows.dpo",
        "huggingface",
        MEANS,
        program="test_trl.py::test_dpo[short_batch]",
    ),
    Row(
        "trl",
        "reward, short batch",
        "trl_rows.reward",
        "huggingface",
        MEANS,
        program="test_trl.py::test_reward[short_batch]",
    ),
    Row(
        "sentence-transformers",
        "MNRL",
        "sentence_rows.ranking",
        "huggingface",
        COUPLED,
        (f"{SENTENCE}#2916",),
        documented=True,
        program="test_sentence_transformers.py::test_multiple_negatives",
    ),
    Row(
        "sentence-transformers",
        "cached MNRL",
        "sentence_rows.cached_ranking",
        "huggingface",
    ),
    Row(
        "accelerate",
        "`accumulate()`, short batch",
        "accelerate_rows.short_batch",
        "huggingface",
        MEANS,
        program="test_accelerate.py::test_accumulated_update[short_batch]",
    ),
    Row(
        "accelerate",
        "`accumulate()`, short window",
        "accelerate_rows.short_window",
        "huggingface",
        WINDOW,
        program="test_accelerate.py::test_accumulated_update[short_window]",
    ),
    Row(
        "accelerate",
        "guide's counting loop, short batch",
        "accelerate_rows.counted",
        "huggingface",
    ),
    Row(
        "lightning",
        "short batch",
        "lightning_rows.short_batch",
        "lightning",
        MEANS,
        program="test_lightning.py::test_accumulated_update[short_batch]",
    ),
    Row(
        "lightning",
        "short window",
        "lightning_rows.short_window",
        "lightning",
        WINDOW,
        ("Lightning-AI/pytorch-lightning#19987",),
        program="test_lightning.py::test_accumulated_update[short_window]",
    ),
    Row(
        "open_clip_torch",
        "`--accum-freq`",
        "open_clip_rows.accum_freq",
        "lightning",
        REPEATED,
        ("mlfoundations/open_clip#957",),
        program="test_open_clip.py::test_accum_freq",
    ),
    Row(
        "torchtune",
        "recipe with prompts, ragged tokens",
        "torchtune_rows.with_prompt",
        "torchtune",
        program="test_torchtune.py::test_accumulated_update[with_prompt]",
    ),
    Row(
        "torchtune",
        "recipe without prompts, ragged tokens",
        "torchtune_rows.without_prompt",
        "torchtune",
        COUNTED,
        program="test_torchtune.py::test_accumulated_update[without_prompt]",
    ),
    Row("ms-swift", "SFT, ragged tokens", "swift_rows.sft", "swift"),
    Row(
        "ms-swift",
        "SFT, label smoothing",
        "swift_rows.smoothed_sft",
        "swift",
        UNDIVIDED,
        program="test_swift.py::test_sft[smoothed]",
    ),
    Row(
        "ms-swift",
        "DPO, short batch",
        "swift_rows.dpo_short_batch",
        "swift",
        MEANS,
        program="test_swift.py::test_dpo[short_batch]",
    ),
    Row(
        "ms-swift",
        "DPO, short window",
        "swift_rows.dpo_short_window",
        "swift",
        WINDOW,
        program="test_swift.py::test_dpo[short_window]",
    ),
    Row("verl", "SFT, ragged tokens", "verl_rows.sft", "verl"),
    Row("verl", "PPO, ragged responses", "verl_rows.token_mean", "verl"),
    Row("verl", "PPO, `seq-mean-token-mean`", "verl_rows.sequence_mean", "verl"),
    Row(
        "verl",
        "GMPO",
        "verl_rows.geometric_mean",
        "verl",
        UNDIVIDED,
        ("verl-project/verl#7913",),
        program="test_verl.py::test_gradient_of_a_mini_batch[geo_mean]",
    ),
    Row(
        "timm",
        "`train.py`, window of two",
        "timm_rows.window_of_two",
        "timm",
        program="test_timm.py::test_short_last_window[2]",
    ),
    Row(
        "timm",
        "`train.py`, window of three",
        "timm_rows.window_of_three",
        "timm",
        EARLY,
        program="test_timm.py::test_short_last_window[3]",
    ),
    Row(
        "keras",
        "short batch",
        "keras_rows.short_batch",
        "keras",
        MEANS,
        ("keras-team/keras#20241",),
        program="test_keras.py::test_accumulated_update[short_batch]",
    ),
    Row(
        "keras",
        "short window",
        "keras_rows.short_window",
        "keras",
        CARRIED,
        program="test_keras.py::test_accumulated_update[short_window]",
    ),
    Row(
        "optax",
        "`MultiSteps`, ragged tokens",
        "optax_rows.multisteps_ragged",
        "jax",
        MEANS,
        program="test_optax.py::test_multi_steps_of_ragged_items",
    ),
    Row(
        "optax",
        "`MultiSteps`, short window",
        "optax_rows.multisteps_short_window",
        "jax",
        CARRIED,
        program="test_optax.py::test_multi_steps_of_a_short_window",
    ),
    Row(
        "optax",
        "`microbatch` of means, ragged tokens",
        "optax_rows.microbatch_mean",
        "jax",
        MEANS,
        program="test_optax.py::test_microbatch_of_means",
    ),
    Row(
        "optax",
        "`microbatch` of sums, ragged tokens",
        "optax_rows.microbatch_sum",
        "jax",
    ),
    Row(
        "levanter",
        "`microbatched`, ragged mask",
        "levanter_rows.masked",
        "levanter",
        MEANS,
        ("marin-community/levanter#842",),
        program="test_levanter.py::test_microbatched[ragged]",
    ),
    Row("maxtext", "causal LM, ragged tokens", "maxtext_rows.causal_lm", "maxtext"),
    Row(
        "maxtext",
        "mixture of experts, balanced",
        "maxtext_rows.experts",
        "maxtext",
        WEAKENED,
        program="test_maxtext.py::test_accumulated_gradient[experts]",
    ),
    Row(
        "maxtext",
        "multi-token prediction",
        "maxtext_rows.token_after_next",
        "maxtext",
        WEAKENED,
        ("AI-Hypercomputer/maxtext#3311",),
        program="test_maxtext.py::test_accumulated_gradient[token_after_next]",
    ),
    Row(
        "flax",
        "cookbook's `MultiSteps`, ragged tokens",
        "flax_rows.cookbook",
        "jax",
        MEANS,
        program="test_flax.py::test_multi_steps_of_ragged_items",
    ),
    Row(
        "mindcv",
        "`TrainStep`, short batch",
        "mindspore_rows.mindcv_short_batch",
        "mindspore",
        MEANS,
        program="test_mindcv.py::test_accumulated_update[short_batch]",
    ),
    Row(
        "mindcv",
        "`TrainStep`, short window",
        "mindspore_rows.mindcv_short_window",
        "mindspore",
        CARRIED,
        program="test_mindcv.py::test_accumulated_update[short_window]",
    ),
    Row(
        "mindcv",
        "`TrainStep`, `clip_grad`",
        "mindspore_rows.mindcv_clipped",
        "mindspore",
        CLIPPED,
        program="test_mindcv.py::test_accumulated_update[clipped]",
    ),
    Row(
        "mindspore",
        "tutorial, short batch",
        "mindspore_rows.tutorial_short_batch",
        "mindspore",
        MEANS,
    ),
    Row(
        "mindspore",
        "tutorial, short window",
        "mindspore_rows.tutorial_short_window",
        "mindspore",
        CARRIED,
    ),
)
