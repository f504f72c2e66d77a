"""A user's training script for torch: a type checker names each line that ends in
`# wrong`, and no other line.
"""

import torch

import gradaccum
import gradaccum_torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())

opt = gradaccum.wrap(
    optimizer,
    steps=4,
    reduction="sum_per_item",
    clip_norm=1.0,
    loss_scale=gradaccum.DynamicLossScale(),
    separate_sums=True,
)
opt.backward(model(torch.ones(3, 4)).sum(), weight=3)
opt.step()
applied = opt.result.applied
opt.flush()
scheduler = gradaccum.wrap(torch.optim.lr_scheduler.StepLR(opt, 10))
scheduler.step()
gradaccum.wrap(optimizer, steps=[(0, 4), (1000, 8)])
gradaccum.wrap(optimizer, steps=gradaccum.until_weight(4096))
gradaccum.wrap(optimizer, steps=lambda step: 4)
typed = gradaccum_torch.wrap(
    optimizer, steps=None, loss_scale=torch.amp.GradScaler("cpu"), module=model
)
typed.discard()

opt.backwrad(model(torch.ones(3, 4)).sum())  # wrong
typed.backwrad()  # wrong
gradaccum.wrap(optimizer, steps="four")  # wrong
gradaccum.wrap(optimizer)  # wrong
gradaccum.wrap(3, steps=4)  # wrong
gradaccum.wrap(torch.optim.AdamW, steps=4)  # wrong
gradaccum.wrap(optimizer, steps=4, clip_nrom=1.0)  # wrong
gradaccum.wrap(optimizer, steps=4, reduction="average")  # wrong
gradaccum_torch.wrap(optimizer, steps=4, gradient_sync="never")  # wrong
gradaccum_torch.wrap(model, steps=4)  # wrong
