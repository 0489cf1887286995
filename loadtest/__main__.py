"""`python -m loadtest`: the load tester without the server around it."""

from loadtest.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
