"""The open window: add, close, flush, discard."""
