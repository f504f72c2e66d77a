"""``gradaccum doctor``: is this environment one in which gradaccum works?"""
