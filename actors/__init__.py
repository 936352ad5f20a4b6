"""The engine's processes. Their import name is `ringlog.actors`: ringlog/actors is a link to this
directory."""

if __name__ != "ringlog.actors":
    raise ImportError(
        f"import ringlog.actors instead of {__name__}: two copies of a class would not be equal"
    )
