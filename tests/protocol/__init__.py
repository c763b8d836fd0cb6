"""Tests of messages, the wire format and membership."""
