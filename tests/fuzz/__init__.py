"""Random programs against eager, with a seed and a count; a share of each runs with the tests."""
