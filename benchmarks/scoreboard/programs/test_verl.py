"""``forward_backward_batch`` of verl's FSDP engine, unwrapped and on a CPU, with the
actor's loss: the gradient of a mini-batch is the same in micro-batches and at once, for
PPO's policy loss and for GMPO's.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

ITEMS, PROMPT, RESPONSE, VOCABULARY = 8, 3, 6, 12
TINY = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


class Cpu(PlatformCUDA):
    """verl has platforms for accelerators only."""

    device_name = "cpu"

    def current_device(self) -> str:
        return "cpu"


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    set_platform(Cpu())
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def mini_batch(micro_batch_size: int) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    length = PROMPT + RESPONSE
    tokens = torch.randint(0, VOCABULARY, (ITEMS, length), generator=generator)
    noise = torch.rand(ITEMS, RESPONSE, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ITEMS, 1, generator=generator, dtype=torch.float64)
    items = {
        "input_ids": tokens,
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "response_mask": torch.ones(ITEMS, RESPONSE, dtype=torch.long),
        "attention_mask": torch.ones(ITEMS, length, dtype=torch.long),
        "position_ids": torch.arange(length).repeat(ITEMS, 1),
        "old_log_probs": -2 - noise,
        "advantages": advantages.repeat(1, RESPONSE),
    }
    data = left_right_2_no_padding(TensorDict(items, batch_size=ITEMS))
    tensordict_utils.assign_non_tensor(
        data,
        micro_batch_size_per_gpu=micro_batch_size,
        global_batch_size=ITEMS,
        temperature=1.0,
        use_remove_padding=False,
        use_dynamic_bsz=False,
    )
    return data


def gradient(policy_loss: str, micro_batch_size: int) -> Tensor:
    torch.manual_seed(0)
    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    model = Qwen2ForCausalLM(TINY).double()
    vars(engine).update(
        module=model,
        engine_config=SimpleNamespace(entropy_checkpointing=False),
        _autocast_dtype=torch.float32,
        ulysses_sequence_parallel_size=1,
        ulysses_device_mesh=None,
        use_ulysses_sp=False,
        pad_to_length=False,
    )
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=micro_batch_size,
        policy_loss=PolicyLossConfig(loss_mode=policy_loss),
    )
    loss = partial(ppo_loss, config)
    engine.forward_backward_batch(mini_batch(micro_batch_size), loss)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("policy_loss", ["vanilla", "geo_mean"])
def test_gradient_of_a_mini_batch(policy_loss: str) -> None:
    accumulated = gradient(policy_loss, micro_batch_size=2)
    large = gradient(policy_loss, micro_batch_size=ITEMS)
    torch.testing.assert_close(accumulated, large)
