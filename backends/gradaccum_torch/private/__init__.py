"""The private names of torch, with a fallback or a refusal for each."""
