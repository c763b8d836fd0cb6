"""Decides where each request goes, and hears of every member."""
