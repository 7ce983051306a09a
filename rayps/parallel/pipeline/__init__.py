"""A model cut into stages: schedules as data (pure), and what runs them."""
