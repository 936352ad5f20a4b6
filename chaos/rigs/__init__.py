"""Shared parts of several fault classes, such as file systems that lose power and a failing block store."""
