"""Data sets, their partitions over clients, and cohort sampling."""
