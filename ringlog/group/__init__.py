"""Consumer groups: how far a named group of consumers is with a topic, and who works on what. Pure."""
