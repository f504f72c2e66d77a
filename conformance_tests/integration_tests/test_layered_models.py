"""Models of transformers and torchvision as lists of layers: the large batch's
gradient, and the usual window's bits.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch import backward, layered_backward

cross_entropy = nn.functional.cross_entropy
PLACES: list[dict[str, Any]] = [{}, {"within": "keep"}, {"borders": "recompute"}]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def require_equal_gradients(model: nn.Module, other: nn.Module) -> None:
    for own, expected in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(
            own, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max())
        )


def llama_layers(model: Any) -> list[Any]:
    def embed(
        embedding: nn.Module, rotary: nn.Module, ids: Tensor
    ) -> tuple[Tensor, Any]:
        hidden = embedding(ids)
        return hidden, rotary(hidden, torch.arange(ids.shape[1])[None])

    def block(layer: nn.Module, state: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        hidden, positions = state
        return layer(hidden, position_embeddings=positions), positions

    def head(norm: nn.Module, linear: nn.Module, state: tuple[Tensor, Any]) -> Tensor:
        logits: Tensor = linear(norm(state[0]))
        return logits

    inner = model.model
    blocks = [partial(block, layer) for layer in inner.layers]
    return [
        partial(embed, inner.embed_tokens, inner.rotary_emb),
        *blocks,
        partial(head, inner.norm, model.lm_head),
    ]


def tiny_llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **sizes)
    ).double()


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_llama(place: dict[str, Any], tied: bool) -> None:
    """Where embedding and head are one tensor, its additions have another order than in
    the usual window.
    """
    ids = torch.randint(0, 50, (7, 9), generator=torch.Generator().manual_seed(1))
    model = tiny_llama(tied)
    usual, large = copy.deepcopy(model), copy.deepcopy(model)
    loss = layered_backward(llama_layers(model), token_loss, ids, ids, steps=3, **place)
    expected = token_loss(large(input_ids=ids).logits, ids)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    require_equal_gradients(model, large)
    backward(lambda x, y: token_loss(usual(input_ids=x).logits, y), ids, ids, steps=3)
    assert tied or all(map(torch.equal, gradients(model), gradients(usual)))


def test_llama_is_updated_layer_by_layer() -> None:
    ids = torch.randint(0, 50, (7, 9), generator=torch.Generator().manual_seed(1))
    model = tiny_llama(False)
    usual = copy.deepcopy(model)
    opt, other = (
        gradaccum.wrap(
            torch.optim.AdamW(m.parameters(), lr=0.01), None, on_overflow="ignore"
        )
        for m in (model, usual)
    )
    alive: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(
                sum(gradient.nbytes for gradient in gradients(model))
            )
        )
    for _ in range(3):
        layered_backward(
            llama_layers(model), token_loss, ids, ids, steps=3, optimizer=opt
        )
        backward(
            lambda x, y: token_loss(usual(input_ids=x).logits, y),
            ids,
            ids,
            steps=3,
            optimizer=other,
        )
    assert all(
        map(torch.equal, model.state_dict().values(), usual.state_dict().values())
    )
    assert max(alive) <= 1.1 * sum(p.nbytes for p in model.model.layers[0].parameters())


def resnet_layers(model: Any) -> list[nn.Module]:
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    return [stem, *blocks, nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_resnet(place: dict[str, Any]) -> None:
    """In training each micro-batch has its own statistics, so there the usual window's
    bits are what to compare with.
    """
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    torch.manual_seed(0)
    model = models.resnet18(num_classes=5).double()
    x, y = torch.randn(6, 3, 32, 32).double(), torch.arange(6) % 5
    usual, large = copy.deepcopy(model), copy.deepcopy(model).eval()
    layered_backward(resnet_layers(model), cross_entropy, x, y, steps=3, **place)
    backward(lambda x, y: cross_entropy(usual(x), y), x, y, steps=3)
    assert all(map(torch.equal, gradients(model), gradients(usual)))
    assert all(
        map(torch.equal, model.state_dict().values(), usual.state_dict().values())
    )
    model.zero_grad()
    model.load_state_dict(large.state_dict())
    layered_backward(resnet_layers(model.eval()), cross_entropy, x, y, steps=3, **place)
    cross_entropy(large(x), y).backward()
    require_equal_gradients(model, large)
