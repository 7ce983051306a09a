"""One job from start to end: the driver, its group of workers and shards, and what they tell each other."""
