"""The sum of a window: its place and its arithmetic."""
