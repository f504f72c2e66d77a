"""Whether a loss is linear in its scale: grad(s x loss) = s x grad(loss), as loss scaling assumes. Accumulation needs nothing of it."""
