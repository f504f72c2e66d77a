"""The rows of verl: `forward_backward_batch` of its FSDP engine, unwrapped and on a
CPU, with its losses of SFT and of the actor.
"""

from __future__ import annotations

import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import left_right_2_no_padding

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, MICRO

PROMPT, RESPONSE, VOCABULARY = 3, 6, 12
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
}
TINY |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


class Cpu(PlatformCUDA):  # type: ignore[misc]
    """The package has platforms for accelerators only."""

    device_name = "cpu"

    def current_device(self) -> str:
        return "cpu"


set_platform(Cpu())
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1
)


def engine() -> Any:
    """The engine, without what it loads and shards."""
    torch.manual_seed(0)
    made = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    made.module, made._autocast_dtype, made.engine_config = (
        Qwen2ForCausalLM(Qwen2Config(**TINY)).double(),
        torch.float32,
        SimpleNamespace(),
    )
    (
        made.ulysses_sequence_parallel_size,
        made.ulysses_device_mesh,
        made.use_ulysses_sp,
        made.pad_to_length,
    ) = 1, None, False, False
    made.engine_config.entropy_checkpointing = False
    return made


def responses(micro: bool, even: bool) -> TensorDict:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (FULL, PROMPT + RESPONSE), generator=random)
    lengths = torch.full((FULL,), RESPONSE) if even else 2 + torch.arange(FULL) % 5
    kept = (torch.arange(RESPONSE) < lengths[:, None]).long()
    items = {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": kept,
    }
    items |= {
        "attention_mask": torch.cat(
            [torch.ones(FULL, PROMPT, dtype=torch.long), kept], 1
        )
    }
    items |= {"position_ids": torch.arange(PROMPT + RESPONSE).repeat(FULL, 1)}
    items |= {
        "old_log_probs": -2
        - torch.rand(FULL, RESPONSE, generator=random, dtype=torch.float64)
    }
    items |= {
        "advantages": torch.randn(
            FULL, 1, generator=random, dtype=torch.float64
        ).repeat(1, RESPONSE)
    }
    data = left_right_2_no_padding(TensorDict(items, batch_size=FULL))
    sizes = {
        "micro_batch_size_per_gpu": MICRO if micro else FULL,
        "global_batch_size": FULL,
        "temperature": 1.0,
    }
    tensordict_utils.assign_non_tensor(
        data, use_remove_padding=False, use_dynamic_bsz=False, **sizes
    )
    return data


def gradient(loss: Any, data: TensorDict) -> Gradients:
    made = engine()
    made.forward_backward_batch(data, loss)
    return {name: each.grad.numpy() for name, each in made.module.named_parameters()}


def sft(*, micro: bool, even: bool) -> Gradients:
    data = responses(micro, even)
    labels = [
        torch.cat([torch.zeros(PROMPT, dtype=torch.long), kept[kept > 0]])
        for kept in data["response_mask"]
    ]
    data["loss_mask"] = torch.nested.as_nested_tensor(labels, layout=torch.jagged)
    return gradient(partial(sft_loss, None), data)


def actor(
    micro: bool, even: bool, mean: str = "token-mean", policy: str = "vanilla"
) -> Gradients:
    sizes: dict[str, Any] = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": MICRO,
    }
    config = FSDPActorConfig(
        loss_agg_mode=mean, policy_loss=PolicyLossConfig(loss_mode=policy), **sizes
    )
    return gradient(partial(ppo_loss, config), responses(micro, even))


def token_mean(*, micro: bool, even: bool) -> Gradients:
    return actor(micro, even)


def sequence_mean(*, micro: bool, even: bool) -> Gradients:
    return actor(micro, even, "seq-mean-token-mean")


def geometric_mean(*, micro: bool, even: bool) -> Gradients:
    """Equal items. With `even` the policy loss is PPO's."""
    return actor(micro, True, policy="vanilla" if even else "geo_mean")
