"""The record: facts about the production code, held as data, so that a change that
loses one is seen as a line of a diff.

`names` are the public ones with their signatures, `refusals` the errors that are
raised, `size` the tokens of each area and the rates of style, which may only fall. Each
part has a file beside its module, with one fact in a line: ``SECTION | FACT``. A
section is a package.
"""
