"""The examples of property tests: the same in every run, so that a red test is red for everyone.

`--hypothesis-profile=thorough` tries more of them. Imported by `conftest`, and by `tests.mutants` without it.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "thorough",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("tests", settings.get_profile("thorough"), max_examples=25)
settings.load_profile("tests")
