"""Tests of the names and folders of models."""
