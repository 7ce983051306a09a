"""The Ray that the service starts and watches."""
