"""The pages' pictures as SVG: ``python -m benchmarks.pictures``.

Each is drawn from what was measured or runs here, and is as wide as a telephone's
screen, so that its words are legible there. Its description, inside of the file, has
the numbers that it shows: the tests compare them with what the code says today.
"""
