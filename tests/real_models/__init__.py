"""Tests with published models that packages carry."""
