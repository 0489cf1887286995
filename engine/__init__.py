"""Requests, pages, model execution, sampling and verification, and the loop that ties them together."""
