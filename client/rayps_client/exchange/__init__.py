"""What a client receives and sends."""
