"""What every test shares: seeded, machine-independent property tests."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "rollmesh",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("rollmesh")
