"""Assertions of the recount say what they compare, as those of a test file do."""

import pytest

pytest.register_assert_rewrite("tests.support.report_recount")
