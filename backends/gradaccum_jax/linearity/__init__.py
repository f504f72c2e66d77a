"""A check that a loss is linear in its scale, grad(s x loss) = s x grad(loss), which loss scaling relies on."""
