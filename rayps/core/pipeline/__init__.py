"""Pipeline schedules as data: build, check, simulate, draw."""
