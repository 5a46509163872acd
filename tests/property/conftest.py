"""Ranks are threads here."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def ranks_share_a_core(one_core: None) -> None:
    pass
