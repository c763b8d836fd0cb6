"""Tests of how a deployment is placed, started and scaled."""
