"""Trains under a torch that lacks one private name: ``python -m conformance_tests.framework_tests.torch_renamed NAME``.

A name of torch's Python is taken away as torch would do it, by renaming: in the sources of torch's own modules before they are imported.
A name of torch's C is deleted.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from types import CodeType
from typing import Any


def rename(attribute: str) -> None:
    """Give `attribute` another name in all of torch's Python that is imported from here on."""
    word, plain = re.compile(rf"\b{attribute}\b"), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] == "torch" and word.search(source := self.get_data(self.path).decode()):
            return compile(word.sub(f"{attribute}_renamed", source), self.path, "exec", dont_inherit=True)
        return plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def take_away(name: str) -> None:
    """Import torch without `name`."""
    attribute = re.split("[.:]", name)[-1]
    if not name.startswith(("torch:_foreach", "torch:_C")):
        return rename(attribute)
    import torch
    import torch._dynamo  # It needs such names itself.

    delattr(torch._C if name.startswith("torch:_C") else torch, attribute)


def train() -> None:
    """A few windows: clipped, scaled past an overflow, saved in the middle, against torch's own arithmetic."""
    import torch
    from torch import nn

    import gradaccum

    def make(**options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        return model, gradaccum.wrap(inner, steps=2, clip_norm=0.5, **options)

    def learn(model: nn.Module, opt: Any, x: torch.Tensor) -> None:
        opt.backward(model(x).square().mean())
        opt.step()
        opt.zero_grad()

    batches = torch.arange(80.0, dtype=torch.float64).sin().reshape(5, 4, 4)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    bare = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for pair in batches[:4].reshape(2, 2, 4, 4):
        (sum(plain(x).square().mean() for x in pair) / 2).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5, foreach=False)
        bare.step()
        bare.zero_grad()
    for options in ({}, {"loss_scale": gradaccum.DynamicLossScale(2.0**4)}, {"separate_sums": True}):
        model, opt = make(**options)
        for x in batches[:3]:
            learn(model, opt, x)
        twin, other = make(**options)
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(opt.state_dict())
        learn(twin, other, batches[3])
        assert all(map(torch.allclose, twin.parameters(), plain.parameters())), options
        before = [parameter.detach().clone() for parameter in twin.parameters()]
        learn(twin, other, batches[0] * float("inf")) if options.get("loss_scale") else None
        if options.get("loss_scale"):
            learn(twin, other, batches[0])
            assert other.result.overflow
            assert all(map(torch.equal, twin.parameters(), before))


if __name__ == "__main__":
    take_away(sys.argv[1])
    train()
    from gradaccum_torch.torch_private import LOST, lacking

    assert sys.argv[1] in lacking(LOST), lacking(LOST)
    print("trained")
