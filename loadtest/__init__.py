"""Load tester: speaks only HTTP to an OpenAI-compatible server."""
