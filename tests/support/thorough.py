"""Whether tests run every combination of their cases (`--thorough`), or enough of them to have every case."""

import os


# Read as modules of tests are imported: `conftest.py` sets it from the option, also for processes that are launched.
VARIABLE = "TESTS_ARE_THOROUGH"


def is_thorough() -> bool:
    return os.environ.get(VARIABLE) == "1"
