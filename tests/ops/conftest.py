from collections.abc import Iterator

import pytest

from modelworker_testing.registries import restored_registries


@pytest.fixture(autouse=True)
def _same_registries() -> Iterator[None]:
    with restored_registries():
        yield
