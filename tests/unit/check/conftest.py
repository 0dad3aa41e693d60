"""The fake project."""

from tests.fake_project import files, only_fault  # noqa: F401 - fixtures
