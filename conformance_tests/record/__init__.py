"""The record: facts about the production code, held as data, so that a change that
loses one is seen as a line of a diff.

`names` are the public names with their signatures, and `refusals` the errors that are
raised. Each part has a file next to its module, with one fact per line:
``SECTION | FACT``. A section is a package.
"""
