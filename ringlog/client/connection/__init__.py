"""A client's connection: options, session, waiting, and closing."""
