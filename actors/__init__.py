"""The processes of an engine below the supervisor."""
