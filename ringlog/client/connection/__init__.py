"""A client's connection: options, session, waiting, and how it ends."""
