"""The delivery scheduler: says who may read what next."""
