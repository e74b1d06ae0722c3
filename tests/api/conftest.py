from sandbox_fixtures import *  # noqa: F403 (fixtures of tests/sandbox too)
