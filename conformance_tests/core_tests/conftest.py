"""Generated examples are not judged by the clock: a machine may be busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any_speed")
