"""The few places that use training and decoding together."""
