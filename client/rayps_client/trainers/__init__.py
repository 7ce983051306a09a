"""A client's training, with numpy and with torch."""
