"""HTTP front end, metrics, settings and command line: wires the other rooms together."""
