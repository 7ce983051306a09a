"""One job from start to end: the driver, its workers and servers, recovery, status and journal."""
