"""One window that is shared by several workers."""
