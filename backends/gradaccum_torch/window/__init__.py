"""The open window: add, close, flush, discard; and the watch over ``.grad`` while it is
open.
"""
