"""How what a padded row holds spreads through one ATen operation."""
