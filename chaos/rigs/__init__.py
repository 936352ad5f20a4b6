"""What several classes of faults need: file systems that lose power, a block store that fails on demand."""
