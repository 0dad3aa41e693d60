"""The fake project."""

from tests.fake_project import files  # noqa: F401 - a fixture
