from typing import Any

import pytest
from tokenizers import Tokenizer

from modelworker_testing.gguf_files import Recipe, byte_level_source, recipe_of, tiny_model


@pytest.fixture(scope="session")
def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer, and the fields that a converter writes for it."""
    return byte_level_source()


@pytest.fixture
def good(byte_level: tuple[Tokenizer, dict[str, Any]]) -> Recipe:
    """A file that imports well."""
    return recipe_of(tiny_model(), byte_level[1])
