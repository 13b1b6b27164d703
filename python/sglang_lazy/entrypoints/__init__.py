"""Server and engine entry points."""
